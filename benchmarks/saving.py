"""Time how long a training step waits for a checkpoint, saved in the background or not.

    python benchmarks/saving.py                        100 M parameters with AdamW: 1.2 GB
    python benchmarks/saving.py --device cuda --folder /shared/storage

After each step the loop's call that saves is timed. The first save in the background also
allocates the host memory that later saves reuse.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Time saves in the foreground and in the background, after a first one of each."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parameters", type=int, default=100, help="in millions")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", help="folder for the checkpoints; default: a temporary folder")
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT / "template" / "src"), str(ROOT / "benchmarks")]
    import tasks
    import torch
    from my_project.checkpoint import saving
    from my_project.config import BatchesConfig, CheckpointsConfig, Config
    from my_project.run_folder import Run
    from my_project.state import TrainState

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

    step()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {arguments.device}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for background in (False, True):
            config = Config(
                recipe=tasks.TinyMlp(),
                batches=BatchesConfig(global_batch_size=8),
                steps=1,
                checkpoints=CheckpointsConfig(background=background, keep=1),
                runs_folder=folder,
                run_name=f"background_{background}",
            )
            saver = saving.Checkpoints(Run(config, 0), model, optimizer, None, None)
            blocked, saved, step_during_save, step_alone = [], [], [], []
            for number in range(6):
                start = time.perf_counter()
                saver.save(TrainState(step=number, items_per_micro_batch=1.0))
                blocked.append(time.perf_counter() - start)
                while saver._thread and saver._thread.is_alive():
                    begin = time.perf_counter()
                    step()
                    step_during_save.append(time.perf_counter() - begin)
                saver.wait()
                saved.append(time.perf_counter() - start)
                begin = time.perf_counter()
                step()
                step_alone.append(time.perf_counter() - begin)
            if saver.failure:
                raise saver.failure
            files = next((Path(folder) / config.run_name / "checkpoints").iterdir()).iterdir()
            size = sum(path.stat().st_size for path in files)
            line = (
                f"{'in the background' if background else 'in the foreground'} {size / 1e9:.1f} GB:"
            )
            line += f" the step waits {statistics.median(blocked[1:]):.2f} s (first save"
            line += f" {blocked[0]:.2f} s), saved after {statistics.median(saved[1:]):.2f} s;"
            line += f" a step alone {statistics.median(step_alone):.2f} s"
            if step_during_save:
                line += f", during a save {statistics.median(step_during_save):.2f} s"
            print(line, flush=True)


if __name__ == "__main__":
    main()
