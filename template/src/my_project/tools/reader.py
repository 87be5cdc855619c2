"""Read the records of a run, finished or not."""

from pathlib import Path
from typing import Any

from ..config import ConfigError
from ..files import RUN_FORMAT, each_record, read_json

PARTS_OF_A_RUN = ("config.yaml", "status.json", "run.json", "metrics.jsonl", "checkpoints")


def read_records(run: str | Path) -> list[dict[str, Any]]:
    """Read the records of a run, finished or not: `pandas.DataFrame(read_records(run))`.

    Args:
        run: the run folder.

    Returns:
        The records of metrics.jsonl, in its order, as docs/run-folder.md describes them.

    Raises:
        ConfigError: this is not a run folder.
    """
    check_run(Path(run))
    return parse_records(Path(run))[0]


def check_run(folder: Path) -> None:
    """Refuse a folder that is not of a run."""
    if not is_run(folder):
        raise ConfigError(
            f"{folder} is not a run folder; give the path of one such as runs/image_classification."
        )


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a part of a run."""
    return any((folder / name).exists() for name in PARTS_OF_A_RUN)


def format_problem(folder: Path) -> str:
    """Return a line about a run folder of another format than the one read here; "" for that."""
    about = read_json(folder / "run.json")
    found = about.get("format", 0)
    if not about or found == RUN_FORMAT:
        return ""
    return (
        f"{folder} has format {found} of a run folder, and this version reads {RUN_FORMAT}: what it"
        " does not know is left out."
    )


def parse_records(folder: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the records of metrics.jsonl, and whether the file is damaged."""
    try:
        found = list(each_record(folder / "metrics.jsonl"))
    except OSError:  # a folder
        return [], True
    records = [record for record in found if record]
    return records, len(records) < len(found)
