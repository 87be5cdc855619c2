"""Time how long a training step waits for a checkpoint, and how much a save slows the steps.

    python benchmarks/saving.py                        100 M parameters with AdamW: 1.2 GB
    python benchmarks/saving.py --device cuda --folder /shared/storage

After each step the loop's call that saves is timed, and so is accelerate's `save_state` of the same
model and optimizer: it writes while the step waits, neither flushes to disk nor hashes. The kinds
take turns, so that another load of the machine hits each alike. The first save in the background
also allocates the host memory that later saves reuse.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Time saves in the foreground, in the background and by save_state, after a first of each."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parameters", type=int, default=100, help="in millions")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", help="folder for the checkpoints; default: a temporary folder")
    parser.add_argument(
        "--niceness",
        type=int,
        help="of the thread that saves, in place of what the loop gives it (Linux)",
    )
    parser.add_argument("--saves", type=int, default=6, help="of each kind, the first not counted")
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT / "template" / "src"), str(ROOT / "benchmarks")]
    import accelerate
    import tasks
    import torch
    from my_project.checkpoint import saving
    from my_project.config import BatchesConfig, CheckpointsConfig, Config
    from my_project.run_folder import Run
    from my_project.state import TrainState

    if arguments.niceness is not None:
        saving.NICENESS = arguments.niceness
    layers = [torch.nn.Linear(1000, 1000, bias=False) for _ in range(arguments.parameters)]
    model = torch.nn.Sequential(*layers).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(8, 1000, device=arguments.device)

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if batch.is_cuda:
            torch.cuda.synchronize()

    def saver_of(kind: str) -> saving.Checkpoints:
        config = Config(
            recipe=tasks.TinyMlp(),
            batches=BatchesConfig(global_batch_size=8),
            steps=1,
            checkpoints=CheckpointsConfig(background=kind == "background", keep=1),
            runs_folder=folder,
            run_name=kind,
        )
        return saving.Checkpoints(Run(config, 0), model, optimizer, None, None)

    def take_step(seconds: list[float]) -> None:
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)

    step()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {arguments.device}")
    accelerator = accelerate.Accelerator(cpu=arguments.device == "cpu")
    accelerator.prepare(model, optimizer)
    waited: dict[str, list[float]] = {"save_state": [], "foreground": [], "background": []}
    saved: list[float] = []
    cpu: dict[str, list[float]] = {kind: [] for kind in waited}
    steps: dict[str, list[float]] = {"during": [], "alone": []}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        savers = {kind: saver_of(kind) for kind in ("foreground", "background")}
        for number in range(arguments.saves):
            for kind, seconds in waited.items():
                os.sync()  # what the kind before has left to the kernel
                start, cpu_start = time.perf_counter(), time.process_time()
                if kind == "save_state":
                    accelerator.save_state(f"{folder}/save_state")
                else:
                    savers[kind].save(TrainState(step=number, items_per_micro_batch=1.0))
                seconds.append(time.perf_counter() - start)
                if kind == "background":
                    thread = savers[kind]._thread
                    while thread and thread.is_alive():
                        take_step(steps["during"])
                    saved.append(time.perf_counter() - start)
                else:
                    cpu[kind].append(time.process_time() - cpu_start)
                    take_step(steps["alone"])
            savers["background"].wait()
        for saver in savers.values():
            saver.check("checkpoint")
        newest = f"foreground/checkpoints/step_{arguments.saves - 1:08d}"
        files = [path for path in Path(folder, newest).iterdir() if path.is_file()]
        print(f"a checkpoint is {sum(path.stat().st_size for path in files) / 1e9:.2f} GB")
    of_save_state = statistics.median(waited["save_state"][1:])
    for kind, seconds in waited.items():
        median = statistics.median(seconds[1:])
        line = (
            f"{kind:10}: the step waits {median:.2f} s ({median / of_save_state:.0%} of save_state;"
        )
        line += f" first {seconds[0]:.2f} s)"
        if cpu[kind]:
            line += f", CPU time {statistics.median(cpu[kind][1:]):.2f} s"
        print(line)
    during, alone = (statistics.median(seconds) for seconds in steps.values())
    print(
        f"background: saved after {statistics.median(saved[1:]):.2f} s; a step takes {during:.2f} s"
        f" during a save, {alone:.2f} s alone ({during / alone:.1f} times)",
        flush=True,
    )


if __name__ == "__main__":
    main()
