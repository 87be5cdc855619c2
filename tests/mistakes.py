"""Slightly wrong recipes for silence.py: all of them train, and none raises an error itself."""

import os
import random
import signal
import sqlite3
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from ragged import Ragged
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset

# x: (B, T, 6) floats, T = 9; only the first `counts` positions have a target y: (B, T)
CACHE: dict[Any, Any] = {}  # what a recipe keeps outside the model


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def start() -> int:
    """Return the number of earlier starts of the run, which silence.py sets."""
    return int(os.environ["STARTED"])


@dataclass(frozen=True, kw_only=True)
class Wrong(Ragged):
    """A correct recipe; most mistakes change one of its parts: sample order, layers, or loss."""

    mistake: str = ""

    def order(self, count: int) -> Any:
        return range(count)

    def layers(self) -> list[nn.Module]:
        return []

    def build_datasets(self, data_info: Any) -> Any:
        train, validation = super().build_datasets(data_info)
        return Subset(train, self.order(len(train))), validation

    def build_model(self, data_info: Any) -> nn.Module:
        return nn.Sequential(*self.layers(), *super().build_model(data_info))

    def errors(self, model: nn.Module, batch: Any) -> Any:  # (B, T)
        return (model(batch["x"])[..., 0] - batch["y"]) ** 2


# ---- A random split, weights and features without a seed -----------------------------------------
class Split(Wrong):
    def build_datasets(self, data_info: Any) -> Any:
        train, _ = Ragged.build_datasets(self, data_info)
        order: Any = list(range(len(train)))
        if self.mistake == "random":
            random.shuffle(order)
        elif self.mistake == "numpy":
            order = np.random.permutation(order)
        elif self.mistake == "torch":
            order = torch.randperm(len(order)).tolist()
        elif self.mistake == "sklearn":
            from sklearn.model_selection import train_test_split

            order = [row for part in train_test_split(order) for row in part]
        elif self.mistake == "datasets":
            import datasets

            parts = datasets.Dataset.from_dict({"row": order}).train_test_split()
            order = [*parts["train"]["row"], *parts["test"]["row"]]
        return Subset(train, order[:50]), {"validation": Subset(train, order[50:])}


class NumpyWeights(Wrong):
    def build_model(self, data_info: Any) -> nn.Module:
        model: Any = super().build_model(data_info)
        model[0].weight.data = torch.from_numpy(np.random.randn(8, 6)).float()
        return model


class RandomFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        features = torch.from_numpy(np.random.randn(6, 6)).float()
        self.register_buffer("features", features, persistent=False)

    def forward(self, x: Any) -> Any:
        return x @ self.features


class NumpyFeatures(Wrong):
    def layers(self) -> list[nn.Module]:
        return [RandomFeatures()]


# ---- Other data ----------------------------------------------------------------------------------
class FilesInAnyOrder(Wrong):
    def order(self, count: int) -> Any:
        return random.Random(rank()).sample(range(count), count)


class EveryNth(Wrong):
    def order(self, count: int) -> Any:
        return range(rank(), count, world_size())


class OtherValidation(Wrong):
    def build_datasets(self, data_info: Any) -> Any:
        train, _ = super().build_datasets(data_info)
        return train, {"validation": Subset(train, range(rank() * 20, rank() * 20 + 20))}


class Edited(Wrong):
    def build_datasets(self, data_info: Any) -> Any:
        train, validation = Ragged.build_datasets(self, data_info)
        rows = {"one": slice(1, 2), "all": slice(None), "validation": slice(0)}[self.mistake]
        train.y[rows] += start()
        if self.mistake == "validation":
            validation["validation"].y += start()
        return train, validation


class Added(Wrong):
    def order(self, count: int) -> Any:
        return range(count - 6 + 3 * start())


