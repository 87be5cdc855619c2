"""Train slightly wrong recipes and launches, and show what a user sees of each mistake.

    python tests/silence.py             try all cases, print the table of docs/silence.md
    python tests/silence.py mean best   try the cases with one of these words in their name

The exit code is 1 if an outcome is not the expected one; what was seen is printed to stderr. Each
run takes 2 s on CPU processes: its launcher is a fork of this process, which has imported
everything.
"""

import dataclasses
import json
import math
import os
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import faults

sys.path[:0] = map(str, faults.PATHS)
# ruff: noqa: E402

import numpy as np
import torch
from runs import weights
from world import free_port

SEES = {
    "refused": "refused, exit code 2",
    "ended": "ended, exit code 2",
    "warned": "a warning",
    "changed": "a line at the start and a record",
    "shown": "output on the screen",
    "right": "no warning: the run is right",
    "saved": "saved and stopped, exit code 75",
    "silent": "nothing",
}
CODES = {"refused": 2, "ended": 2, "saved": faults.PREEMPTED}
RUN = Path("runs/tried")
AT_IMPORT = """\
import mistakes, signal
class Opened(mistakes.Opened):
    file = open("rows.bin", "rb", buffering=0)
"""
# The launcher imports this after it has installed its signal handlers: its import_all imports what
# the recipe's module imports inside methods, and a method in mistakes.py imports beside.
DEAF = """\
import signal
signal.signal(signal.SIGTERM, lambda *_: None)
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mistake, and what a user is expected to see of it."""

    name: str
    recipe: str  # a class of mistakes.py, or of `beside`
    mistake: str = ""
    sees: str  # a key of SEES
    word: str = ""  # a regular expression for what is on the screen or in a record of kind check
    why: str = ""  # what finds the mistake, why the run is right, or why nothing is seen
    processes: int = 1
    nodes: int = 1  # each is a separate launch, with one process
    starts: int = 1
    flags: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # fields of the recipe
    right: dict[str, Any] = field(default_factory=dict)  # fields changed in the run to compare with
    beside: str = ""  # text of beside.py; {} becomes the number of the start plus that of the node
    hash_seed: bool = False  # each start is a new process with another seed for hashes


def as_alone(**right: Any) -> dict[str, Any]:
    """Return `right` for a comparison with a run on one process in one start."""
    return {"processes": 1, "nodes": 1, "starts": 1} | right


