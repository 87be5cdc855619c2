"""Compare accelerate's documented way with this loop, on questions of accelerate's issue tracker.

    python tests/threads.py    # half a minute, on CPU processes

It prints a line for each of the 25 threads of docs/accelerate-threads.md that can be shown on a
CPU: the expected result, the result of a script written as in accelerate's documentation, and the
result of this project's loop (empty if the document names a test instead).
"""

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PATHS = [str(REPOSITORY / folder) for folder in ("template/src", "template/tests", "tests")]
sys.path[:0] = PATHS
# ruff: noqa: E402

import torch
import world
from accelerate import Accelerator, DataLoaderConfiguration, PartialState, utils
from my_project.config import Config
from ragged import Ragged
from runs import change, make_config, records, train, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

Rows = dict[str, tuple[str, str, str]]  # by thread: expected, accelerate's, this project's
Factor = Callable[[int, int], float]  # of the learning rate, from the step and the number of steps


def run_world(processes: int, function: Callable, *arguments: Any) -> list:
    """Run a function in a world whose ranks end together, since rank 0 has the others' store."""
    return world.run_world(processes, and_wait, function, *arguments)


def and_wait(function: Callable, *arguments: Any) -> Any:
    returned = function(*arguments)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return returned


# ---- this project's loop -------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Noted(Ragged):
    """Writes the samples of each step to a file."""

    validation_samples: int = 0
    dtype: str = "float64"
    book: str = ""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        if model.training:  # not when a check of the recipe calls it
            with open(Path(self.book) / os.environ.get("RANK", "0"), "a") as file:
                file.write(json.dumps([step, batch["index"].tolist()]) + "\n")
        return super().loss(model, batch, step)


@dataclass(frozen=True, kw_only=True)
class Language(Ragged):
    """Trains a model of from_pretrained, sharded as under an accelerate config with fsdp_config."""

    folder: str = ""

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        tokens = (batch["index"][:, None] + torch.arange(8)) % 16
        count = torch.tensor(float(tokens.numel()))
        return model(input_ids=tokens, labels=tokens).loss * count, count


def noted(config: Config) -> list[list[Any]]:
    """Return the steps of rank 0 with their samples, then those of rank 1."""
    files = sorted(Path(config.recipe.book).iterdir())
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def ours(folder: Path, name: str, processes: int = 2, **settings: Any) -> Config:
    """Train with this project's loop."""
    book = folder / f"book_{name}"
    book.mkdir()
    plain = {"optim__warmup_steps": 0, "optim__clip_norm": 1e9}
    sgd = {"optim__class_path": "torch.optim.SGD"}
    recipe = Noted(book=str(book))
    config = make_config(folder, recipe, run_name=name, **plain | sgd | settings)
    run_world(processes, train, config)
    return config


# ---- steps ---------------------------------------------------------------------------------------
STEPS = 12


def linear(step: int, total: int) -> float:
    return max(0.0, 1 - step / total)


def cosine(step: int, total: int) -> float:
    return (1 + math.cos(math.pi * step / total)) / 2


