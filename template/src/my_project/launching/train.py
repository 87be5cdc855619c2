"""Train: check everything, say what starts, launch it, end with a summary.

    python -m my_project train configs/image_classification.yaml --optim.lr 3e-3
    python -m my_project train configs/image_classification.yaml --where fsdp2

Config files may be anywhere among the arguments; a later file overrides an earlier one. Options:

  --where NAME         accelerate_configs/NAME.yaml, or the path of such a file; by default as many
                       GPUs of this machine as the global batch can use, or one CPU process
  --num_processes N    processes on this machine; by default one per GPU, but at most one per
                       micro-batch and at most as many as the file of --where says; for a CPU file,
                       as many as it says
  --max_restarts N     limit on consecutive restarts in place without a new step, 3 by default
  --preflight          check the machine before training
  --dry-run            all checks, two steps, an evaluation, a save and an export in a temporary
                       folder, which is kept only if one of them fails
All other options are settings of the config. --help lists them, and if a config is given, also the
settings of its recipe.
"""

import argparse
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from ..config import BatchesConfig, Config, ConfigError, each_setting
from ..exits import run
from ..files import read_yaml, writing
from ..loading.layout import batch_layout, max_processes
from ..process import DRY_RUN
from ..run_files import Record, each_record, read_info
from ..safety.redaction import mask_command
from ..settings import did_you_mean, parse
from ..words import PACKAGE, format_seconds
from . import launch
from .summary import print_block, rows
from .workers import count_in_child, opened_files_noted

COMMAND = f"python -m {PACKAGE} train"
FOLDER = Path("accelerate_configs")
DRY_RUN_STEPS = 2
DRY_RUN_SETTINGS = {  # a setting is passed only if it exists: its module may have been deleted
    "telemetry.every_steps": "1",
    "telemetry.trackers": "[]",
    "evaluation.every_steps": str(DRY_RUN_STEPS),  # not null, which optim.schedule plateau refuses
    "profile.steps": "null",
    "checkpoints.mirror": "null",
}


def read_options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this command's options, and the arguments of the train module."""
    parser = argparse.ArgumentParser(prog=COMMAND, add_help=False, allow_abbrev=False)
    parser.add_argument("--where", default="")
    parser.add_argument("--num_processes", "--num-processes", type=int)
    parser.add_argument("--max_restarts", "--max-restarts", type=int)
    parser.add_argument("--preflight", action="store_true")
    parser.add_argument("--dry_run", "--dry-run", action="store_true")
    return parser.parse_known_args(arguments)


# ---- where to train ------------------------------------------------------------------------------
def count_gpus() -> int:
    """Count the GPUs of CUDA or ROCm."""
    import torch

    return count_in_child(torch.cuda.device_count)


