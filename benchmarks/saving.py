"""Time how long a training step waits for a checkpoint, and how much a save slows the steps.

    python benchmarks/saving.py                        100 M parameters with AdamW: 1.2 GB
    python benchmarks/saving.py --device cuda --folder /shared/storage

After each step the loop's call that saves is timed, in the foreground and in the background, and so
are two others of the same model and optimizer, to the same disk. accelerate's `save_state` writes
while the step waits, and neither flushes to disk nor hashes. torch's `async_save` (of
torch.distributed.checkpoint) copies to host memory, here by a stager that is kept from save to
save, and writes and flushes in a thread, without a hash. The kinds take turns, so that another load
of the machine hits each alike. The first save in the background also allocates the host memory that
later saves reuse.
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
    """Time saves by the loop, by save_state and by async_save, after a first of each."""
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
        savers = {kind: saver_of(kind) for kind in ("foreground", "background")}

        def save(kind: str, number: int) -> Callable[[], bool]:
            """Save, or begin to; return what says whether the save is going on."""
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
                os.sync()  # what the kind before has left to the kernel
                start, cpu_start = time.perf_counter(), time.process_time()
                goes_on = save(kind, number)
                waited[kind].append(time.perf_counter() - start)
                cpu[kind].append(time.process_time() - cpu_start)
                while goes_on():
                    take_step(during[kind])
                saved[kind].append(time.perf_counter() - start)
                step()  # not counted: what it reads has left the cache
                take_step(alone)
            shutil.rmtree(f"{folder}/async_save")
        for future in futures:
            future.result()  # raises what has failed
        stager.close()
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
            f" first {seconds[0]:.2f} s)"
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