CASES = [
    *(
        Case(name=f"a split by {by} without a seed", recipe="Split", mistake=mistake, nodes=2,
             sees="right", right=as_alone(), why="generators are seeded before data is built")
        for by, mistake in {
            "`random.shuffle`": "random", "`np.random.permutation`": "numpy",
            "`torch.randperm`": "torch", "scikit-learn": "sklearn", "`datasets`": "datasets",
        }.items()
    ),
    Case(name="weights drawn by NumPy", recipe="NumpyWeights", nodes=2, sees="right",
         right=as_alone(), why="generators are seeded before the model is built"),
    Case(name="random features drawn by NumPy", recipe="NumpyFeatures", starts=2, sees="right",
         right=as_alone(), why="generators are seeded before the model is built"),
    Case(name="files listed in a different order on each rank", recipe="FilesInAnyOrder",
         processes=2, sees="refused", word="sample", why="`checks.ranks`"),
    Case(name="`data[rank::world_size]` as the dataset", recipe="EveryNth", processes=2,
         sees="refused", word="sample", why="`checks.ranks`"),
    Case(name="a different validation set on one rank", recipe="OtherValidation", processes=2,
         sees="refused", word="sample", why="`checks.ranks`"),
    Case(name="all rows edited between two starts", recipe="Edited", mistake="all", starts=2,
         sees="changed", word="check data|other data", why="`checks.data`"),
    Case(name="validation rows edited between two starts", recipe="Edited", mistake="validation",
         starts=2, sees="changed", word="check data|other data", why="`checks.data`"),
    Case(name="rows added between two starts", recipe="Added", starts=2, sees="changed",
         word="check data|other data", why="`checks.data`"),
    Case(name="a vocabulary in the order of `list(set(words))`", recipe="Vocabulary", starts=2,
         hash_seed=True, sees="changed", word="check data|other data", why="`checks.data`"),
    Case(name="a dataset with its own `default_rng`", recipe="OwnGenerator", sees="warned",
         word="generator", why="`checks.data`"),
    Case(name="different model code on one node", recipe="CodeBeside", nodes=2, sees="refused",
         word=r"beside\.py", why="`checks.ranks`", beside="NUMBER = {}"),
    Case(name="different model code in the next start", recipe="CodeBeside", starts=2,
         sees="changed", word=r"beside\.py", why="`checks.code`", beside="NUMBER = {}"),
    Case(name="a dropout rate that depends on the rank", recipe="DropoutByRank", processes=2,
         sees="refused", word="model", why="`repr(model)` must be equal on all ranks"),
    Case(name="a parameter that the first batch sets (ActNorm)", recipe="Parting", mistake="norm",
         processes=2, sees="ended", word=r"0\.scale", why="`checks.ranks`"),
    Case(name="`nn.Embedding(max_norm=...)`", recipe="Parting", mistake="embedding", processes=2,
         sees="ended", word=r"table\.weight", why="`checks.ranks`"),
    Case(name="a hidden state kept in a buffer", recipe="Parting", mistake="hidden", processes=2,
         sees="warned", word=r"0\.hidden", why="`checks.ranks`"),
    Case(name="a layer unfrozen during the run", recipe="Unfrozen", sees="warned",
         word="requires_grad", why="the optimizer does not have the layer"),
    Case(name="`loss` leaves the model in `eval()`", recipe="LeftInEval", settings={"dropout": 0.2},
         sees="warned", word=r"model\.training|eval\(\)|training mode", why="`checks.ranks`"),
    *(
        Case(name=name, recipe="NotASum", mistake=mistake, sees="warned", word="check recipe|sum",
             why="`checks.recipe`")
        for name, mistake in {
            "`loss` returns the mean and the number of items": "mean",
            "`loss` returns the mean and 1": "mean and 1",
            "`loss` returns the mean times the batch size": "mean times batch",
            "padding counted as items": "padding counted", "padding in the loss": "padding trained",
            "a loss that depends on how often it was called": "counter",
        }.items()
    ),
    Case(name="`mse_loss` of (N, 1) and (N,)", recipe="Broadcast", sees="shown",
         word="due to broadcasting", why="torch's own warning"),
    Case(name="pretrained weights with a layer missing", recipe="Libraries", mistake="logger",
         sees="shown", word="newly initialized", why="a library's own warning"),
    Case(name="a long download in `prepare_data`", recipe="Libraries", mistake="bar",
         processes=2, sees="shown", word="fetching shards", why="its progress bar stays visible"),
    Case(name="a loss in bfloat16", recipe="InBfloat16", flags="--precision bf16", sees="refused",
         word="float32", why="bfloat16 keeps two to three digits"),
    Case(name="a NaN label in the validation set", recipe="MeanLoss", mistake="nan",
         sees="shown", word="loss not a number", why="the result is NaN, which is never the best"),
    Case(name="`best_metric: validation/loss` without `best_mode`", recipe="MeanLoss",
         flags="--evaluation.best_metric validation/loss", sees="right",
         right={"flags": "--evaluation.best_metric validation/loss --evaluation.best_mode min"},
         why="the lower loss is taken as better"),
    Case(name="a `best_metric` that implies no `best_mode`", recipe="Measured",
         flags="--evaluation.best_metric validation/score", sees="refused", word="best_mode",
         why="the error asks for `best_mode`"),
    Case(name="a metric without a state", recipe="Measured", mistake="stateless", processes=2,
         sees="refused", word="score", why="the results of ranks could not be merged"),
    Case(name="a metric in torchmetrics' `ClasswiseWrapper`", recipe="Measured",
         mistake="classwise", processes=2, sees="right", right=as_alone(),
         why="wrapper and metric share a state, which is gathered once"),
    Case(name="BatchNorm on 2 processes", recipe="Wrong", processes=2, sees="right",
         settings={"batch_norm": True, "dtype": "float64"}, right=as_alone(),
         why="its statistics cover all micro-batches"),
    Case(name="a file that the recipe opens in `__post_init__`", recipe="Opened",
         mistake="settings", processes=2, sees="right", right=as_alone(),
         why="the launcher spawns processes instead of forking them, and prints why"),
    Case(name="a file that the recipe opens at import", recipe="Opened", beside=AT_IMPORT,
         processes=2, sees="right", right=as_alone(),
         why="the launcher spawns processes instead of forking them, and prints why"),
    *(
        Case(name=f"{what} opened in a dataset's constructor", recipe="Opened", mistake=mistake,
             flags="--batches.workers 2", sees="refused", word="open",
             why="loader workers would share it")
        for what, mistake in {
            "a file": "dataset", "a ZipFile": "zip", "a database": "sqlite",
        }.items()
    ),
    Case(name="an imported module that replaces the SIGTERM handler", recipe="Stopped", beside=DEAF,
         processes=2, settings={"seconds": 0.01}, flags="--steps 60", sees="saved",
         why="the loop installs its handler after the imports"),
    Case(name="two buffers that share memory", recipe="SharedBuffer", processes=2, sees="right",
         right=as_alone(), why="the model is not copied, so the buffers still share it"),
    Case(name="an `ema_decay` too high for a short run", recipe="Wrong",
         flags="--optim.ema_decay 0.9999", sees="warned", word="ema_decay",
         why="the average is mostly initial weights"),
    Case(name="a dataset with `set_epoch`", recipe="EpochTold", processes=2, sees="right",
         right=as_alone(settings={"by_hand": True}), why="the loop calls it"),
    Case(name="a stream's lane whose `state_dict` returns None", recipe="LaneWithoutState",
         starts=2, sees="right", right=as_alone(),
         why="the resumed run reads the lane again up to its place"),
    Case(name="two calls of `main` in two threads", recipe="TwoMains", sees="refused",
         word="thread", why="their random numbers would mix"),
    Case(name="a schedule-free optimizer with an EMA", recipe="Wrong",
         flags="--optim.class_path mistakes.ScheduleFree --optim.ema_decay 0.5", sees="refused",
         word="ema_decay", why="the optimizer has its own average"),
    Case(name="a misspelled optional method", recipe="Misspelled", sees="warned",
         word="predict_samples", why="the warning suggests the right name"),
    # ---- mistakes that are not noticed
    Case(name="a loss multiplied by the number of ranks", recipe="NotASum", mistake="times ranks",
         processes=2, sees="silent", why="it is still a sum; the factor may be intended"),
    Case(name="a detached part of the model", recipe="Unnoticed", mistake="detached",
         sees="silent", why="many methods detach a part on purpose"),
    Case(name="a call of `backward` in `loss`", recipe="Unnoticed", mistake="backward",
         sees="silent", why="a gradient does not show which call computed it"),
    Case(name="a cache in a global variable", recipe="Unnoticed", mistake="cache", starts=2,
         sees="silent", why="it is not in checkpoints, and the loop does not look for it"),
    Case(name="a teacher outside the model", recipe="Unnoticed", mistake="teacher", starts=2,
         sees="silent", why="it is not in checkpoints; keep it in the model"),
    Case(name="samples passed to a metric twice", recipe="Measured", mistake="twice",
         sees="silent", why="a metric may weight its samples"),
    Case(name="a metric that gets means of batches", recipe="Measured", mistake="means",
         sees="silent", why="a metric cannot tell a mean from a sample"),
    Case(name="one row edited between two starts", recipe="Edited", mistake="one", starts=2,
         sees="silent", why="only four samples of each dataset are compared"),
]  # fmt: skip