def find_where(name: str) -> Path:
    """Return the path of an accelerate config, which is given by its name or path."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        names = sorted(path.stem for path in FOLDER.glob("*.yaml"))
        hint = did_you_mean(path.stem, names) or f"; there are {', '.join(names) or 'none'}."
        raise ConfigError(f"--where {name}: there is no {path} in {Path.cwd()}{hint}")
    return path


def choose(options: argparse.Namespace, batches: BatchesConfig) -> tuple[Path, int]:
    """Return the path of the accelerate config and the number of processes to use."""
    if options.num_processes is not None and options.num_processes < 1:
        raise ConfigError(f"--num_processes is {options.num_processes}, but must be at least 1.")
    gpus = count_gpus()
    limit = max_processes(batches)
    processes = options.num_processes or max(1, min(gpus, limit))
    if options.where:
        path = find_where(options.where)
        content = launch.read_accelerate_config(path)
        if (content.get("num_machines") or 1) > 1:
            raise ConfigError(
                f"{path} is for {content['num_machines']} nodes, but this command starts one: use"
                " launch/slurm.sbatch, launch/ssh.sh or launch/kubernetes.yaml."
            )
        in_file = content.get("num_processes") or 1
        if options.num_processes or launch.uses_cpu(content) or in_file == 1 or not gpus:
            return path, options.num_processes or in_file
        processes = min(processes, in_file)
    else:
        names = ("gpu", "multi_gpu") if gpus else ("cpu", "cpu_2_processes")
        path = find_where(names[processes > 1])
        seen = f"torch sees {gpus} GPU{'s' * (gpus != 1)}"
        print(f"{path}: {seen}; --where chooses another file", flush=True)
    if not options.num_processes and processes < gpus:
        in_batch = f"{limit} micro-batches per step"
        why = in_batch if processes == limit else f"num_processes of {path}"
        print(f"using {processes} of {gpus} GPUs: {why}", flush=True)
    return path, processes


# ---- a dry run -----------------------------------------------------------------------------------
def dry_run(config: Config, flags: list[str], settings: list[str], command: str) -> int:
    """Train two steps in a temporary folder, and estimate the time and memory of the whole run."""
    runs = Path(config.runs_folder)
    with writing(runs):
        runs.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=".dry_run_", dir=runs)
    existing = {key for key, *_ in each_setting()}
    kind = ""
    try:
        started = launch.parse(
            [
                *(*flags, "-m", launch.TRAIN, *settings),
                *(f"--steps={DRY_RUN_STEPS}", "--epochs=null", "--resume=never"),
                f"--runs_folder={folder}",
                *(f"--{key}={value}" for key, value in DRY_RUN_SETTINGS.items() if key in existing),
            ]
        )
        os.environ[DRY_RUN] = "1"
        workers = launch.get_ready(started)
        if isinstance(workers, int):
            return workers
        ending = launch.run(started, workers, command)
        kind = ending.kind
        if kind != "finished":
            return ending.tell()
        print_estimate(config, started.config.folder)
    finally:
        if kind != "failed":  # the summary of a failure names its logs
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def print_estimate(config: Config, folder: Path) -> None:
    """Print the time and memory of a step, and an estimate for the whole run."""
    from ..ema import ema_problem

    last = Record()  # stays empty without records/performance.py
    for record in each_record(folder / "metrics.jsonl"):
        last = record if "samples_per_second" in record.values else last
    rate, size = last.number("samples_per_second", 0.0), config.batches.global_batch_size
    samples = read_info(folder).lengths.get("the training set", 0)
    steps = config.steps or max(1, round((config.epochs or 0) * (samples // size)))
    pairs = []
    if rate:
        count = f"{steps} step{'s' * (steps != 1)}"
        whole = f"{count}: about {format_seconds(steps * size / rate)}, plus evaluations"
        pairs = [
            ("step", f"{size / rate:.3g} s, {rate:.4g} samples per second, in the second step"),
            ("memory", f"{last.number('peak_memory_bytes') / 1e6:.0f} MB at the peak of a process"),
            ("whole", whole),
        ]
    pairs.append(("warning", ema_problem(config.optim.ema_decay, steps)))
    title = "dry run: two steps, an evaluation, a save and an export work; nothing is kept"
    print_block(title, rows(pairs))


# ---- the command ---------------------------------------------------------------------------------
def main(arguments: list[str]) -> int:
    """Check everything, say what starts, and launch it; return the exit code."""
    launch.prepare_environment()
    options, settings = read_options(arguments)
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # training processes have it there too
    launch.say_that_it_imports()
    with opened_files_noted():
        config = parse(settings, __doc__ or "", COMMAND)
    path, processes = choose(options, config.batches)
    batch_layout(config.batches, processes)
    flags = ["--config_file", str(path)]
    if processes != (read_yaml(path).get("num_processes") or 1):
        flags += ["--num_processes", str(processes)]
    if options.max_restarts is not None:
        flags += ["--max_restarts", str(options.max_restarts)]
    if options.preflight:
        flags.append("--preflight")
    command = f"{COMMAND} {shlex.join(mask_command(arguments))}"
    # the command that continues the run must not start it again from step 0, also if a config file
    # says "never"
    if config.resume == "never":
        command = re.sub(r" --resume[ =]never(?= |$)", "", command) + " --resume auto"
    if options.dry_run:
        return dry_run(config, flags, settings, command)
    started = launch.parse([*flags, "-m", launch.TRAIN, *settings])
    workers = launch.get_ready(started)
    return workers if isinstance(workers, int) else launch.run(started, workers, command).tell()


if __name__ == "__main__":
    run(main, sys.argv[1:])
