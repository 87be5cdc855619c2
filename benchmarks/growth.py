"""Measure how the cost of each phase of a run grows with the number of (gloo, CPU) processes.

    python benchmarks/growth.py                        DDP on 2, 4, 8 and 16 processes
    python benchmarks/growth.py --where cpu_fsdp2      another accelerate config
    python benchmarks/growth.py --processes 2 4

A tiny MLP trains three steps, saves and exports; the same run is then resumed on half as many
processes, but at least two, for a fourth step. With cpu_hsdp there are two replicas of N / 2
shards, so at least four processes are needed. The processes share the cores, so wall time grows
with their number in any case. How the cost of a phase grows is shown by the CPU time per process,
and by the number of files that a process opens, and folders that it lists, in the run folder.

    start    from the call of main() to the first forward pass; without imports
    steps    three steps
    save     until the checkpoint is on the disk
    export   until all processes have ended
    resume   choosing and loading the checkpoint
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("start", "steps", "save", "export", "resume")
CONFIG = """\
recipe: {class_path: tasks.TinyMlp}
batches: {global_batch_size: 64, workers: 0, seed_samples: false}
checkpoints: {every_steps: 3}
optim: {lr: 1.0e-3}
telemetry: {trackers: []}
run_name: growth
"""


# ---- in each process -----------------------------------------------------------------------------
class Phases:
    """Measures what this process uses in each phase: wall time, CPU time, opened files."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.opened = 0
        self.now = self._read()
        self.used: dict[str, list[float]] = {}
        sys.addaudithook(self._count)

    def _count(self, event: str, arguments: tuple[Any, ...]) -> None:
        # files that safetensors opens are not counted: it opens them in Rust
        if event in ("open", "os.listdir", "os.scandir"):
            self.opened += str(arguments[0]).startswith(self.folder)

    def _read(self) -> list[float]:
        return [time.perf_counter(), time.process_time(), self.opened]

    def begin(self) -> None:
        """Begin a phase."""
        self.now = self._read()

    def end(self, phase: str) -> None:
        """Add to a phase what has been used since the last call, and begin the next phase."""
        before, self.now = self.now, self._read()
        used = [now - then for now, then in zip(self.now, before, strict=True)]
        so_far = self.used.get(phase, [0.0] * len(used))
        self.used[phase] = [a + b for a, b in zip(so_far, used, strict=True)]


def work(arguments: list[str]) -> None:
    """Train in this process, and write what each phase has used to a file beside the runs."""
    import tasks
    from my_project import train
    from my_project.checkpoint import exporting, resuming
    from my_project.checkpoint.saving import Checkpoints
    from my_project.settings import parse

    config = parse(arguments)
    phases = Phases(Path(config.runs_folder))
    is_resumed = (config.steps or 0) > 3
    loss, save, wait = tasks.TinyMlp.loss, Checkpoints.save, Checkpoints.wait
    choose, resume = resuming.choose, Checkpoints.resume
    original_export = exporting.export

    def first_loss(*values: Any) -> Any:
        tasks.TinyMlp.loss = loss  # type: ignore[method-assign]
        phases.end("start")
        return loss(*values)

    def timed_save(checkpoints: Checkpoints, state: Any, **named: Any) -> None:
        phases.end("steps")
        save(checkpoints, state, **named)

    def timed_wait(checkpoints: Checkpoints) -> None:
        wait(checkpoints)
        if "steps" in phases.used:
            phases.end("save")

    def export(*values: Any) -> None:
        Checkpoints.wait = wait  # type: ignore[method-assign]
        original_export(*values)

    def timed(function: Any) -> Any:
        def call(*values: Any) -> Any:
            phases.end("start")
            returned = function(*values)
            phases.end("resume")
            return returned

        return call

    tasks.TinyMlp.loss = first_loss  # type: ignore[method-assign]
    Checkpoints.save = timed_save  # type: ignore[method-assign]
    Checkpoints.wait = timed_wait  # type: ignore[method-assign]
    exporting.export = export
    if is_resumed:
        resuming.choose = timed(choose)
        Checkpoints.resume = timed(resume)  # type: ignore[method-assign]
    phases.begin()
    train.main(config)
    phases.end("export")
    used = {"resume": phases.used["resume"]} if is_resumed else phases.used
    rank = os.environ.get("RANK", "0")
    path = Path(config.runs_folder) / f"{config.steps}_{rank}.json"
    path.write_text(json.dumps(used), encoding="utf-8")


# ---- the launches --------------------------------------------------------------------------------
def where_for(path: Path, processes: int, folder: Path) -> Path:
    """Write an accelerate config for this number of processes on this machine."""
    where = yaml.safe_load(path.read_text(encoding="utf-8"))
    where |= {"num_processes": processes, "gpu_ids": ",".join(["-1"] * processes)}
    if mesh := where.get("parallelism_config"):
        mesh["parallelism_config_dp_replicate_size"] = 2
        mesh["parallelism_config_dp_shard_size"] = processes // 2
    copy = folder / f"where_{processes}.yaml"
    copy.write_text(yaml.safe_dump(where), encoding="utf-8")
    return copy


def launch(where: Path, processes: int, steps: int, folder: Path) -> dict[str, list[list[float]]]:
    """Train up to a step on some processes; return for each phase what each rank has used."""
    config = folder / "growth.yaml"
    config.write_text(CONFIG, encoding="utf-8")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command += [str(where_for(where, processes, folder)), str(ROOT / "benchmarks/growth.py")]
    command += ["--worker", "--config", str(config), "--steps", str(steps), "--runs_folder"]
    paths = os.pathsep.join([str(ROOT / "template/src"), str(ROOT / "benchmarks")])
    done = subprocess.run(
        [*command, str(folder)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    ranks = [json.loads((folder / f"{steps}_{rank}.json").read_text()) for rank in range(processes)]
    return {phase: [used[phase] for used in ranks] for phase in ranks[0]}


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--where", default="cpu_2_processes", help="a name in accelerate_configs/")
    options = parser.parse_args()
    where = ROOT / "accelerate_configs" / f"{options.where}.yaml"
    if not where.is_file():
        print(f"{where} does not exist: skipped.")
        return
    # accelerate needs other settings for a single CPU process, and HSDP needs two replicas of two
    # shards: accelerate cannot replicate a model that is not sharded
    min_processes = 4 if "parallelism_config" in where.read_text(encoding="utf-8") else 2
    rows: dict[str, list[str]] = {phase: [] for phase in PHASES}
    for processes in options.processes:
        if processes < min_processes:
            continue
        with tempfile.TemporaryDirectory() as folder:
            used = launch(where, processes, 3, Path(folder))
            used |= launch(where, max(min_processes, processes // 2), 4, Path(folder))
        for phase in PHASES:
            ranks = used[phase]
            saved_by = f" of {processes}" if phase == "resume" else ""
            cells = [phase, f"{len(ranks)}{saved_by}", f"{max(wall for wall, _, _ in ranks):.2f}"]
            cells += [f"{1000 * ranks[0][1]:.0f}"]
            cells += [f"{1000 * statistics.median(cpu for _, cpu, _ in ranks):.0f}"]
            cells += [f"{ranks[0][2]:.0f}", f"{ranks[-1][2]:.0f}"]
            rows[phase].append(f"| {' | '.join(cells)} |")
            print(rows[phase][-1], file=sys.stderr, flush=True)
    print("| phase | processes | s | CPU ms: rank 0 | median rank | opened: rank 0 | last rank |")
    print("|---" * 7 + "|", *(row for phase in PHASES for row in rows[phase]), sep="\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2:])
    else:
        main()