# ---- running -------------------------------------------------------------------------------------
def launch(case: Case, folder: Path, number: int, node: int, port: int) -> int:
    """Start a launch in a forked process; return its process number."""
    (place := folder / f"start{number}_node{node}").mkdir()
    (place / "beside.py").write_text(case.beside.format(number + node))
    command = faults.command(case.processes, "--main_process_port", str(port))
    if case.nodes > 1:
        command[4] = str(faults.ROOT / "accelerate_configs/multi_node_cpu.yaml")
        command[5:5] = ["--num_machines", "2", "--num_processes", "2", "--machine_rank",
                        str(node), "--main_process_ip", "127.0.0.1"]  # fmt: skip
    command += [*case.flags.split(), "--run_name", RUN.name]
    command += ["--steps", "4"] * (number < case.starts - 1)
    if not (child := os.fork()):
        launched(case, folder, command, number, place)
    return child


def launched(case: Case, folder: Path, command: list[str], number: int, place: Path) -> NoReturn:
    """Launch in this process, or in a process that replaces it, and exit."""
    os.environ |= faults.environment(place) | {"STARTED": str(number), "OMP_NUM_THREADS": "1"}
    if case.hash_seed:
        os.chdir(folder)
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.environ["PYTHONHASHSEED"] = str(number)
        os.execv(command[0], command)
    random.seed()  # as in a new process
    np.random.seed()
    sys.path.insert(0, str(place))
    faults.launched(folder, command[3:])


