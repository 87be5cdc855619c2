"""Measure how uploads of saves change a process: its memory, and the time of its steps.

    python benchmarks/mirror.py                    50 saves of 12 MB, and 1.2 GB at 20 MB/s

The server speaks S3 (tests/s3_server.py), behind a proxy that limits the bytes per second. Training
has the first core to itself; server and proxy have the others. After each save has ended, steps are
timed while the mirror's thread uploads, and then as many steps while it is idle.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("template/src", "benchmarks", "tests")]


def main() -> None:
    """Print the memory after 5 saves and at the end, and the ratio of the step times."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--parameters", type=int, default=100, help="in millions")
    parser.add_argument("--rate", type=float, default=20.0, help="of the proxy, in MB/s")
    parser.add_argument("--uploads", type=int, default=3, help="number of timed uploads")
    parser.add_argument("--saves", type=int, default=50, help="saves, for the growth of memory")
    arguments = parser.parse_args()
    first, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, others or {first})  # server and proxy inherit it
    from s3_server import s3_server
    from throttle import throttled

    with (
        tempfile.TemporaryDirectory() as folder,
        s3_server(Path(folder) / "server") as server,
        throttled(server, 1e6 * arguments.rate) as slow,
    ):
        os.sched_setaffinity(0, {first})
        os.environ |= server.environment
        measure_memory(Path(folder) / "many", arguments.saves, server.url)
        os.environ |= slow.environment
        time_steps(Path(folder) / "timed", arguments.parameters, arguments.uploads, slow.url)


def make_saver(folder: Path, parameters: int, url: str):
    """Return a function that takes a step, and a saver with a mirror.

    Args:
        folder: the folder for runs.
        parameters: the size of the model, in millions of parameters.
        url: the URL of the mirror.
    """
    import tasks
    import torch
    from my_project.checkpoint import saving
    from my_project.config import BatchesConfig, CheckpointsConfig, Config
    from my_project.mirror.upload import Mirror
    from my_project.run_folder import Run

    torch.set_num_threads(1)
    layers = [torch.nn.Linear(1000, 1000, bias=False) for _ in range(parameters)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)
    batch = torch.randn(8, 1000)

    def step() -> float:
        began = time.perf_counter()
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    config = Config(
        recipe=tasks.TinyMlp(),
        batches=BatchesConfig(global_batch_size=8),
        steps=1,
        checkpoints=CheckpointsConfig(keep=1, mirror=url),
        runs_folder=str(folder),
        run_name="run",
    )
    run = Run(config, 0)
    run.hosts = ["localhost"]
    run.begin()
    saver = saving.Checkpoints(run, model, optimizer, None)
    saver.mirror = Mirror(saver)
    saver.mirror.begin()
    step()
    return step, saver


def time_steps(folder: Path, parameters: int, uploads: int, url: str) -> None:
    """Print the time of a step during uploads and without them."""
    from my_project.state import TrainState

    step, saver = make_saver(folder, parameters, url)
    during: list[float] = []
    alone: list[float] = []
    seconds: list[float] = []
    for number in range(uploads):
        saver.save(TrainState(step=number))
        saver.wait()
        began, count = time.perf_counter(), 0
        while not saver.mirror.wait(0):
            during.append(step())
            count += 1
        seconds.append(time.perf_counter() - began)
        alone += [step() for _ in range(count)]
    assert not saver.mirror.failure, saver.mirror.failure
    median_during, median_alone = statistics.median(during), statistics.median(alone)
    newest = max(folder.glob("run/checkpoints/*"))
    size = sum(path.stat().st_size for path in newest.iterdir())
    print(
        f"{size / 1e9:.2f} GB uploaded in {statistics.median(seconds):.1f} s; a step takes"
        f" {1e3 * median_during:.1f} ms meanwhile and {1e3 * median_alone:.1f} ms alone (medians of"
        f" {len(during)}): {median_during / median_alone:.3f}; means"
        f" {statistics.mean(during) / statistics.mean(alone):.3f}",
        flush=True,
    )


def measure_memory(folder: Path, saves: int, url: str) -> None:
    """Print the resident memory after 5 saves and after all saves."""
    import psutil
    from my_project.state import TrainState

    _, saver = make_saver(folder, 1, url)
    resident: list[float] = []
    for number in range(saves):
        saver.save(TrainState(step=number))
        saver.wait()
        saver.mirror.wait(600)
        assert not saver.mirror.failure, saver.mirror.failure
        resident.append(psutil.Process().memory_info().rss / 1e6)
    print(
        f"{saves} saves: {resident[min(4, saves - 1)]:.0f} MB resident after 5,"
        f" {resident[-1]:.0f} MB at the end"
    )


if __name__ == "__main__":
    main()
