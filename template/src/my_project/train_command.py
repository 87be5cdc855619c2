"""Train: check everything, say what starts, launch it, end with one block.

    python -m my_project train configs/image_classification.yaml --optim.lr 3e-3
    python -m my_project train configs/image_classification.yaml --where fsdp2

Config files may stand anywhere; several are read one after the other. Options of its own:

  --where NAME         accelerate_configs/NAME.yaml, or the path of such a file; by default all GPUs
                       of this machine that divide the global batch, else one CPU process
  --num_processes N    processes on this machine; by default one per GPU, or those of the file
  --preflight          check the machine before training
  --dry-run            two steps, an evaluation, a save and an export in a temporary folder
The settings are those of the config (--help lists them, and with a config the recipe's fields).
"""

import inspect
import json
import os
import shlex
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cli, launch
from .command_line import did_you_mean, parse
from .config import Config, ConfigError
from .failures import short_path
from .files import format_seconds, read_json, read_status, read_yaml, step_of, writing
from .loading.layout import batch_layout
from .records import outcome
from .run_folder import refuse_other_settings, source_hash
from .safety.redaction import mask_command

FOLDER = Path("accelerate_configs")
DRY_RUN_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of this command, and the settings for the train module."""

    where: str = ""
    num_processes: int | None = None
    preflight: bool = False
    dry_run: bool = False
    settings: tuple[str, ...] = ()


def read_options(arguments: list[str]) -> Options:
    """Divide the command line; config files may stand first, without --config.

    Raises:
        ConfigError: an option has no value or a wrong one.
    """
    given: dict[str, Any] = {}
    settings: list[str] = []
    words = [*arguments]
    while words and not words[0].startswith("-"):
        settings += ["--config", words.pop(0)]
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name in ("--preflight", "--dry-run", "--dry_run"):
            if equals:
                raise ConfigError(f"{name} takes no value; leave it out to switch it off.")
            given[name[2:].replace("-", "_")] = True
        elif not word.startswith("-") and word.endswith((".yaml", ".yml")):
            settings += ["--config", word]
        elif name in ("--where", "--num_processes", "--num-processes"):
            if not equals and not words:
                raise ConfigError(f"{name} has no value; give one.")
            given[name[2:].replace("-", "_")] = value if equals else words.pop(0)
        else:
            settings.append(word)
            has_value = bool(words) and not words[0].startswith("--")
            if name.startswith("--") and not equals and has_value:
                settings.append(words.pop(0))
    if "num_processes" in given:
        text = given["num_processes"]
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"--num_processes is {text}, but must be a number of at least 1.")
        given["num_processes"] = int(text)
    return Options(**given, settings=tuple(settings))


# ---- where ---------------------------------------------------------------------------------------
def count_gpus() -> int:
    """Count the GPUs that torch sees, without initializing CUDA."""
    import torch

    return torch.cuda.device_count()


def most_that_divide(gpus: int, global_batch_size: int) -> int:
    """Return the largest number of processes up to gpus that divides the global batch."""
    return max((n for n in range(1, gpus + 1) if global_batch_size % n == 0), default=1)


def find_where(name: str) -> Path:
    """Return the path of an accelerate config by its name or path."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return path
    found = FOLDER / f"{name}.yaml"
    if not FOLDER.is_dir():
        raise ConfigError(
            f"there is no folder {FOLDER}/ in {Path.cwd()}: run the command in the project's"
            " folder, or give --where the path of an accelerate config."
        )
    if not found.is_file():
        names = sorted(path.stem for path in FOLDER.glob("*.yaml"))
        hint = did_you_mean(Path(name).stem, names) or f"; there are {', '.join(names) or 'none'}."
        raise ConfigError(f"--where {name}: there is no {found}{hint}")
    return found


def choose(options: Options, global_batch_size: int) -> tuple[Path, int, str]:
    """Choose the accelerate config and the number of processes.

    Returns:
        The path, the number, and why, as one line.
    """
    gpus = count_gpus()
    fitting = options.num_processes or most_that_divide(gpus, global_batch_size)
    if not options.where:
        if not gpus:
            path = find_where("cpu" if fitting == 1 else "cpu_2_processes")
            return path, fitting, "torch sees no GPU; --where chooses another"
        left = f", of which {fitting} divide the global batch" if fitting < gpus else ""
        reason = f"{gpus} GPU{'s' * (gpus > 1)}{left}; --where chooses another"
        return find_where("gpu" if fitting == 1 else "multi_gpu"), fitting, reason
    path = find_where(options.where)
    where = read_yaml(path)
    if (where.get("num_machines") or 1) > 1:
        raise ConfigError(
            f"{path} is for {where['num_machines']} nodes, but this command starts one: use"
            " launch/slurm.sbatch, launch/ssh.sh or launch/kubernetes.yaml."
        )
    in_file = where.get("num_processes") or 1
    if options.num_processes or launch.uses_cpu(where) or in_file == 1 or not gpus:
        return path, options.num_processes or in_file, ""
    return path, fitting, f"{gpus} GPU{'s' * (gpus > 1)}"


# ---- what starts ---------------------------------------------------------------------------------
def describe(started: launch.Launch, reason: str) -> str:
    """Return what starts, as lines."""
    config = started.config
    assert config is not None
    layout = batch_layout(config.batches, started.world_size)
    processes = f"{started.world_size} process{'es' * (started.world_size > 1)}"
    device = "the GPU" if started.gpus else "the CPU"
    if started.gpus > 1:
        device = f"{started.gpus} GPUs"
    precision = config.precision or started.precision
    path = started.flags[started.flags.index("--config_file") + 1]
    pairs = [
        ("run", f"{config.folder}, {continues(config)}"),
        ("on", f"{device}, {processes}, precision {precision}"),
        ("where", path + (f": {reason}" if reason else "")),
        (
            "batch",
            f"global {layout.global_batch_size} = micro-batch {layout.micro_batch_size} x processes"
            f" {layout.world_size} x accumulation {layout.accumulation}",
        ),
    ]
    return "\n".join([*outcome.rows(pairs), f"= {started.line}"])