def steps(samples: int, factor: Factor, total: int, accumulation: int = 1) -> list[Any]:
    """Train two epochs; return the learning rate and the micro-batches of each optimizer step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = accelerator.prepare(DataLoader(torch.ones(samples, 1), batch_size=4))
    total = total or 2 * len(loader)  # the number of steps, as in thread 2318
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, total))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    found, micro_batches = [], 0
    for batch in itertools.chain(loader, loader):
        with accelerator.accumulate(model):
            micro_batches += 1
            accelerator.backward(model(batch).mean())
            if accelerator.sync_gradients:
                found.append((optimizer.param_groups[0]["lr"], micro_batches))
                micro_batches = 0
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return found


def schedules(folder: Path) -> Rows:
    def half(rates: list[float]) -> str:
        at = next(i for i, rate in enumerate(rates) if rate <= rates[0] / 2 + 1e-9)
        return f"a linear schedule reaches half the initial rate after {at} of {STEPS} steps"

    def end(rates: list[float]) -> str:
        rises = any(b > a for a, b in itertools.pairwise(rates))
        return "a cosine rises again" if rises else "a cosine falls to the end"

    def idle(rates: list[float]) -> str:
        return f"{sum(rate < 1e-9 for rate in rates)} of {STEPS} steps at rate 0"

    def theirs(factor: Factor, total: int) -> list[float]:
        return [rate for rate, _ in run_world(2, steps, STEPS * 4, factor, total)[0]]

    def mine(schedule: str) -> list[float]:
        plan = {"optim__schedule": schedule, "optim__final_lr_fraction": 0.0, "steps": STEPS}
        return [record["learning_rate"] for record in records(ours(folder, schedule, **plan))]

    def sizes(found: Any) -> str:
        return f"steps of {' and '.join(map(str, sorted(set(found))))} micro-batches"

    cosines, linears = mine("cosine"), mine("linear")
    accumulated = noted(ours(folder, "accumulated", batches__global_batch_size=32))
    parts = Counter(step for step, _ in accumulated[: len(accumulated) // 2])  # of rank 0
    windows = run_world(2, steps, 70, linear, 0, 4)[0]
    falls = [1 - step / STEPS for step in range(STEPS)]
    return {
        "2926": (half(falls), half(theirs(linear, STEPS)), half(linears)),
        "2773": (end(falls), end(theirs(cosine, STEPS)), end(cosines)),
        "2318": (idle(falls), idle(theirs(linear, 0)), idle(linears)),
        "1847": (sizes([4]), sizes(size for _, size in windows), sizes(parts.values())),
    }


# ---- resuming ------------------------------------------------------------------------------------
SAVED_AFTER = 2  # batches of the epoch


def told(found: list[int], epoch: list[int], first_epoch: list[int], done: int) -> str:
    if found == epoch[done:]:
        return "continues with the next sample"
    if found == epoch:
        return "reads the epoch from its start"
    return f"continues in {'epoch 0 again' if found == first_epoch[done:] else 'another order'}"


def read(folder: Path, seedable: bool, skips: bool, saved_in: int) -> list[list[int]]:
    """Read three epochs and save in one of them; if that has been done, continue from there."""
    config = DataLoaderConfiguration(use_seedable_sampler=seedable)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    utils.set_seed(0)
    loader = accelerator.prepare(DataLoader(range(24), batch_size=2, shuffle=True))
    is_resumed = folder.exists()
    if is_resumed:
        accelerator.load_state(folder)
    epochs: list[list[int]] = []
    for epoch in range(saved_in if is_resumed else 0, 3):
        epochs.append([])
        skips &= is_resumed and epoch == saved_in
        active = accelerator.skip_first_batches(loader, SAVED_AFTER) if skips else loader
        for i, batch in enumerate(active):
            epochs[-1] += accelerator.gather(batch).tolist()
            if not is_resumed and (epoch, i) == (saved_in, SAVED_AFTER - 1):
                accelerator.save_state(folder)
    return epochs


def read_in_one_process(folder: Path) -> str:
    """Read as the script of thread 2574 does."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(32), batch_size=1, shuffle=True))
    epoch = []
    for i, batch in enumerate(loader):
        epoch += batch.tolist()
        if i == SAVED_AFTER - 1:
            accelerator.save_state(folder)
    accelerator.load_state(folder)
    rest = accelerator.skip_first_batches(loader, SAVED_AFTER)
    return told([sample for batch in rest for sample in batch.tolist()], epoch, [], SAVED_AFTER)


def resumes(folder: Path) -> Rows:
    def theirs(seedable: bool, skips: bool, saved_in: int) -> str:
        saved = folder / f"{seedable}_{skips}_{saved_in}"
        whole, rest = (run_world(2, read, saved, seedable, skips, saved_in)[0] for _ in range(2))
        return told(rest[0], whole[saved_in], whole[0], SAVED_AFTER * 2 * 2)

    whole, stopped = ours(folder, "whole"), ours(folder, "stopped", steps=6)
    run_world(2, train, change(stopped, steps=10))  # the second epoch has steps 4 to 7
    read_by = [[n for n in noted(one) if n[0] >= 6] for one in (stopped, whole)]
    right = "continues with the next sample"
    mine = right if read_by[0] == read_by[1] else "continues in another order"
    return {
        "685": (right, theirs(seedable=False, skips=False, saved_in=0), mine),
        "2016": (right, theirs(seedable=False, skips=True, saved_in=1), mine),
        "3242": (right, theirs(seedable=True, skips=True, saved_in=1), mine),
        "2574": (right, run_world(1, read_in_one_process, folder / "2574")[0], mine),
    }


