"""Time the project's loop against a hand-written PyTorch loop, in one run.

    python benchmarks/loop.py                     about 3 minutes on 2 idle cores
    python benchmarks/loop.py --peers             also against the libraries in peers.py
    python benchmarks/loop.py --cases mlp         half a minute
    python benchmarks/loop.py --source other/src  another copy of template/src, to try a change

All loops train the same model on the same data with the same settings. They take turns, each in its
own processes, in rounds of 12 steps (rounds.py), so that other load on the machine affects all of
them. The result of a round is the ratio of its step time to that of the hand-written loop; the
result of a case is the median over its rounds, with quartiles. If both loops draw the same random
numbers, their weights must be equal after 20 steps. README.md explains the columns.
"""

import argparse
import datetime
import os
import platform
import socket
import statistics
import sys
import tempfile
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OURS, HAND_WRITTEN = "this project", "hand-written"
PEERS = {  # the package, and the function in peers.py
    "accelerate's examples": ("accelerate", "accelerate_example"),
    "Lightning Fabric": ("lightning", "lightning_fabric"),
    "Lightning's Trainer": ("lightning", "lightning_trainer"),
    "transformers' Trainer": ("transformers", "transformers_trainer"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how; all other settings have the defaults of `Config`."""

    title: str
    task: str  # a class in tasks.py
    recipe: dict[str, Any] = field(default_factory=dict)  # fields of the task
    processes: int | None = 2  # None: one for each GPU
    micro_batch_size: int
    accumulation: int = 1
    rounds: int  # timed rounds of each loop, which follow some that are not timed
    draws: bool = False  # augmentation draws other random numbers in each loop
    precision: str = "no"
    compile: str = "no"  # whole, or regional: block by block, as in accelerate's dynamo_config

    @property
    def one_batch(self) -> bool:
        """Return whether a global batch is the whole data, so that its order changes nothing."""
        global_batch = self.micro_batch_size * self.accumulation * (self.processes or 1)
        return self.recipe.get("samples") == global_batch

    @property
    def name(self) -> str:
        """Return the case in words."""
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        words = [self.title, processes, f"accumulation {self.accumulation}"]
        words += [self.precision] * (self.precision != "no")
        words += [f"compiled ({self.compile})"] * (self.compile != "no")
        return ", ".join(words)


MLP = Case(title="tiny MLP", task="TinyMlp", micro_batch_size=32, rounds=150)
OWN = replace(MLP, title="tiny MLP, a dataset of its own class", recipe={"own_class": True})
IMAGES = Case(title="MiniResNet", task="Digits", micro_batch_size=16, rounds=40, draws=True)
GPT = Case(title="GPT of 0.9 M", task="Tokens", micro_batch_size=4, rounds=25)
CASES = {
    "mlp": replace(MLP, processes=1, rounds=300),
    "mlp_2_processes": MLP,
    "mlp_own_class": replace(OWN, processes=1, rounds=300),
    "mlp_own_class_2_processes": OWN,
    "images": IMAGES,
    "images_accumulated": replace(IMAGES, accumulation=4, rounds=20),
    "gpt": GPT,
    "gpt_accumulated": replace(GPT, accumulation=4, rounds=10),
}
# The size of GPT-2, with its vocabulary rounded up to a multiple of 64.
SIZE = {"vocabulary": 50304, "sequence_length": 1024, "width": 768, "depth": 12, "heads": 12}
GPT_124M = Case(
    title="GPT of 124 M",
    task="Tokens",
    recipe=SIZE | {"activation": "gelu"},
    processes=None,
    micro_batch_size=16,  # 16,384 tokens
    rounds=20,
    precision="bf16",
)
GPU_CASES = {
    "gpt_124m": GPT_124M,
    "gpt_124m_compiled": replace(GPT_124M, compile="whole"),
    "gpt_124m_regional": replace(GPT_124M, compile="regional"),
}
CHECKS = {  # cases that check the weights, not the times; run by tests/test_benchmarks.py
    "one_batch": replace(
        MLP, title="tiny MLP on one batch", accumulation=2, recipe={"samples": 128}
    ),
    "images_not_augmented": replace(
        CASES["images_accumulated"],
        title="MiniResNet without augmentation",
        recipe={"augmentation": "none"},
        draws=False,
    ),
}
MAX_DIFFERENCE = 1e-3  # of weights in float32, relative to their largest change; measured: 2e-5


# ---- one process of a loop -----------------------------------------------------------------------
def work(
    index: int, case: Case, turns: Any, ports: list[int], source: str, folder: str, device: str
) -> None:
    """Train in this process with the loop that the index selects, and save the times."""
    assert case.processes
    position, rank = divmod(index, case.processes)
    loop = turns.loops[position]
    own_folder = Path(folder) / f"{position}"
    own_folder.mkdir(exist_ok=True)
    os.chdir(own_folder)
    log = os.open(f"log_{rank}.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.path.insert(0, source)
    if device == "cpu":
        os.environ |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    if case.processes > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[position])}
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(case.processes))
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    import rounds
    import tasks

    recorder = rounds.Recorder(turns, loop, rank, rounds.steps_of(case.rounds))
    settings = tasks.Settings(
        recipe=getattr(tasks, case.task)(**case.recipe),
        steps=rounds.steps_of(case.rounds),
        processes=case.processes,
        micro_batch_size=case.micro_batch_size,
        accumulation=case.accumulation,
        precision=case.precision,
        compile=case.compile,
        folder=own_folder,
    )
    if loop == OURS:
        train_ours(settings)
    elif loop == HAND_WRITTEN:
        import hand_written

        hand_written.train(settings)
    else:
        import peers

        getattr(peers, PEERS[loop][1])(settings)
    recorder.save(Path(folder) / f"{position}_{rank}.pt")


def train_ours(settings: Any) -> None:
    """Train with the project's main, as its command does."""
    from my_project import exits
    from my_project.config import BatchesConfig, Config, OptimConfig
    from my_project.train import main

    if settings.compile != "no":  # what accelerate launch sets for --dynamo_backend
        os.environ["ACCELERATE_DYNAMO_BACKEND"] = "INDUCTOR"
        regional = str(settings.compile == "regional")
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = regional
    exits.set_up_logging()
    config = Config(
        recipe=settings.recipe,
        batches=BatchesConfig(
            global_batch_size=settings.micro_batch_size
            * settings.processes
            * settings.accumulation,
            micro_batch_size=settings.micro_batch_size,
            workers=0,
        ),
        steps=settings.steps,
        optim=OptimConfig(
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            warmup_steps=settings.warmup_steps,
            clip_norm=settings.clip_norm,
        ),
        precision=settings.precision,
        seed=settings.seed,
        runs_folder=str(settings.folder),
    )
    assert config.telemetry.every_steps == settings.log_every
    if code := main(config):
        raise RuntimeError(f"the run ended with exit code {code}")


# ---- one case ------------------------------------------------------------------------------------
def measure(case: Case, loops: list[str], source: str, device: str) -> list[Any]:
    """Run the loops of a case; return the Times of each."""
    import rounds
    from torch.multiprocessing.spawn import ProcessException, spawn

    assert case.processes
    turns = rounds.Turns(loops, case.processes)
    ports = [free_port() for _ in loops]
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(
                work,
                (case, turns, ports, source, folder, device),
                nprocs=len(loops) * case.processes,
            )
        except ProcessException as error:
            index = error.error_index
            log = f"{index // case.processes}/log_{index % case.processes}.txt"
            print((Path(folder) / log).read_text()[-4000:], file=sys.stderr)
            raise
        return [
            rounds.Times([Path(folder) / f"{i}_{rank}.pt" for rank in range(case.processes)])
            for i in range(len(loops))
        ]


def show(case: Case, loops: list[str], times: list[Any]) -> None:
    """Print a row for each loop.

    Raises:
        RuntimeError: the weights of a loop should equal those of the hand-written loop but do not.
    """
    from rounds import ratios

    reference = times[loops.index(HAND_WRITTEN)]
    for loop, own in zip(loops, times, strict=True):
        wall, cpu = (1e3 * statistics.median(values) for values in (own.wall, own.cpu))
        compared = wall_ratio = quartiles = cpu_ratio = ""
        if loop != HAND_WRITTEN:
            low, median, high = ratios(own.wall, reference.wall)
            wall_ratio, quartiles = f"{median:.3f}", f"{low:.2f} to {high:.2f}"
            cpu_ratio = f"{ratios(own.cpu, reference.cpu)[1]:.3f}"
        if loop == OURS or (case.one_batch and loop != HAND_WRITTEN):
            difference = own.weights_differ(reference)
            compared = "other draws" if case.draws else f"{difference:.0e}"
            if not case.draws and case.precision == "no" and difference > MAX_DIFFERENCE:
                raise RuntimeError(f"{case.name}, {loop}: the weights differ by {compared}")
        cells = [case.name, loop, f"{wall:.2f}", wall_ratio, quartiles, f"{cpu:.2f}", cpu_ratio]
        print_row(*cells, compared)


def print_row(*cells: str) -> None:
    """Print a row of a Markdown table."""
    print("|", " | ".join(cells), "|", flush=True)


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
    """Run the cases, one after another."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cases = CASES | GPU_CASES | CHECKS
    parser.add_argument(
        "--cases", nargs="+", choices=list(cases), help="default: those for the device"
    )
    parser.add_argument("--peers", action="store_true", help="also time the libraries in peers.py")
    parser.add_argument("--rounds", type=int, help="of each loop, at least 2; default: per case")
    parser.add_argument("--source", default=str(ROOT / "template" / "src"))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the processes
    sys.path.insert(0, arguments.source)
    import torch

    gpus = torch.cuda.device_count() if arguments.device == "cuda" else 0
    peers = PEERS if arguments.peers else {}
    installed = [name for name, (package, _) in peers.items() if find_spec(package)]
    packages = sorted({"torch", "accelerate"} | {peers[name][0] for name in installed})
    print(
        f"{processor()}, {os.cpu_count()} CPUs, 1 thread per process;"
        f" {', '.join(f'{name} {version(name)}' for name in packages)};"
        f" {datetime.date.today().isoformat()}\n"
    )
    heads = ["case", "loop", "ms", "ratio", "quartiles", "CPU ms", "CPU ratio", "weights differ by"]
    print_row(*heads)
    print_row(*["---"] * len(heads))
    for name in arguments.cases or (CASES | GPU_CASES if gpus else CASES):
        case = cases[name]
        case = replace(case, processes=case.processes or max(1, gpus))
        if arguments.rounds:
            case = replace(case, rounds=arguments.rounds)
        if gpus and (case.processes or 1) > gpus:
            print_row(case.name, f"needs {case.processes} GPUs", *[""] * 6)
            continue
        loops = [HAND_WRITTEN, OURS]
        if case.compile == "no":  # peers.py does not compile
            loops += installed
        show(case, loops, measure(case, loops, arguments.source, arguments.device))
    for name in [name for name in peers if name not in installed]:
        print_row("all", name, "not installed", *[""] * 5)
    print(f"\nload average of the last minute: {os.getloadavg()[0]:.2f}, including the benchmark")


if __name__ == "__main__":
    main()