def play(case: Case, folder: Path) -> list[int]:
    """Train as the case specifies; return the exit codes of its last start."""
    folder.mkdir()
    np.arange(1.0, 100.0).tofile(folder / "rows.bin")
    module = "beside" if "class" in case.beside else "mistakes"
    recipe = case.settings | {"mistake": case.mistake}
    text = faults.CONFIG.replace("faulty.Faulty", f"{module}.{case.recipe}")
    # constant, since the starts have different lengths
    text = text.replace("lr: 0.01", "lr: 0.01, schedule: constant")
    text = text.format(recipe=json.dumps(recipe), workers=0, steps=12, timeout=40, startup=60,
                       blocks="false")  # fmt: skip
    (folder / "run.yaml").write_text(text)
    codes: list[int] = []
    for number in range(case.starts):
        port = free_port() if case.nodes > 1 else 0
        nodes = [launch(case, folder, number, node, port) for node in range(case.nodes)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in nodes]
    return codes


def read(*paths: Path) -> str:
    """Return the text of the files that exist, joined."""
    return "\n".join(path.read_text(errors="replace") for path in paths if path.exists())


def numbers(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights that a run exports, and the results of its last evaluation, by name."""
    for part in ("export", "best"):
        if (folder / RUN / part).exists():
            for name, tensor in weights(folder / RUN / part).items():
                yield f"{part} {name}", tensor
    for name, value in json.loads(read(folder / RUN / "status.json"))["result"].items():
        if "/" in name:
            yield name, torch.tensor(math.nan if value is None else float(value))


def differences(one: Path, other: Path) -> list[str]:
    """Return the names of the weights and results that differ between two runs."""
    values, other_values = dict(numbers(one)), dict(numbers(other))
    assert values.keys() == other_values.keys()
    return [
        name
        for name, value in values.items()
        if not torch.allclose(value, other_values[name], rtol=1e-4, atol=1e-5, equal_nan=True)
    ]


def outcome(case: Case, folder: Path) -> tuple[str, str]:
    """Return what a user sees of a case (a key of SEES or other words), and the evidence."""
    codes = play(case, folder / "run")
    screen = read(folder / "run/output.txt")
    checks = faults.checks(folder / "run" / RUN)
    lines = [*screen.splitlines(), *checks]
    seen = [line.strip() for line in lines if case.word and re.search(case.word, line)]
    logged = faults.warned(folder / "run")  # possibly not on the screen
    evidence = "; ".join([*(seen[:1] or checks), *logged])
    if {*codes} != {CODES.get(case.sees, 0)}:
        return (f"exit codes {codes}", screen[-2000:]) if any(codes) else ("silent", evidence)
    result = case.sees if seen or case.sees == "saved" else "other warning" if checks else "silent"
    if case.sees == "right":
        codes = play(dataclasses.replace(case, **case.right), folder / "right")
        assert not any(codes), read(folder / "right/output.txt")
        different = differences(folder / "run", folder / "right")
        result, evidence = "silent" if different else "right", f"{evidence} {', '.join(different)}"
    elif any(codes) and result != case.sees:
        result = f"exit codes {codes}"
    elif case.sees == "silent" and logged:
        result = "other warning"
    return result, evidence


def row(case: Case) -> str:
    """Return the expected row of a case."""
    many = f"{case.nodes} nodes" if case.nodes > 1 else case.processes
    return f"| {case.name} | {SEES[case.sees]} | {many} | {case.why} |"


def table(cases: list[Case]) -> str:
    """Return the table of some cases."""
    head = "| mistake | what you see | processes | found by, or reason |\n| --- | --- | --- | --- |"
    return "\n".join([head, *map(row, cases)])


def main() -> None:
    """Try the cases, and print the table."""
    faults.import_all("sklearn.model_selection", "mistakes")
    chosen = [c for c in CASES if not sys.argv[1:] or any(word in c.name for word in sys.argv[1:])]
    wrong = 0
    for case in chosen:
        with tempfile.TemporaryDirectory() as folder:
            seen, evidence = outcome(case, Path(folder))
        wrong += seen != case.sees
        mark = "" if seen == case.sees else f" WRONG, expected {case.sees}"
        print(f"{case.name}: {seen}{mark}\n    {evidence}", file=sys.stderr, flush=True)
    print(table([c for c in chosen if c.sees != "silent"]), "\n")
    print(table([c for c in chosen if c.sees == "silent"]))
    raise SystemExit(int(wrong > 0))


if __name__ == "__main__":
    main()
