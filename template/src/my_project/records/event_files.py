"""The config in TensorBoard's event files, which lie in the run folder."""

from itertools import islice
from pathlib import Path
from textwrap import indent
from typing import Any

from ..config import to_yaml
from ..run_folder import Run

TAG = "config"


def write_config(writer: Any, run: Run, settings: dict[str, Any], step: int) -> None:
    """Write the config as a text and as hyperparameters, once; the text again where it changed.

    Args:
        writer: torch's SummaryWriter.
        run: the run folder.
        settings: by their dotted names.
        step: steps done.
    """
    from torch.utils.tensorboard.summary import hparams

    text = indent(to_yaml(run.config), "    ")  # literal in Markdown
    before = config_in(Path(writer.log_dir))
    if text == before:
        return
    writer.add_text(TAG, text, step)
    if before is None:
        # The writer's add_hparams would open another file, note the end of the run, and name the
        # columns of the table: TensorBoard then leaves out what only other runs have.
        named = {name: "null" if value is None else value for name, value in settings.items()}
        _, start, _ = hparams(named, {})
        writer.file_writer.add_summary(start)
    writer.flush()


def config_in(folder: Path) -> str | None:
    """Return the config that the newest event file with one holds, near its start."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    for path in sorted(folder.glob("events.out.tfevents.*"), reverse=True):
        try:
            for event in islice(EventFileLoader(str(path)).Load(), 8):
                for value in event.summary.value:
                    if value.tag == f"{TAG}/text_summary":
                        return value.tensor.string_val[0].decode()
        except Exception:  # a damaged file, of which TensorBoard shows what it can
            continue
    return None
