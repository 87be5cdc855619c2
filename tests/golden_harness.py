"""What golden.py runs: recipes, configs and processes, frozen at a9ab39b.

Imports nothing of the template's tests, which move and change; of the package only what a config is
made of and `train.main`.
"""

import dataclasses
import json
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from my_project.config import BatchesConfig, Config, OptimConfig, TelemetryConfig
from torch import Tensor, nn

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "golden_harness", "my_project.train", "my_project.evaluate", "tensorboard", "torch._dynamo",
        "torch.distributed.algorithms.ddp_comm_hooks", "torch.utils.tensorboard",
        "torchmetrics.classification", "torchvision.transforms.v2", "sklearn.datasets",
        "transformers.models.auto.modeling_auto", "transformers.models.bert.modeling_bert", "peft",
    ]
)  # fmt: skip

# B: samples in a micro-batch, T: positions in a sample, of which the first `length` have a target


# ---- recipes -------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Samples of unequal length, so that averaging micro-batch means is wrong."""

    dtype: str = "float32"
    dropout: float = 0.0
    noise: float = 0.0  # standard deviation, from random numbers used when a sample is read
    explode_at: tuple[int, ...] = ()  # steps whose loss is not finite
    empty_at: tuple[int, ...] = ()  # steps with num_items 0
    unused_parameter: bool = False
    batch_norm: bool = False

    def prepare_data(self) -> dict[str, Any]:
        return {"features": 6}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        train = Samples(70, data_info["features"], self.dtype, 1, self.noise)
        validation = Samples(23, data_info["features"], self.dtype, 2, 0.0)
        return train, {"validation": validation}

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(data_info["features"], 8)]
        if self.batch_norm:
            layers.append(Norm(8))
        model = nn.Sequential(*layers, nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 1))
        if self.unused_parameter:
            model.register_parameter("forgotten", nn.Parameter(torch.zeros(3)))
        return model.to(getattr(torch, self.dtype))

    def loss(self, model: nn.Module, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        counts = batch["counts"]  # (B, T)
        if step in self.empty_at:
            counts = torch.zeros_like(counts)
        error = (model(batch["x"])[..., 0] - batch["y"]) ** 2 * counts
        loss_sum = error.sum()
        if step in self.explode_at:
            loss_sum = loss_sum * float("inf")
        return loss_sum, counts.sum()

    def build_metrics(self) -> dict[str, Any]:
        from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

        return {"accuracy": BinaryAccuracy(), "auroc": BinaryAUROC()}  # the state of one is a list

    def update_metrics(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any) -> None:
        score = model(batch["x"])[:, 0, 0].sigmoid()
        for metric in metrics.values():
            metric.update(score, batch["label"])


class Block(nn.Module):
    """A block for FSDP to gather, with a buffer that checkpoints hold and one that they lack."""

    gain: Tensor
    shift: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.register_buffer("gain", torch.linspace(0.5, 1.0, width))
        self.register_buffer("shift", torch.rand(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x))) * self.gain + self.shift


class Tower(nn.Module):
    """Blocks between an input and an output that share a weight, and a part that is frozen."""

    def __init__(self, features: int, width: int = 8) -> None:
        super().__init__()
        self.input = nn.Linear(features, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.output = nn.Linear(features, width, bias=False)
        self.output.weight = self.input.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.input(x))
        for block in self.blocks:
            x = block(x)
        return (x @ self.output.weight).sum(-1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class Deep(Ragged):
    """The same samples for a model of blocks."""

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        return Tower(data_info["features"]).to(getattr(torch, self.dtype))


@dataclass(frozen=True, kw_only=True)
class Streamed(Ragged):
    """The same samples as a stream; files in `book` list the samples seen."""

    book: str = field(default="", metadata={"changes_curve": False})

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        train, validation = super().build_datasets(data_info)
        return Lanes(train), validation

    def loss(self, model: nn.Module, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        with open(f"{self.book}/seen_{os.environ.get('RANK', '0')}", "a") as file:
            file.write(f"{step} {batch['index'].tolist()}\n")
        return super().loss(model, batch, step)


class Lanes:
    """Eight lanes, of which the first is 3 samples shorter than its part of the samples."""

    lanes = 8

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def lane(self, i: int, *where: int) -> Iterator[dict[str, Tensor]]:
        *_, start, _ = where  # the old code's first is the epoch, which is 0
        generator = torch.Generator().manual_seed(0)
        indices = torch.randperm(len(self.samples), generator=generator)[i :: self.lanes].tolist()
        for index in cycle(indices[: len(indices) - 3 * (i == 0)]):
            if start > 0:
                start -= 1
            else:
                yield self.samples[index]


class Norm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2)).view_as(x)


