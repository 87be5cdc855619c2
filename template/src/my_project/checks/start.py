"""The checks of a start, in the order in which the loop calls them, on every rank."""

from accelerate import Accelerator
from torch import nn

from ..contract import RecipeModule
from ..recipe import DataInfo, Dataset, Datasets
from ..run_folder import Run
from .agreement import Agreement
from .findings import Findings
from .ranks import EqualRanks
from .recipe import check_settings, check_sums


class Checks:
    """Find what would silently make training wrong; ranks are not compared within a step."""

    def __init__(
        self,
        accelerator: Accelerator,
        run: Run,
        data_info: DataInfo,
        train_set: Dataset,
        validation_sets: Datasets,
    ) -> None:
        """Begin to read samples, while the model is built."""
        self.accelerator = accelerator
        self.run = run
        self.train_set = train_set
        self.validation_sets = validation_sets
        self.findings = Findings(accelerator, run)
        self.agreement = Agreement(self.findings, data_info, train_set, validation_sets)
        self.forwards: set[int] = set()  # the steps in which a forward has been checked

    def compare(self, model: nn.Module, *, is_resumed: bool) -> None:
        """Compare samples, code and model between ranks, and with the last start."""
        self.agreement.compare(model, is_resumed=is_resumed)

    def before_first_step(self, model: RecipeModule) -> None:
        """Look for settings without effect, and for sums that do not add up."""
        check_settings(self.findings)
        check_sums(self.findings, model, self.train_set, self.validation_sets)

    def watch(self, model: RecipeModule) -> None:
        """Watch the weights from here on; they have been loaded."""
        self.ranks = EqualRanks(self.findings, model, self.accelerator)
        self.first_step = self.run.step

    def after_forward(self, step: int) -> None:
        """Check what the first forward of each of the first two steps has changed."""
        if step < self.first_step + 2 and step not in self.forwards:
            self.forwards.add(step)
            self.ranks.after_forward()

    def after_step(self, step: int) -> None:
        """Compare weights and buffers between the ranks after the first step."""
        if step == self.first_step:
            self.ranks.after_step()

    def at_save(self) -> None:
        """Compare weights and buffers between the ranks."""
        self.ranks.at_save()
