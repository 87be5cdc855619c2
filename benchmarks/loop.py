"""Time the project's loop against a hand-written PyTorch loop, in one run.

    python benchmarks/loop.py                     all cases, about 9 minutes on 2 cores
    python benchmarks/loop.py --cases mlp         one minute
    python benchmarks/loop.py --source /tmp/src   another copy of template/src, to try a change

Both loops train the same model on the same samples in the same order with the same settings, in
the same processes, in turn, 12 steps each. The figure of a turn is the ratio of their step times;
the figure of a case is the median over its turns, so what else the machine does meanwhile falls on
both. That both do the same work is checked on the weights, which are the same after 20 steps.
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
DROPPED = {"drop_turns": 5, "drop_steps": 2}  # to warm up, at first and in each turn
STEPS_PER_TURN = DROPPED["drop_steps"] + LOG_EVERY  # so that each turn writes one record
CHECK_STEP = 20
OURS, BY_HAND = "ours", "by hand"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the result."""

    task: str  # a class in tasks.py
    processes: int
    accumulation: int
    micro_batch_size: int
    turns: int  # of each loop
    seed_samples: bool = False
    seed_by_hand: bool = True  # where samples are seeded, the hand-written loop does so too
    width: int = 16  # of MiniResNet: 16 in the recipe's config, 32 in the class
    target: float | None  # the largest ratio allowed

    @property
    def name(self) -> str:
        """The line's title."""
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        task = self.task if self.width == 16 else f"{self.task} of width {self.width}"
        name = f"{task}, {processes}, accumulation {self.accumulation}"
        return name if self.seed_by_hand else f"{name}, own draws"

    @property
    def steps(self) -> int:
        """Optimizer steps of each loop."""
        return self.turns * STEPS_PER_TURN


def mlp(accumulation: int) -> Case:
    """Make the case that shows the loop alone."""
    return Case(
        task="TinyMlp", processes=1, accumulation=accumulation, micro_batch_size=32, turns=205,
        target=1.15,
    )  # fmt: skip


def digits(accumulation: int, *, seed_by_hand: bool = True, width: int = 16) -> Case:
    """Make the case of a small but real model on several processes."""
    return Case(
        task="Digits", processes=2, accumulation=accumulation, micro_batch_size=16,
        turns=105 if accumulation == 1 else 55, width=width,
        seed_samples=True, seed_by_hand=seed_by_hand, target=1.02 if seed_by_hand else None,
    )  # fmt: skip


CASES = {
    "mlp": [mlp(1), mlp(4)],
    "resnet": [digits(a, width=width) for width in (16, 32) for a in (1, 4)],
    "own_draws": [digits(1, seed_by_hand=False)],
}


# ---- one process of a case -----------------------------------------------------------------------
def settings(case: Case, folder: str, name: str) -> Any:
    """Make the configuration of one run, which both loops read."""
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

    cli.set_up_logging()
    if code := main(config):
        raise RuntimeError(f"the run ended with {code}")


def train_by_hand(config: Any, case: Case, rank: int, device: Any) -> None:
    """Run the hand-written loop."""
    import hand_written
    import torch
    from my_project.loading.loader import Fetch
    from my_project.loading.seeding import seed_of

    torch.set_float32_matmul_precision("high")
    recipe = config.recipe
    data_info = recipe.prepare_data()
    data: Any = recipe.build_datasets(data_info)[0]
    seeded = case.seed_samples and case.seed_by_hand
    order = hand_written.Order(
        len(data), case.micro_batch_size, case.accumulation, case.steps, rank, case.processes,
        lambda epoch: seed_of(config.seed, "order", epoch), seeded,
    )  # fmt: skip
    collate = getattr(recipe, "collate", None)
    if seeded:  # the same draws, else the weights could not be compared
        data, collate = Fetch(data, collate, config.seed, True), hand_written.identity
    loader = torch.utils.data.DataLoader(
        data, batch_sampler=order, collate_fn=collate, pin_memory=device.type == "cuda"
    )
    torch.manual_seed(config.seed)
    model = recipe.build_model(data_info)
    config.folder.mkdir(parents=True, exist_ok=True)
    hand_written.train(
        model, loader, steps=case.steps, accumulation=case.accumulation,
        samples_per_step=config.batches.global_batch_size, lr=config.optim.lr,
        weight_decay=config.optim.weight_decay, warmup_steps=config.optim.warmup_steps,
        clip_norm=config.optim.clip_norm, log_every=LOG_EVERY,
        log_path=config.folder / f"metrics_{rank}.jsonl", device=device,
        rank=rank, world=case.processes,
    )  # fmt: skip


def work(rank: int, case: Case, source: str, folder: str, port: int, on: str) -> None:
    """Run one case in this process; rank 0 prints the line."""
    if on == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    sys.path.insert(0, source)
    if case.processes > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(case.processes))
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    import tasks
    import torch
    from turns import Turns

    device = torch.device(on, rank) if on == "cuda" else torch.device(on)
    if on == "cuda":
        torch.cuda.set_device(device)
    if case.processes > 1:  # the project's loop takes the group that there is, and ends it
        torch.distributed.init_process_group("nccl" if on == "cuda" else "gloo")
    turns = Turns(
        [BY_HAND, OURS],
        accumulation=case.accumulation,
        steps_per_turn=STEPS_PER_TURN,
        check_step=CHECK_STEP,
    )
    tasks.TURNS.append(turns)
    with contextlib.redirect_stdout(io.StringIO()):  # lines, as in a log; no progress bar
        turns.run(
            {
                BY_HAND: lambda: train_by_hand(settings(case, folder, BY_HAND), case, rank, device),
                OURS: lambda: train_ours(settings(case, folder, OURS)),
            }
        )
    if rank == 0:
        show(case, turns)


def show(case: Case, turns: Any) -> None:
    """Print one line."""
    low, ratio, high = statistics.quantiles(turns.ratios(OURS, BY_HAND, **DROPPED), n=4)
    ours, by_hand = (
        1e3 * statistics.median(turns.step_seconds(loop, **DROPPED)) for loop in (OURS, BY_HAND)
    )
    same = "other draws"
    if case.seed_by_hand:
        difference = turns.weights_differ(OURS, BY_HAND)
        same = f"{difference:.0e}"
        if difference > 1e-4:
            raise RuntimeError(f"{case.name}: the loops did not do the same work, {same}")
    print(
        f"{case.name:48} {ours:8.3f} {by_hand:8.3f} {ratio:7.3f}  {low:.3f} to {high:.3f}"
        f" {case.target or '-':>8} {same}",
        flush=True,
    )


# ---- the command ---------------------------------------------------------------------------------
def free_port() -> int:
    """Find a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def processor() -> str:
    """Name the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(": ")[1] for x in lines if x.startswith("model name")), platform.machine())


def main() -> None:
    """Run the cases, each in processes of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--turns", type=int, help="of each loop, in place of each case's own number"
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
        if arguments.turns:
            case = dataclasses.replace(case, turns=arguments.turns)
        with tempfile.TemporaryDirectory() as folder:
            of_case = (case, arguments.source, folder, free_port(), arguments.device)
            spawn(work, of_case, nprocs=case.processes)
    print(f"load average over the last minute: {os.getloadavg()[0]:.2f}; 2 is the benchmark's own")


if __name__ == "__main__":
    main()