class Samples(torch.utils.data.Dataset):
    def __init__(self, length: int, features: int, dtype: str, seed: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(length, 9, features, generator=generator, dtype=torch.float64)
        self.y = self.x.sin().sum(-1)
        lengths = torch.randint(1, 10, (length, 1), generator=generator)
        self.counts = (torch.arange(9)[None] < lengths).to(torch.float64)
        self.dtype = getattr(torch, dtype)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = self.x[index]
        if self.noise:
            x = x + self.noise * torch.randn(x.shape, dtype=torch.float64)
        return {
            "x": x.to(self.dtype),
            "y": self.y[index].to(self.dtype),
            "counts": self.counts[index].to(self.dtype),
            "label": (self.y[index, 0] > 0).long(),
            "index": torch.tensor(index),
        }


# ---- configs and inputs --------------------------------------------------------------------------
def make_config(recipe: Any, **settings: Any) -> Config:
    """Make the config of a short run; dotted settings such as optim__lr override."""
    config = Config(
        recipe=recipe,
        batches=BatchesConfig(global_batch_size=16, micro_batch_size=4, workers=0),
        optim=OptimConfig(lr=0.05, warmup_steps=3, clip_norm=1.8),
        telemetry=TelemetryConfig(every_steps=1, trackers=[]),
        runs_folder="runs",
        run_name="run",
        steps=10,
    )
    return change(config, **settings)


def change(config: Any, **settings: Any) -> Any:
    """Replace settings, nested ones written with two underscores."""
    changed: dict[str, Any] = {}
    for name, value in settings.items():
        outer, _, inner = name.partition("__")
        if inner:
            value = change(changed.get(outer, getattr(config, outer)), **{inner: value})
        changed[outer] = value
    return dataclasses.replace(config, **changed)


TEXTS = {
    "fruit": ["an apple", "two sweet pears and a plum", "plums", "pears with one sour apple in it"],
    "tool": ["a hammer", "the long red saw", "nails, nails and a hammer", "saw"],
}
PROMPTS = {"fruit": "eat: ", "tool": "use: "}


def write_inputs(folder: Path) -> None:
    """Write the data of the recipes' cases, and a tiny encoder."""
    write_encoder(folder / "encoder")
    for name in ("texts", "pairs", "finetune"):
        (folder / name).mkdir()
    rows = [
        {"text": text, "label": label, "number": number, "prompt": PROMPTS[label]}
        for number, (label, texts) in enumerate(TEXTS.items())
        for text in texts
    ]
    write_rows(folder / "finetune/train.jsonl", rows * 6)
    write_rows(folder / "finetune/validation.jsonl", rows)
    for i in range(24):
        text = f"Document {i}: " + "the quick brown fox. " * (2 + i % 5)
        (folder / f"texts/{i:02}.txt").write_text(text)
    words = ("red", "green", "blue", "round", "square", "small", "large", "wooden", "iron", "glass")
    words += ("open", "closed")
    pairs = [(a, b) for i, a in enumerate(words) for b in words[:i]]
    rows = [{"query": f"{a} {b}", "document": f"{b} with a {a}"} for a, b in pairs]
    write_rows(folder / "pairs/train.jsonl", rows[:48])
    write_rows(folder / "pairs/validation.jsonl", rows[48:])


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_encoder(folder: Path) -> None:
    """Write a model folder as on the Hugging Face Hub, weights included."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import AutoModel, BertConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[EOS]"]
    words = [*TEXTS["fruit"], *TEXTS["tool"], *PROMPTS.values()]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special)
    tokenizer.train_from_iterator(words, trainer)
    names = {"unk_token": "[UNK]", "eos_token": "[EOS]"}
    names |= {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(1)
    AutoModel.from_config(config).save_pretrained(folder)


# ---- processes -----------------------------------------------------------------------------------
def run_processes(count: int, function: Callable, *arguments: Any, seconds: float) -> list:
    """Run function(*arguments) on each process of a world of its own.

    Returns:
        By rank what was returned, or the exit code that is not 0.

    Raises:
        RuntimeError: a process raised; the message has the rank and the traceback.
        TimeoutError: a process gave no result in these seconds.
    """
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    pipes, workers = [], []
    for rank in range(count):
        ours, theirs = PROCESSES.Pipe()
        environment = {
            "RANK": rank,
            "WORLD_SIZE": count,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        work = (theirs, environment if count > 1 else {}, function, arguments)
        worker = PROCESSES.Process(target=_work, args=work)
        worker.start()
        theirs.close()
        pipes.append(ours)
        workers.append(worker)
    results: list = []
    try:
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(seconds):
                raise TimeoutError(f"rank {rank} gave no result in {seconds} s")
            try:
                outcome, value = pipe.recv()
            except EOFError:
                outcome, value = "failed", "the process died"
            if outcome == "failed":
                raise RuntimeError(f"rank {rank} of {count}: {value}")
            results.append(value)
    finally:
        for worker in workers:
            worker.join(10)
            worker.kill()
            worker.join()
    return results


def _work(pipe: Any, environment: dict[str, Any], function: Callable, arguments: tuple) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where this runs under nohup
    multiprocessing.set_start_method("fork", force=True)  # loader workers: as in a real run
    try:
        with open(os.devnull, "w") as nowhere:
            sys.stdout = nowhere
            pipe.send(("returned", function(*arguments)))
    except SystemExit as leaving:
        pipe.send(("exited", leaving.code))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    finally:
        pipe.close()
        sys.stdout = sys.__stdout__


def start(work: str, config: Any, stop: tuple[int, int] | None, number: int, fsdp: int) -> int:
    """Run main on this process; it gets a signal in the step and on the rank that stop says."""
    os.chdir(work)
    from my_project.train import main

    torch.set_num_threads(1)
    if fsdp:
        ask_for_fsdp(fsdp)
    loss = type(config.recipe).loss

    def interrupted(self: Any, model: Any, batch: Any, step: int) -> Any:
        if (step, int(os.environ.get("RANK", "0"))) == stop and model.training:
            os.kill(os.getpid(), number)
        return loss(self, model, batch, step)

    if stop:
        type(config.recipe).loss = interrupted
    return main(config)


def ask_for_fsdp(replicas: int) -> None:
    """Set what `accelerate launch` sets for an accelerate config with fsdp_config."""
    os.environ.update(
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION="2",
        FSDP_RESHARD_AFTER_FORWARD="true",
        FSDP_AUTO_WRAP_POLICY="SIZE_BASED_WRAP",
        FSDP_MIN_NUM_PARAMS="20",
        FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT",
    )
    if replicas > 1:
        os.environ.update(
            ACCELERATE_USE_PARALLELISM_CONFIG="true",
            PARALLELISM_CONFIG_DP_REPLICATE_SIZE=str(replicas),
            PARALLELISM_CONFIG_DP_SHARD_SIZE=str(int(os.environ["WORLD_SIZE"]) // replicas),
        )