# ---- the gradient --------------------------------------------------------------------------------
def trained(samples: int, batch_size: int, accumulation: int) -> list[float]:
    """Train two epochs as accelerate documents it, on samples of unequal length; return weights."""
    seedable = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulation, dataloader_config=seedable
    )
    utils.set_seed(0)
    recipe = Ragged(samples=samples, dtype="float64")
    data, _ = recipe.build_datasets({"features": 6})
    model = recipe.build_model({"features": 6})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in itertools.chain(loader, loader):
        with accelerator.accumulate(model):
            loss_sum, count = recipe.loss(model, batch, 0)
            accelerator.backward(loss_sum / count)
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def gradients(folder: Path) -> Rows:
    def compared(*both: list[float]) -> str:
        one, other = map(torch.tensor, both)
        difference = float((one - other).abs().max() / one.abs().max())
        if 1e-5 < difference < 1e-3:
            return f"weights that differ by {difference}"
        return "equal weights" if difference < 1e-3 else "different weights"

    def mine(name: str, processes: int, micro_batch_size: int) -> list[float]:
        config = ours(folder, name, processes, batches__micro_batch_size=micro_batch_size)
        found = weights(config.folder / "export")
        return torch.cat([found[name].flatten() for name in sorted(found)]).tolist()

    whole, two, parts = mine("whole", 1, 16), mine("two", 2, 8), mine("parts", 1, 4)
    theirs = {
        "90": compared(run_world(1, trained, 70, 16, 1)[0], run_world(2, trained, 70, 8, 1)[0]),
        "3661": compared(*(run_world(1, trained, 64, *how)[0] for how in ((16, 1), (4, 4)))),
    }
    return {
        "90": ("equal weights", theirs["90"], compared(whole, two)),
        "3661": ("equal weights", theirs["3661"], compared(whole, parts)),
    }


# ---- evaluation and streams ----------------------------------------------------------------------
class Stream(IterableDataset):
    """Counts the samples that are read from it."""

    read = 0

    def __iter__(self) -> Any:
        for i in range(20):
            self.read += 1
            yield i


def evaluate(data: Any, dispatches: bool | None) -> tuple[int, int]:
    """Return the number of predictions that this process holds, and of samples that it has read."""
    config = DataLoaderConfiguration(dispatch_batches=dispatches)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(data, batch_size=4))
    held = sum(len(accelerator.gather_for_metrics(batch)) for batch in loader)
    return held, getattr(data, "read", 0)


def evaluations(_: Path) -> Rows:
    found = [run_world(2, evaluate, *how) for how in ((range(20), None), (Stream(), False))]
    (listed, _), (stream, reads_all) = (zip(*by_rank, strict=True) for by_rank in found)
    _, dispatched = zip(*run_world(2, evaluate, Stream(), None), strict=True)
    counted = (
        "counts {1} samples in a stream of 20 with `dispatch_batches=False`; {0} in a map-style"
        " dataset"
    ).format
    everywhere = "{} of 2 processes hold all predictions".format
    reads = "ranks read {} and {} of 20 samples; with `dispatch_batches=False`, {} and {}".format
    return {
        "575": (counted(20, 20), counted(listed[0], stream[0]), ""),
        "3147": (everywhere(1), everywhere(listed.count(20)), ""),
        "1866": (reads(10, 10, 10, 10), reads(*dispatched, *reads_all), ""),
    }


# ---- FSDP2 ---------------------------------------------------------------------------------------
# accelerate shards on GPUs only; on CPU processes, its state is set to what it would be there.
def sharding_accelerator() -> Accelerator:
    accelerator = Accelerator(cpu=True)
    PartialState._shared_state["distributed_type"] = utils.DistributedType.FSDP
    accelerator.state.distributed_type = utils.DistributedType.FSDP
    accelerator.state.fsdp_plugin = utils.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=True,
        state_dict_type="SHARDED_STATE_DICT",
    )  # fmt: skip
    return accelerator


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))


def save_and_load(folder: Path) -> str:
    accelerator = sharding_accelerator()
    model = tiny()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    if not folder.exists():
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        accelerator.save_state(str(folder))
    accelerator.load_state(str(folder))
    is_sharded = all(hasattr(p, "full_tensor") for p in model.parameters())
    return "loads" if is_sharded and len(optimizer.state) == 4 else "has no state"


def held(on_meta: bool) -> int:
    """Return how many of the 4 parameters the optimizer holds."""
    accelerator = sharding_accelerator()
    with torch.device("meta" if on_meta and accelerator.process_index else "cpu"):
        model = tiny()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return len(given & {id(p) for p in model.parameters()})


def train_language(config: Config) -> str:
    accelerator = sharding_accelerator()
    model = config.recipe.build_model({})
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    tokens = torch.arange(8)[None]
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    return "trains"


