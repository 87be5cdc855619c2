"""Time how long a training step waits for a checkpoint, and how much a save slows the steps.

    python benchmarks/saving.py                        100 M parameters with AdamW: 1.2 GB
    python benchmarks/saving.py --device cuda --folder /shared/storage

The loop's save is timed in the foreground and in the background. Two other functions are timed on
the same model, optimizer and disk. accelerate's `save_state` writes while the step waits, and
neither flushes to disk nor hashes. torch's `async_save` (of torch.distributed.checkpoint) copies to
host memory, here with a stager that is kept between saves, then writes and flushes in a thread,
without a hash. The kinds take turns, so that other load on the machine affects all of them. The
first save in the background also allocates the host memory that later saves reuse.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Time saves by the loop, save_state and async_save; the first of each kind is left out."""
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
        help="niceness of the thread that saves; default: the loop's (Linux)",
    )
    parser.add_argument("--saves", type=int, default=6, help="of each kind; the first is left out")
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT / "template" / "src"), str(ROOT / "benchmarks")]
    import accelerate
    import tasks
    import torch
    from my_project.checkpoint import saving
    from my_project.config import BatchesConfig, CheckpointsConfig, Config
    from my_project.run_folder import Run
    from my_project.state import TrainState
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import async_save

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

    def make_saver(kind: str) -> saving.Checkpoints:
        config = Config(
            recipe=tasks.TinyMlp(),
            batches=BatchesConfig(global_batch_size=8),
            steps=1,
            checkpoints=CheckpointsConfig(background=kind == "background", keep=1),
            runs_folder=folder,
            run_name=kind,
        )
        return saving.Checkpoints(Run(config, 0), model, optimizer, None)

    def take_step(seconds: list[float]) -> None:
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)

    step()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {arguments.device}")
    accelerator = accelerate.Accelerator(cpu=arguments.device == "cpu")
    accelerator.prepare(model, optimizer)
    on_gpu = arguments.device != "cpu"
    options = {"use_pinned_memory": on_gpu, "use_non_blocking_copy": on_gpu}
    stager = DefaultStager(
        StagingOptions(**options, use_shared_memory=False, use_async_staging=False)
    )
    kinds = ("save_state", "async_save", "foreground", "background")
    waited: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    saved: dict[str, list[float]] = {kind: [] for kind in kinds}
    during: dict[str, list[float]] = {kind: [] for kind in kinds}
    alone: list[float] = []
    futures: list[Any] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        savers = {kind: make_saver(kind) for kind in ("foreground", "background")}

        def save(kind: str, number: int) -> Callable[[], bool]:
            """Save, or begin to save; return a function that returns whether the save goes on."""
            if kind == "save_state":
                accelerator.save_state(f"{folder}/save_state")
                return lambda: False
            if kind == "async_save":
                weights, slots = get_state_dict(model, optimizer)
                state = {"model": weights, "optimizer": slots}
                path = f"{folder}/async_save/{number}"
                future: Any = async_save(state, checkpoint_id=path, async_stager=stager)
                futures.append(future)
                return lambda: not future.done()
            savers[kind].save(TrainState(step=number))
            thread = savers[kind]._thread
            return lambda: thread is not None and thread.is_alive()

        for number in range(arguments.saves):
            for kind in kinds:
                os.sync()  # flush what the previous kind has left to the kernel to write
                start, cpu_start = time.perf_counter(), time.process_time()
                is_saving = save(kind, number)
                waited[kind].append(time.perf_counter() - start)
                cpu[kind].append(time.process_time() - cpu_start)
                while is_saving():
                    take_step(during[kind])
                saved[kind].append(time.perf_counter() - start)
                step()  # not counted: the save has evicted the weights from the cache
                take_step(alone)
            shutil.rmtree(f"{folder}/async_save")
        for future in futures:
            future.result()  # raises if a save has failed
        stager.close()
        savers["background"].wait()
        for saver in savers.values():
            saver.check("checkpoint")
        newest = f"foreground/checkpoints/step_{arguments.saves - 1:08d}"
        files = [path for path in Path(folder, newest).iterdir() if path.is_file()]
        print(f"a checkpoint is {sum(path.stat().st_size for path in files) / 1e9:.2f} GB")
    save_state_seconds = statistics.median(waited["save_state"][1:])
    for kind, seconds in waited.items():
        median = statistics.median(seconds[1:])
        line = (
            f"{kind:10}: the step waits {median:.2f} s ({median / save_state_seconds:.0%} of"
            f" save_state; first save {seconds[0]:.2f} s)"
        )
        if during[kind]:
            step_seconds, alone_seconds = map(statistics.median, (during[kind], alone))
            line += (
                f"; saved after {statistics.median(saved[kind][1:]):.2f} s; a step takes"
                f" {step_seconds:.2f} s during a save, {alone_seconds:.2f} s alone"
                f" ({step_seconds / alone_seconds:.1f} times)"
            )
        else:
            line += f", CPU time {statistics.median(cpu[kind][1:]):.2f} s"
        print(line, flush=True)


if __name__ == "__main__":
    main()