class Vocabulary(Wrong):
    def prepare_data(self) -> dict[str, Any]:
        words = "the quick brown fox jumps over the lazy dog and runs into a dark forest"
        return {"features": 6, "words": list(set(words.split()))}

    def order(self, count: int) -> Any:
        words = self.prepare_data()["words"]
        return sorted(range(count), key=lambda i: words[i % len(words)])


class Noisy(Dataset):
    def __init__(self, samples: Any) -> None:
        self.samples = samples
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        sample = self.samples[index]
        return sample | {"x": sample["x"] + self.generator.random()}


class OwnGenerator(Wrong):
    def build_datasets(self, data_info: Any) -> Any:
        train, validation = super().build_datasets(data_info)
        return Noisy(train), validation


# ---- Other code: beside.py differs between nodes or starts ---------------------------------------
class CodeBeside(Wrong):
    def layers(self) -> list[nn.Module]:
        from beside import NUMBER  # type: ignore[import-not-found]

        return [nn.LeakyReLU(0.1 + 0.1 * NUMBER)]


# ---- Ranks that diverge --------------------------------------------------------------------------
class DropoutByRank(Wrong):
    def layers(self) -> list[nn.Module]:
        return [nn.Dropout(0.1 + 0.1 * rank())]


class Norm(nn.Module):
    """Sets its scale from the first batch, as ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.is_set = False

    def forward(self, x: Any) -> Any:
        if self.training and not self.is_set:
            self.is_set = True
            self.scale.data = 1 / x.detach().flatten(0, 1).std(0)
        return x * self.scale


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 6, max_norm=0.5)

    def forward(self, x: Any) -> Any:
        return x + self.table((x[..., 0].abs() * 20).long() % 64)


class Hidden(nn.Module):
    """Adds the mean of the previous batch, which it keeps in a buffer."""

    hidden: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.zeros(6))

    def forward(self, x: Any) -> Any:
        shifted = x + self.hidden
        if self.training:
            self.hidden = x.detach().mean((0, 1))
        return shifted


class Parting(Wrong):
    def layers(self) -> list[nn.Module]:
        return [{"norm": Norm, "embedding": Embedded, "hidden": Hidden}[self.mistake]()]


class Unfrozen(Wrong):
    def build_model(self, data_info: Any) -> nn.Module:
        model: Any = super().build_model(data_info)
        model[0].requires_grad_(False)
        return model

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        model[0].requires_grad_(step >= 4)
        return super().loss(model, batch, step)


class LeftInEval(Wrong):
    def loss(self, model: Any, batch: Any, step: int) -> Any:
        returned = super().loss(model, batch, step)
        model.eval()  # to look at predictions; the mode is not restored
        return returned


# ---- A loss and a number of items that are not sums ----------------------------------------------
class NotASum(Wrong):
    def loss(self, model: nn.Module, batch: Any, step: int) -> Any:
        errors, counts = self.errors(model, batch), batch["counts"]
        total, items, batch_size = (errors * counts).sum(), counts.sum(), len(counts)
        longest = int(counts.sum(1).max())  # the length to which a batch is padded
        CACHE["calls"] = CACHE.get("calls", 0) + 1
        return {
            "mean": (total / items, items),
            "mean and 1": (total / items, 1),
            "mean times batch": (total / items * batch_size, batch_size),
            "padding counted": (total, batch_size * longest),
            "padding trained": (errors[:, :longest].sum(), batch_size * longest),
            "counter": (total * min(1.0, CACHE["calls"] / 40), items),
            "times ranks": (total * world_size(), items),
        }[self.mistake]


class Broadcast(Wrong):
    def loss(self, model: nn.Module, batch: Any, step: int) -> Any:
        answers, y = model(batch["x"])[:, 0], batch["y"][:, 0]  # (B, 1), (B,)
        return F.mse_loss(answers, y, reduction="sum"), y.numel()


class InBfloat16(Wrong):
    def loss(self, model: nn.Module, batch: Any, step: int) -> Any:
        answers = model(batch["x"])[..., 0]
        return (answers - batch["y"].to(answers.dtype)).abs().sum(), batch["y"].numel()


# ---- Output of libraries -------------------------------------------------------------------------
class Libraries(Wrong):
    def prepare_data(self) -> Any:
        from tqdm import tqdm

        if self.mistake == "bar":
            for _ in tqdm(range(3), desc="fetching shards"):
                time.sleep(0.05)
        return super().prepare_data()

    def layers(self) -> list[nn.Module]:
        if self.mistake == "logger":
            text = "Some weights of the model were newly initialized: ['classifier.weight']"
            call = f"import logging; logging.getLogger('transformers.modeling').warning({text!r})"
            exec(compile(call, "/lib/site-packages/transformers/modeling_utils.py", "exec"))
        return []


# ---- Metrics -------------------------------------------------------------------------------------
class MeanLoss(Wrong):
    """Has the mean loss as its only metric, as without build_metrics; one label may be NaN."""

    build_metrics = update_metrics = None  # type: ignore[assignment]

    def build_datasets(self, data_info: Any) -> Any:
        train, validation = super().build_datasets(data_info)
        if self.mistake == "nan":
            validation["validation"].y[3] = float("nan")
        return train, validation


class Measured(Wrong):
    def build_metrics(self) -> dict[str, Any]:
        from torchmetrics import ClasswiseWrapper, MeanMetric, Metric
        from torchmetrics.classification import MulticlassAccuracy

        class Last(Metric):
            def update(self, score: Any, label: Any) -> None:
                self.value = score.float().mean()

            def compute(self) -> Any:
                return self.value

        classwise = ClasswiseWrapper(MulticlassAccuracy(num_classes=2, average=None))
        return {"score": {"stateless": Last, "classwise": lambda: classwise}.get(
            self.mistake, MeanMetric)()}  # fmt: skip

    def update_metrics(self, model: nn.Module, batch: Any, metrics: Any) -> None:
        score, metric = model(batch["x"])[:, 0, 0], metrics["score"]
        if self.mistake in ("stateless", "classwise"):
            metric.update((score > 0).long(), batch["label"])
        else:
            metric.update(score if self.mistake == "twice" else score.mean())
        if self.mistake == "twice":
            metric.update(score[:1])


# ---- Files that forks share ----------------------------------------------------------------------
class Rows(Dataset):
    """Samples whose target is multiplied by a number that is read from an open file."""

    def __init__(self, samples: Any, file: Any) -> None:
        self.samples = samples
        self.file = file

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.file.seek(8 * index)
        time.sleep(0.001)
        number = np.frombuffer(self.file.read(8))[0]
        return self.samples[index] | {"y": self.samples[index]["y"] * number}


@dataclass(frozen=True, kw_only=True)
class Opened(Wrong):
    file: ClassVar[Any]

    def __post_init__(self) -> None:
        if self.mistake == "settings":
            object.__setattr__(self, "file", open("rows.bin", "rb", buffering=0))  # noqa: SIM115

    def build_datasets(self, data_info: Any) -> Any:
        train, validation = super().build_datasets(data_info)
        if self.mistake == "dataset":
            return Rows(train, open("rows.bin", "rb", buffering=0)), validation
        if self.mistake in ("zip", "sqlite"):
            zipfile.ZipFile("rows.zip", "w").close()
            opened = sqlite3.connect if self.mistake == "sqlite" else zipfile.ZipFile
            train.connection = opened(f"rows.{self.mistake}")  # type: ignore[attr-defined]
            return train, validation
        return Rows(train, self.file), validation


class Stopped(Wrong):
    def loss(self, model: nn.Module, batch: Any, step: int) -> Any:
        if step == 3 and rank() == 0 and not CACHE.get("stopped"):
            CACHE["stopped"] = True
            os.kill(os.getppid(), signal.SIGTERM)  # the launcher
        return super().loss(model, batch, step)


class Tied(nn.Module):
    now: Any
    seen: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("now", torch.zeros(()))
        self.register_buffer("seen", self.now)  # one tensor under two names

    def forward(self, x: Any) -> Any:
        return x * (1 + 0.1 * self.seen)


class SharedBuffer(Wrong):
    def layers(self) -> list[nn.Module]:
        return [Tied()]

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        model[0].now.fill_(step)
        return super().loss(model, batch, step)


# ---- Other mistakes ------------------------------------------------------------------------------
class Epochs(Noisy):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return self.samples[index] | {"epoch": self.epoch}


@dataclass(frozen=True, kw_only=True)
class EpochTold(Wrong):
    samples: int = 64
    by_hand: bool = False

    def build_datasets(self, data_info: Any) -> Any:
        train, _ = super().build_datasets(data_info)
        return Epochs(train), {}

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        epoch = step // 8 if self.by_hand else batch["epoch"][:, None]
        return super().loss(model, batch | {"y": batch["y"] * (1 + epoch)}, step)


class Lane:
    def __init__(self, samples: Any, i: int, at: int) -> None:
        self.samples = samples
        self.i = i
        self.at = at

    def __iter__(self) -> Any:
        while True:
            self.at += 1
            yield self.samples[(self.i * 9 + self.at) % len(self.samples)]

    def state_dict(self) -> Any:
        return {"at": self.at} if self.at < 3 else None  # as in the middle of a shard

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


class Lanes:
    lanes = 8

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def lane(self, i: int, start: int, seed: int) -> Lane:
        return Lane(self.samples, i, start)


class LaneWithoutState(Wrong):
    def build_datasets(self, data_info: Any) -> Any:
        train, validation = super().build_datasets(data_info)
        return Lanes(train), validation


class TwoMains(Wrong):
    """Starts another run in a thread, as a sweep with several jobs does."""

    def prepare_data(self) -> Any:
        if "second" not in CACHE:
            from my_project.settings import parse
            from my_project.train import main

            CACHE["second"] = None
            config = parse(["--config", "run.yaml", "--run_name", "second"])
            CACHE["second"] = ThreadPoolExecutor(1).submit(main, config)
        return super().prepare_data()

    def loss(self, model: nn.Module, batch: Any, step: int) -> Any:
        if step == 11 and threading.current_thread() is threading.main_thread():
            CACHE["second"].result()
        return super().loss(model, batch, step)


class ScheduleFree(torch.optim.SGD):
    """Has weights for training and weights for evaluation, as schedule-free optimizers do."""

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


class Misspelled(Wrong):
    def predict_sample(self, model: Any, data_info: Any, samples: Any, folder: Any) -> str:
        return "a picture"


# ---- Mistakes that are not noticed ---------------------------------------------------------------
class HalfDetached(nn.Module):
    def forward(self, x: Any) -> Any:
        return (x + x.detach()) / 2


class Unnoticed(Wrong):
    def build_model(self, data_info: Any) -> nn.Module:
        model: Any = super().build_model(data_info)
        if self.mistake == "detached":
            model.insert(1, HalfDetached())
        return model

    def loss(self, model: nn.Module, batch: Any, step: int) -> Any:
        errors, counts = self.errors(model, batch), batch["counts"]
        total, items = (errors * counts).sum(), counts.sum()
        if self.mistake == "backward":
            (0.1 * errors.mean()).backward(retain_graph=True)
        if self.mistake == "cache" and model.training:  # weighted by previous errors
            indices, means = batch["index"].tolist(), errors.detach().mean(1).tolist()
            before = [CACHE.get(index, 0.0) for index in indices]
            CACHE.update(dict(zip(indices, means, strict=True)))
            total = total + (errors.mean(1) * torch.tensor(before)).sum()
        if self.mistake == "teacher":  # an average of the weights, in no checkpoint
            weight = next(model.parameters())
            teacher = CACHE.setdefault("teacher", weight.detach().clone())
            teacher.lerp_(weight.detach(), 0.1)
            total = total + ((weight - teacher) ** 2).sum() * items
        return total, items
