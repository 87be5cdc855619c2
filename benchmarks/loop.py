"""Time the project's loop against a hand-written PyTorch loop, in one run.

    python benchmarks/loop.py                     all cases, about 9 minutes on 2 cores
    python benchmarks/loop.py --cases mlp         one minute
    python benchmarks/loop.py --source /tmp/src   another copy of template/src, to try a change

Both loops train the same model on the same samples in the same order with the same settings. They
run alternately in the same processes, in rounds of 12 steps, so that other load on the machine
affects both. A round's result is the ratio of the two step times, a case's result the median over
its rounds. After 20 steps the weights of both loops must be equal.
"""

import argparse
import contextlib
import dataclasses
import io
import os
import platform
import socket
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOG_EVERY = 10  # steps
WARM_UP = {"drop_rounds": 5, "drop_steps": 2}  # at the beginning, and in each round
STEPS_PER_ROUND = WARM_UP["drop_steps"] + LOG_EVERY  # so that each round writes one record
CHECK_STEP = 20
OURS, HAND_WRITTEN = "ours", "hand_written"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the results."""

    task: str  # a class in tasks.py
    processes: int
    accumulation: int
    micro_batch_size: int
    rounds: int  # of each loop
    seed_samples: bool = False  # our loop seeds the generators before each sample
    both_seed: bool = True  # if so, the hand-written loop does the same
    width: int = 16  # of MiniResNet: 16 in the recipe's config, 32 in the class
    target: float | None  # the largest ratio wanted

    @property
    def name(self) -> str:
        """The line's title."""
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        task = self.task if self.width == 16 else f"{self.task} of width {self.width}"
        name = f"{task}, {processes}, accumulation {self.accumulation}"
        return name if self.both_seed else f"{name}, unseeded"

    @property
    def steps(self) -> int:
        """Optimizer steps of each loop."""
        return self.rounds * STEPS_PER_ROUND


def mlp(accumulation: int) -> Case:
    """Return the case that measures the loop alone."""
    return Case(
        task="TinyMlp",
        processes=1,
        accumulation=accumulation,
        micro_batch_size=32,
        rounds=205,
        target=1.15,
    )


def digits(accumulation: int, *, both_seed: bool = True, width: int = 16) -> Case:
    """Return the case of a small but real model on two processes."""
    return Case(
        task="Digits",
        processes=2,
        accumulation=accumulation,
        micro_batch_size=16,
        rounds=105 if accumulation == 1 else 55,
        width=width,
        seed_samples=True,
        both_seed=both_seed,
        target=1.02 if both_seed else None,
    )


CASES = {
    "mlp": [mlp(1), mlp(4)],
    "resnet": [digits(a, width=width) for width in (16, 32) for a in (1, 4)],
    "unseeded": [digits(1, both_seed=False)],
}


# ---- one process of a case -----------------------------------------------------------------------
def settings(case: Case, folder: str, name: str) -> Any:
    """Return the config of one run, which both loops read."""
    import tasks
    from my_project.config import BatchesConfig, Config, OptimConfig, TelemetryConfig

    return Config(
        recipe=tasks.TinyMlp() if case.task == "TinyMlp" else tasks.Digits(width=case.width),
        batches=BatchesConfig(
            global_batch_size=case.micro_batch_size * case.processes * case.accumulation,
            micro_batch_size=case.micro_batch_size,
            workers=0,
            seed_samples=case.seed_samples,
        ),
        steps=case.steps,
        optim=OptimConfig(lr=1e-3, weight_decay=0.05, warmup_steps=30, clip_norm=1.0),
        telemetry=TelemetryConfig(every_steps=LOG_EVERY, trackers=[]),
        run_name=name,
        runs_folder=folder,
    )


def train_ours(config: Any) -> None:
    """Run the project's main, as its command does."""
    from my_project import cli
    from my_project.train import main

    cli.set_up_logging(is_run=True)
    if code := main(config):
        raise RuntimeError(f"the run ended with {code}")


