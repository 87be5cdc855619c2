"""Two runs in one process work one after the other; at the same time, in threads, is refused."""

import threading
from dataclasses import dataclass
from typing import Any

import pytest
from my_project.config import Config, ConfigError
from ragged import Ragged
from runs import assert_same_weights, change, make_config, quick, train

OUTCOMES: list[Any] = []


def train_beside(config: Config) -> None:
    try:
        OUTCOMES.append(train(config))
    except ConfigError as error:
        OUTCOMES.append(error.exit_code)


@dataclass(frozen=True, kw_only=True)
class Studied(Ragged):
    """Begins another run in a thread when this run is at `where`, as a study with two jobs does."""

    other: Any = None
    where: str = ""
    dropout: float = 0.3

    def begin_other(self, where: str) -> None:
        if where == self.where:
            thread = threading.Thread(target=train_beside, args=[self.other])
            thread.start()
            thread.join()

    def build_datasets(self, data_info: dict[str, Any]) -> Any:
        self.begin_other("build_datasets")
        return super().build_datasets(data_info)

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        self.begin_other(f"step {step}")
        return super().loss(model, batch, step)


@pytest.mark.parametrize("where", quick(1, ["build_datasets", "step 2"]))
def test_a_run_in_another_thread_is_refused_and_changes_no_bit(tmp_path, where):
    alone = make_config(tmp_path, Studied(), run_name="alone", steps=4)
    other = change(alone, run_name="other")
    beside = change(alone, run_name="beside", recipe=Studied(other=other, where=where))
    OUTCOMES.clear()
    assert train(alone) == 0
    assert train(beside) == 0
    assert set(OUTCOMES) == {2}
    assert not other.folder.exists(), "nothing is written"
    assert_same_weights(beside, alone)
    assert train(other) == 0, "after the other"
    assert_same_weights(other, alone)


def test_a_run_after_one_that_failed_trains(tmp_path):
    config = make_config(tmp_path, Ragged(fault="raise", fault_at=1, fault_on_rank=0), steps=2)
    with pytest.raises(ValueError, match="told to fail"):
        train(config)
    assert train(change(config, recipe__fault="")) == 0