def continues(config: Config) -> str:
    """Return whether the run is new, or from which step it continues."""
    if config.resume == "never":
        return "new (--resume never)"
    found = outcome.checkpoints(config.folder)
    if found:
        return f"continues from step {step_of(found[-1])}"
    return "new" if config.resume == "auto" else f"new, from {config.resume}"


def is_finished(config: Config) -> bool:
    """Return whether status.json and config.yaml say that exactly this run has finished.

    So that a finished run is shown at once. Else the train module decides.
    """
    status = read_status(config.folder)
    if status.get("outcome") != "finished" or not (config.folder / "export").is_dir():
        return False
    lengths = {
        "steps": config.steps,
        "epochs": config.epochs,
        "evaluation.patience": config.evaluation.patience,
    }
    try:
        saved = read_yaml(config.folder / "config.yaml")
        then = {"evaluation.patience": saved["evaluation"]["patience"], **saved}
        return all(then[name] == value for name, value in lengths.items())
    except (ConfigError, KeyError, TypeError):
        return False


def print_earlier(config: Config) -> None:
    """Show the result of a run that has finished before."""
    print("already finished, so nothing is trained", flush=True)
    source = inspect.getsourcefile(type(config.recipe))
    then = read_json(config.folder / "run.json").get("recipe_sha256")
    if then and source and source_hash(source) != then:
        print(
            f"{short_path(source)} has changed since: --resume never trains it again and keeps this"
            " run aside, --run_name trains another run",
            flush=True,
        )
    outcome.print_finished(config.folder, read_status(config.folder))


# ---- a dry run -----------------------------------------------------------------------------------
def dry_run(config: Config, flags: list[str], settings: tuple[str, ...], command: str) -> int:
    """Train two steps in a temporary folder, and say what the whole run will take."""
    runs = Path(config.runs_folder)
    is_there = runs.exists()
    with writing(runs):
        runs.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".dry_run_", dir=runs)
    name = folder.name
    try:
        _, started = launch.parse(
            [
                *(*flags, "-m", launch.TRAIN, *settings),
                *(f"--steps={DRY_RUN_STEPS}", "--epochs=null", "--resume=never"),
                *(f"--runs_folder={name}", "--telemetry.every_steps=1", "--telemetry.trackers=[]"),
                *("--evaluation.sanity_check=false", "--evaluation.every_steps=null"),
                "--profile.steps=null",
            ]
        )
        shown = describe(started, "a dry run")
        code = launch.start(started, shown=shown, command=command, is_dry_run=True)
        if code == 0:
            assert started.config is not None
            print_estimate(config, started.config.folder)
    finally:
        folder.cleanup()
        if not is_there:
            with suppress(OSError):
                runs.rmdir()
    return code


def print_estimate(config: Config, folder: Path) -> None:
    """Show what a step takes, and about what the whole run will."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if "samples_per_second" in record][-1]
    rate, size = last["samples_per_second"], config.batches.global_batch_size
    paused = read_status(folder).get("paused_seconds", 0.0)
    samples = read_json(folder / "run.json").get("lengths", {}).get("the training set", 0)
    steps = config.steps or max(1, round((config.epochs or 0) * (samples // size)))
    pauses = 1 + max(
        (steps - 1) // every if every else 0
        for every in (config.evaluation.every_steps, config.checkpoints.every_steps)
    )
    seconds = format_seconds(steps * size / rate + pauses * paused)
    outcome.print_block(
        "dry run: two steps, an evaluation, a save and an export work",
        outcome.rows(
            [
                ("step", f"{size / rate:.3g} s, {rate:.4g} samples per second, in the second step"),
                ("pause", f"{paused:.2g} s for an evaluation and a save"),
                ("memory", f"{last['peak_memory_bytes'] / 1e6:.0f} MB at the peak of a process"),
                ("whole", f"{steps} steps with {pauses} such pause(s): about {seconds}"),
                ("kept", "nothing"),
            ]
        ),
    )


# ---- the command ---------------------------------------------------------------------------------
def main(arguments: list[str]) -> int:
    """Check, say what starts, and launch; return the exit code."""
    launch.prepare_environment()
    options = read_options(arguments)
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as the processes that are started find it
    config = parse(list(options.settings), __doc__ or "", f"python -m {__package__} train")
    path, processes, reason = choose(options, config.batches.global_batch_size)
    batch_layout(config.batches, processes)
    config.profile.check(processes)
    flags = ["--config_file", str(path)]
    if processes != (read_yaml(path).get("num_processes") or 1):
        flags += ["--num_processes", str(processes)]
    if options.preflight:
        flags.append("--preflight")
    words = [*mask_command(arguments)]
    while "--resume" in words and words[words.index("--resume") :][1:2] == ["never"]:
        at = words.index("--resume")
        del words[at : at + 2]  # it would start again from step 0
    words = [word for word in words if word != "--resume=never"]
    command = f"python -m {__package__} train {shlex.join(words)}"
    if options.dry_run:
        return dry_run(config, flags, options.settings, command)
    refuse_other_settings(config)
    if config.resume == "auto" and is_finished(config):
        print_earlier(config)
        return 0
    _, started = launch.parse([*flags, "-m", launch.TRAIN, *options.settings])
    return launch.start(started, shown=describe(started, reason), command=command)


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