def train_hand_written(config: Any, case: Case, rank: int, device: Any) -> None:
    """Run the hand-written loop."""
    import hand_written
    import torch
    from my_project.loading.loader import Fetch
    from my_project.loading.seeding import derive_seed

    torch.set_float32_matmul_precision("high")
    recipe = config.recipe
    data_info = recipe.prepare_data()
    data: Any = recipe.build_datasets(data_info)[0]
    seeded = case.seed_samples and case.both_seed
    sampler = hand_written.Sampler(
        samples=len(data),
        micro_batch_size=case.micro_batch_size,
        accumulation=case.accumulation,
        steps=case.steps,
        rank=rank,
        world_size=case.processes,
        epoch_seed=lambda epoch: derive_seed(config.seed, "order", epoch),
        with_epoch=seeded,
    )
    collate = getattr(recipe, "collate", None)
    if seeded:  # the same random numbers, so that the weights can be compared
        data, collate = Fetch(data, collate, config.seed, True), hand_written.identity
    loader = torch.utils.data.DataLoader(
        data, batch_sampler=sampler, collate_fn=collate, pin_memory=device.type == "cuda"
    )
    torch.manual_seed(config.seed)
    model = recipe.build_model(data_info)
    config.folder.mkdir(parents=True, exist_ok=True)
    hand_written.train(
        model,
        loader,
        steps=case.steps,
        accumulation=case.accumulation,
        samples_per_step=config.batches.global_batch_size,
        lr=config.optim.lr,
        weight_decay=config.optim.weight_decay,
        warmup_steps=config.optim.warmup_steps,
        clip_norm=config.optim.clip_norm,
        log_every=LOG_EVERY,
        log_path=config.folder / f"metrics_{rank}.jsonl",
        device=device,
        rank=rank,
        world_size=case.processes,
    )


def work(rank: int, case: Case, source: str, folder: str, port: int, device_type: str) -> None:
    """Run one case in this process; rank 0 prints the result."""
    if device_type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    sys.path.insert(0, source)
    if case.processes > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(case.processes))
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    import tasks
    import torch
    from rounds import Rounds

    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    if case.processes > 1:  # the project's loop uses this process group, and destroys it
        torch.distributed.init_process_group("nccl" if device_type == "cuda" else "gloo")
    rounds = Rounds(
        [HAND_WRITTEN, OURS],
        accumulation=case.accumulation,
        steps_per_round=STEPS_PER_ROUND,
        check_step=CHECK_STEP,
    )
    tasks.ROUNDS.append(rounds)
    with contextlib.redirect_stdout(io.StringIO()):  # lines as in a log, no progress bar
        rounds.run(
            {
                HAND_WRITTEN: lambda: train_hand_written(
                    settings(case, folder, HAND_WRITTEN), case, rank, device
                ),
                OURS: lambda: train_ours(settings(case, folder, OURS)),
            }
        )
    if rank == 0:
        show(case, rounds)


def show(case: Case, rounds: Any) -> None:
    """Print one line of the results; refuse loops whose weights differ."""
    low, ratio, high = statistics.quantiles(rounds.ratios(OURS, HAND_WRITTEN, **WARM_UP), n=4)
    ours, hand_written = (
        1e3 * statistics.median(rounds.step_seconds(loop, **WARM_UP))
        for loop in (OURS, HAND_WRITTEN)
    )
    weights = "not compared"
    if case.both_seed:
        difference = rounds.weights_differ(OURS, HAND_WRITTEN)
        weights = f"{difference:.0e}"
        if difference > 1e-4:
            raise RuntimeError(f"{case.name}: the weights of the two loops differ by {weights}")
    print(
        f"{case.name:48} {ours:8.3f} {hand_written:8.3f} {ratio:7.3f}  {low:.3f} to {high:.3f}"
        f" {case.target or '-':>8} {weights}",
        flush=True,
    )


# ---- the command ---------------------------------------------------------------------------------
def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def processor() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(": ")[1] for x in lines if x.startswith("model name")), platform.machine())


def main() -> None:
    """Run the cases, each in its own processes."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--rounds", type=int, help="of each loop, instead of each case's own number"
    )
    parser.add_argument("--source", default=str(ROOT / "template" / "src"))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the processes
    import torch
    from torch.multiprocessing.spawn import spawn

    print(f"{processor()}, {os.cpu_count()} CPUs; torch {torch.__version__}; 1 thread per process")
    heads = f"{'ours ms':>8} {'hand ms':>8} {'ratio':>7}  {'quartiles':14} {'at most':>8} weights"
    print(f"{'':48} {heads}")
    for case in [case for name in arguments.cases for case in CASES[name]]:
        if arguments.rounds:
            case = dataclasses.replace(case, rounds=arguments.rounds)
        with tempfile.TemporaryDirectory() as folder:
            work_arguments = (case, arguments.source, folder, free_port(), arguments.device)
            spawn(work, work_arguments, nprocs=case.processes)
    print(
        f"load average of the last minute: {os.getloadavg()[0]:.2f}; up to 2 is the benchmark's own"
    )


if __name__ == "__main__":
    main()
