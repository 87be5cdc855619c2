"""List the samples of a step, by rank and micro-batch: where to look after a spike.

    python -m my_project batch runs/image_classification --step 1234

Steps are numbered as in metrics.jsonl, from 1. The samples of a step follow from the config, the
seed and the length of the training set, so no data is read; an index is that of the training set
(train_set[index]). Of a stream the positions in its lanes are listed, where they are known.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from .. import cli
from ..command_line import RecipeSettings
from ..config import BatchesConfig, Config, ConfigError, read_yaml
from ..files import read_json
from ..loading.layout import BatchLayout, batch_layout, lanes_of, total_steps
from .outcome import checkpoints
from .runs import read_records

LARGEST = 2**53  # a number in a run folder
MAP_STYLE, OVERFIT, STREAM = "the training set", "the whole training set", "the lanes of the stream"


# ---- what the run folder says --------------------------------------------------------------------
def read_numbers(folder: Path) -> Config:
    """Read the settings that the samples follow from, and nothing else, from config.yaml."""
    path = folder / "config.yaml"
    settings = read_yaml(path)
    batches = settings.get("batches")
    if not isinstance(batches, dict):
        raise ConfigError(f"{path} cannot be read: it lacks batches.")

    def number(source: dict[str, Any], name: str, default: int | None = None) -> Any:
        value = source.get(name, default)
        is_number = type(value) is int or (name == "epochs" and type(value) is float)
        if value is not None and not (is_number and 0 <= value <= LARGEST):
            raise ConfigError(f"{path} cannot be read: {name} is {str(value)[:50]!r}.")
        return value

    recipe: Any = RecipeSettings()  # none of its code runs
    return Config(
        recipe=recipe,
        batches=BatchesConfig(
            global_batch_size=number(batches, "global_batch_size", 0),
            micro_batch_size=number(batches, "micro_batch_size", 0),
        ),
        steps=number(settings, "steps"),
        epochs=number(settings, "epochs"),
        overfit_batches=number(settings, "overfit_batches"),
        seed=number(settings, "seed", 0),
    )


def read_start(folder: Path, records: list[dict[str, Any]], step: int) -> dict[str, Any]:
    """Return the record of the start that did a step, or will do it.

    Raises:
        ConfigError: there is none, as of a run whose records had no kind yet.
    """
    found = [
        record
        for record in records
        if record.get("kind") == "start" and record["step"] < step and _count(record, "world_size")
    ]
    if not found:
        raise ConfigError(
            f"{folder}/metrics.jsonl does not say on how many processes step {step} ran; add"
            " --processes N."
        )
    return found[-1]  # a start removes the records of the steps that it does again


def _count(source: Any, name: str) -> int:
    """Return a number of a JSON object; 0 if it is not there."""
    value = source.get(name) if isinstance(source, dict) else None
    return value if type(value) is int and 1 <= value <= LARGEST else 0


# ---- a step --------------------------------------------------------------------------------------
def check_step(step: int, total: int) -> None:
    """Refuse a step that the run does not have."""
    if step > total:
        raise ConfigError(f"step {step} is beyond the end of the run, which has {total} steps.")


def samples_of(config: Config, layout: BatchLayout, samples: int, step: int) -> dict[str, Any]:
    """Return the epoch of a step, and its samples by rank and micro-batch.

    Args:
        config: the run's.
        layout: of the global batch.
        samples: the length of the whole training set.
        step: counted from 1.
    """
    from ..loading.sampler import SliceSampler, first_batches

    data, _ = first_batches(config, range(samples), {})
    check_step(step, total_steps(config, data, layout))
    # micro-batch j of rank r is slice j * world_size + r, so that one process has them all
    count = layout.micro_batches_per_step
    alone = dataclasses.replace(layout, world_size=1, accumulation=count)
    slices = list(SliceSampler(len(data), alone, 0, config.seed, range(step - 1, step)))
    indices = [[data[index] for _, index in keys] for keys in slices]
    ranks = [indices[rank :: layout.world_size] for rank in range(layout.world_size)]
    return {"epoch": slices[0][0][0], "ranks": ranks}


def lanes_in(
    config: Config, layout: BatchLayout, lanes: int, step: int, began: tuple[int | None, int | None]
) -> dict[str, Any]:
    """Return the lanes of a step by rank and micro-batch, and the positions in each.

    Args:
        config: the run's.
        layout: of the global batch.
        lanes: of the stream.
        step: counted from 1.
        began: the epoch of the step, and its first step, counted from 0; None if not known.
    """
    check_step(step, total_steps(config, _Lanes(lanes), layout))
    (epoch, first), per_step = began, config.batches.global_batch_size // lanes
    start = None if first is None else (step - 1 - first) * per_step
    return {
        "epoch": epoch,
        "positions": None if start is None else [start, start + per_step - 1],
        "ranks": [
            [list(part) for part in lanes_of(layout, lanes, rank)]
            for rank in range(layout.world_size)
        ],
    }


@dataclasses.dataclass(frozen=True)
class _Lanes:
    """A stream without data."""

    lanes: int

    def lane(self) -> None:
        """Do nothing: this makes it a stream."""


def epoch_of_stream(
    folder: Path, records: list[dict[str, Any]], step: int
) -> tuple[int | None, int | None]:
    """Return the epoch of a step and its first step, counted from 0; None for what is not known.

    Both follow from the data alone. The checkpoints that are kept have them, and each record has
    the epoch.
    """
    k = step - 1
    starts = {0: 0}
    at_least, at_most = [0], []
    for path in checkpoints(folder):
        state = read_json(path / "state.json")
        if type(state.get("epoch")) is not int:
            continue
        if epoch := _count(state, "epoch"):  # epoch 0 begins at step 0
            starts[epoch] = _count(state, "epoch_start")
            (at_least if starts[epoch] <= k else at_most).append(epoch - (starts[epoch] > k))
        if _count(state, "step") > k:
            at_most.append(epoch)
    for record in records:
        if type(epoch := record.get("epoch")) is int:
            # at the end of an epoch, that of a record may already be the next one
            (at_most if record["step"] > k else at_least).append(epoch)
    epoch = max(at_least)
    known = bool(at_most) and epoch == min(at_most)
    return (epoch, starts.get(epoch)) if known else (None, None)


# ---- the command ---------------------------------------------------------------------------------
def describe(folder: Path, step: int, processes: int | None, samples: int | None) -> dict[str, Any]:
    """Return what is listed of a step.

    Args:
        folder: of the run.
        step: counted from 1.
        processes: None: those that did the step.
        samples: of the training set; None: as run.json has it.
    """
    for name, value in {"step": step, "processes": processes, "samples": samples}.items():
        if value is not None and value < 1:
            counted = ": steps are numbered from 1, as in metrics.jsonl" * (name == "step")
            raise ConfigError(f"--{name} is {value}, but must be at least 1{counted}.")
    records = read_records(folder)
    config = read_numbers(folder)
    if processes is None:
        start = read_start(folder, records, step)
        processes = _count(start, "world_size")
        if micro := _count(start, "micro_batch_size"):
            batches = dataclasses.replace(config.batches, micro_batch_size=micro)
            config = dataclasses.replace(config, batches=batches)
    layout = batch_layout(config.batches, processes)
    lengths = read_json(folder / "run.json").get("lengths")
    whole = OVERFIT if config.overfit_batches else MAP_STYLE
    if lanes := _count(lengths, STREAM):
        began = epoch_of_stream(folder, records, step)
        found = lanes_in(config, layout, lanes, step, began)
    elif samples := samples or _count(lengths, whole):
        found = samples_of(config, layout, samples, step)
    else:
        raise ConfigError(
            f"{folder}/run.json does not have the length of {whole}; add --samples N."
        )
    parts = {"micro_batch_size": layout.micro_batch_size, "processes": layout.world_size}
    parts |= {"accumulation": layout.accumulation, "is_stream": bool(lanes)}
    return {"run": str(folder), "step": step} | parts | found


def print_batch(found: dict[str, Any]) -> None:
    """Print a line per rank and micro-batch, wrapped in a terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    size = found["micro_batch_size"] * found["processes"] * found["accumulation"]
    epoch, positions = found["epoch"], found.get("positions")
    lines = [
        f"{found['run']}: step {found['step']}, epoch"
        f" {'unknown' if epoch is None else epoch} (the first is 0)",
        f"global batch {size} = micro-batch {found['micro_batch_size']} x processes"
        f" {found['processes']} x accumulation {found['accumulation']}",
    ]
    if found["is_stream"] and positions:
        lines.append(f"of each lane the samples {positions[0]} to {positions[1]} of the epoch")
    elif found["is_stream"]:
        lines.append(
            "the positions in the lanes are not known, since no checkpoint that is kept has the"
            " step at which this epoch began"
        )
    what = "lanes " if found["is_stream"] else ""
    for rank, micro_batches in enumerate(found["ranks"]):
        for j, numbers in enumerate(micro_batches):
            line = f"rank {rank}, micro-batch {j}: {what}{' '.join(map(str, numbers))}"
            lines += textwrap.wrap(line, width, subsequent_indent="    ") if width else [line]
    print("\n".join(lines))


def main(arguments: argparse.Namespace) -> None:
    """List the samples of a step."""
    folder = Path(arguments.run)
    found = describe(folder, arguments.step, arguments.processes, arguments.samples)
    if arguments.json:
        print(json.dumps(found))
    else:
        print_batch(found)


if __name__ == "__main__":
    parser = cli.make_parser(__doc__)
    parser.add_argument("run", help="the run folder")
    parser.add_argument("--step", type=int, required=True, help="a step, as in metrics.jsonl")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument(
        "--processes", type=int, help="their number; by default of those that did the step"
    )
    parser.add_argument(
        "--samples", type=int, help="the length of the training set; by default as in run.json"
    )
    cli.run(main, parser.parse_args())