def train_language_by_ours(config: Config) -> str:
    names = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    os.environ |= names | {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    return "trains" if train(config) == 0 else "fails"


def outcome(function: Callable, *arguments: Any) -> str:
    """Return what rank 0 returns, or the name of the error that ended it."""
    try:
        return run_world(2, function, *arguments)[0]
    except RuntimeError as error:
        return re.findall(r"(?m)^(\w+Error)|process died", str(error))[-1] or "process died"


def sharded(folder: Path) -> Rows:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    language = LlamaConfig(vocab_size=16, num_hidden_layers=2, tie_word_embeddings=False, **sizes)
    LlamaForCausalLM(language).save_pretrained(folder / "language")
    language.tie_word_embeddings = True  # as in the thread: the two weights differ
    language.save_pretrained(folder / "language")
    recipe = Language(folder=str(folder / "language"), validation_samples=0)
    config = change(make_config(folder, recipe), steps=2)
    at_once, later = (outcome(save_and_load, folder / "saved") for _ in range(2))
    counts = (
        "if rank 1 begins on the meta device, its optimizer holds {3} of 4 parameters; otherwise"
        " {1}"
    ).format
    found = [*run_world(2, held, False), *run_world(2, held, True)]
    return {
        "3896": ("loads", at_once, ""),
        "3971": ("loads", later, ""),
        "3870": (
            "trains",
            outcome(train_language, config),
            outcome(train_language_by_ours, config),
        ),
        "3209": (counts(4, 4, 4, 4), counts(*found), ""),
    }


# ---- processes and files -------------------------------------------------------------------------
def group_timeout(has_state: bool) -> int:
    """Return the timeout of the process group, set to 77 s, in seconds."""
    if has_state:
        PartialState(cpu=True)  # as a logger or transformers' TrainingArguments makes it
    options = utils.InitProcessGroupKwargs(timeout=timedelta(seconds=77))
    Accelerator(cpu=True, kwargs_handlers=[options])
    group: Any = torch.distributed.distributed_c10d._get_default_group()
    return int(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def track(folder: Path) -> None:
    os.chdir(folder)
    accelerator = Accelerator(cpu=True, log_with="wandb")
    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"loss": 1.0})
    accelerator.end_training()


def save_and_load_newest(folder: Path, is_killed: bool) -> str:
    """Save, and be killed during the next save; or load what load_state finds without a folder."""
    project = utils.ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = tiny()
    _, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    if is_killed:
        accelerator.save_state()
        optimizer.state_dict = lambda: os.kill(os.getpid(), signal.SIGKILL)
        accelerator.save_state()
    accelerator.load_state()
    return "continues from the save before"


def exit_code(folder: Path) -> int:
    """Launch a script that fails on rank 1."""
    script = folder / "fails.py"
    script.write_text("import os\nassert os.environ['RANK'] != '1'\n")
    config = REPOSITORY / "accelerate_configs/cpu_2_processes.yaml"
    flags = ["--config_file", str(config), "--main_process_port", "0"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags, str(script)]
    return subprocess.run(command, check=False, capture_output=True).returncode


def processes_and_files(folder: Path) -> Rows:
    set_alone, set_late = (run_world(2, group_timeout, has_state)[0] for has_state in (False, True))
    seconds = "{1} s if a PartialState existed before; otherwise {0} s".format
    run_world(2, track, folder)
    runs = len([*folder.glob("wandb/offline-run-*")])
    ended = "the launcher {}".format
    project = folder / "project"
    assert outcome(save_and_load_newest, project, True) == "process died"
    loaded = outcome(save_and_load_newest, project, False)
    return {
        "2236": (seconds(77, 77), seconds(set_alone, set_late), ""),
        "996": (
            ended("exits with 1"),
            ended("exits with 1" if exit_code(folder) else "ends with 0"),
            "",
        ),
        "3818": ("1 run of W&B", f"{runs} run of W&B", ""),
        "save_state": ("continues from the save before", loaded, ""),
    }


def main() -> None:
    """Print lines: thread | shown or right | expected | accelerate's result | this project's."""
    os.environ |= {"PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    for cases in (schedules, resumes, gradients, evaluations, sharded, processes_and_files):
        with tempfile.TemporaryDirectory() as folder:
            for thread, (expected, theirs, mine) in cases(Path(folder)).items():
                marker = "right" if theirs == expected else "shown"
                print(thread, marker, expected, theirs, mine, sep=" | ", flush=True)


if __name__ == "__main__":
    import threads  # so that processes and configs find its functions and classes by this name

    threads.main()
