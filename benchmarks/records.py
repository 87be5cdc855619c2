"""Time the code that writes the records of a run, alone: microseconds per step and per record.

    python benchmarks/records.py                  CPU: the clock
    python benchmarks/records.py --device cuda    a GPU: CUDA events, NVML

One process makes the calls that train.py makes, and nothing between them: no batch and no model.
Each figure is the median of 7 rounds of 2,000 steps.
"""

import argparse
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "template/src"), str(ROOT / "template/tests")]

import torch  # noqa: E402
from my_project.loading.layout import BatchLayout  # noqa: E402
from my_project.process import garbage_collected_at_records  # noqa: E402
from my_project.records import recorder  # noqa: E402
from my_project.records.performance import Performance  # noqa: E402
from my_project.records.profiling import Profiler  # noqa: E402
from my_project.run_folder import Run  # noqa: E402
from my_project.state import StepReport, TrainState  # noqa: E402
from runs import make_config  # noqa: E402  # pyright: ignore[reportMissingImports]

ROUNDS = 7
STEPS = 2000


class Feed:
    """Micro-batches that take no time."""

    epoch = 0

    def __iter__(self) -> Any:
        while True:
            yield None


def seconds_per_step(device: torch.device, accumulation: int, every_steps: int) -> float:
    """Take steps that consist only of the calls of train.py; return the median seconds."""
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), steps=10**9, telemetry__every_steps=every_steps)
        run = Run(config, rank=0)
        run.total_steps, run.hosts, run.lengths = 10**9, ["here"], {"the training set": 10**6}
        run.folder.mkdir(exist_ok=True)
        accelerator: Any = SimpleNamespace(
            is_main_process=True,
            process_index=0,
            device=device,
            trackers=[],
            log_with=[],
            mixed_precision="no",
        )
        layout = BatchLayout(global_batch_size=32, micro_batches=accumulation, world_size=1)
        state = TrainState()
        model = torch.nn.Linear(1, 1)
        seconds, step = [], 0
        # without the log, the bar and the trackers
        recorder.OUTPUTS = (Performance, Profiler)
        metrics = recorder.Recorder(accelerator, run, layout, state, model)
        recorder.log_record = lambda *_: None
        with metrics, garbage_collected_at_records():
            batches = metrics.timed(Feed())
            for _ in range(ROUNDS):
                start = time.perf_counter()
                for _ in range(STEPS):
                    for _ in range(accumulation):
                        next(batches)
                    metrics.step_ended(step)
                    if step:
                        report = StepReport(step - 1, 1.0, 1.0, 1.0 + step % 7, 1.0, 0, 0, {})
                        state.observe(report)
                        metrics.observe(report)
                    step += 1
                seconds.append((time.perf_counter() - start) / STEPS)
    return statistics.median(seconds)


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    print(f"{name or platform.machine()}, torch {torch.__version__}\n")
    print("| accumulation | a step, us | a record, us |\n|---|---|---|")
    for accumulation in (1, 4):
        step = seconds_per_step(device, accumulation, 10**9)
        record = 10 * (seconds_per_step(device, accumulation, 10) - step)
        print(f"| {accumulation} | {1e6 * step:.1f} | {1e6 * record:.0f} |")


if __name__ == "__main__":
    main()
