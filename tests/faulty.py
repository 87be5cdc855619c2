"""A recipe with one injected fault, for faults.py."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ragged import Ragged
from torch import distributed


@dataclass(frozen=True, kw_only=True)
class Faulty(Ragged):
    """Ragged data; one rank meets a fault in one method, in the loss at a step or in a sample."""

    what: str = ""
    where: str = "loss"  # the name of a method, or sample: in the loader worker that reads it
    step: int = 0
    on_rank: int = 0
    detail: str = ""  # a folder to fill, a signal, a number of elements

    def meets(self, where: str, step: int | None = None) -> bool:
        """Return whether the fault is here; without its own step at any."""
        rank = int(os.environ.get("RANK", "0"))
        return (where, rank) == (self.where, self.on_rank) and step in (None, self.step)

    def strike(self, where: str, step: int | None = None) -> None:
        """Meet the fault, if it is here."""
        if self.meets(where, step):
            strike(self.what, where, self.detail)

    def prepare_data(self) -> dict[str, Any]:
        self.strike("prepare_data")
        return super().prepare_data()

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.strike("build_datasets")
        train, validation = super().build_datasets(data_info)
        return (Reading(train, self) if self.where == "sample" else train), validation

    def build_model(self, data_info: dict[str, Any]) -> Any:
        self.strike("build_model")
        return super().build_model(data_info)

    def collate(self, samples: list[Any]) -> Any:
        self.strike("collate")
        return torch.utils.data.default_collate(samples)

    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        self.strike("parameter_groups")
        return [{"params": list(model.parameters())}]

    def model_blocks(self, model: Any) -> list[Any]:
        self.strike("model_blocks")
        return [model[0]]

    def build_metrics(self) -> dict[str, Any]:
        self.strike("build_metrics")
        return super().build_metrics()

    def update_metrics(self, model: Any, batch: Any, metrics: Any) -> None:
        self.strike("update_metrics")
        super().update_metrics(model, batch, metrics)

    def flops_per_item(self, model: Any) -> float:
        self.strike("flops_per_item")
        return 1.0

    def export(self, model: Any, data_info: Any, tensors: Any, folder: Any) -> Any:
        self.strike("export")
        return "model", tensors

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        if self.what == "weights" and step == self.step:  # on every rank
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
        if self.what == "nan":
            loss_sum, num_items = super().loss(model, batch, step)
            is_bad = step >= self.step and self.meets("loss")
            return loss_sum * (float("nan") if is_bad else 1.0), num_items
        self.strike("loss", step)
        return super().loss(model, batch, step)


class Reading(torch.utils.data.Dataset):
    """Samples, one of which is not read without a fault."""

    def __init__(self, samples: Any, recipe: Faulty) -> None:
        self.samples, self.recipe = samples, recipe

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.recipe.strike("sample", self.recipe.step if index % 16 == 5 else -1)
        return self.samples[index]


def sleeps_forever() -> None:
    while True:
        time.sleep(1)


def strike(what: str, where: str, detail: str) -> None:
    """Do what a fault does."""
    if what == "raise":
        raise ValueError(f"told to fail in {where}")
    if what == "signal":
        os.kill(os.getpid(), getattr(signal, detail))
    elif what == "signal launcher":
        os.kill(os.getppid(), getattr(signal, detail))
    elif what == "exit":
        os._exit(int(detail))
    elif what == "hang":
        sleeps_forever()
    elif what == "receive":  # from a rank that sends nothing
        distributed.recv(torch.zeros(1), src=1 - distributed.get_rank())
    elif what == "collective":
        distributed.all_reduce(torch.zeros(int(detail)))
    elif what == "device memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    elif what == "host memory":
        torch.empty(2**46)
    elif what == "python memory":
        bytearray(2**46)
    elif what == "kernel":  # its out-of-memory killer, in a control group that faults.py has made
        (Path(detail) / "cgroup.procs").write_text(str(os.getpid()))
        bytearray(300_000_000)
    elif what == "disk":
        with (Path(detail) / "filler").open("wb", buffering=0) as file:
            for size in (2**16, 2**12, 2**6, 1):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    continue
