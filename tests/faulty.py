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
    """Ragged data; one rank has a fault in a method, or when it reads samples ("sample")."""

    detail: str = ""  # of the fault: a folder to fill, a signal, a number of elements

    def strike(self, method: str, step: int | None = None) -> None:
        if self.meets_fault(method, step):
            strike(self.fault, method, self.detail)

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        train, validation = super().build_datasets(data_info)
        return (Reading(train, self) if self.fault_in == "sample" else train), validation

    def collate(self, samples: list[Any]) -> Any:
        self.strike("collate")
        return torch.utils.data.default_collate(samples)

    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        self.strike("parameter_groups")
        return [{"params": list(model.parameters())}]

    def model_blocks(self, model: Any) -> list[Any]:
        self.strike("model_blocks")
        return [model[0]]

    def flops_per_item(self, model: Any) -> float:
        self.strike("flops_per_item")
        return 1.0

    def export(self, model: Any, data_info: Any, tensors: Any, folder: Any) -> Any:
        self.strike("export")
        return "model", tensors

    def loss(self, model: Any, batch: Any, step: int) -> Any:
        if self.fault == "weights" and step == self.fault_at:  # on every rank
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
        if self.fault == "nan":  # in this and all later steps
            step = min(step, self.fault_at)
        return super().loss(model, batch, step)


class Reading(torch.utils.data.Dataset):
    """Samples; reading some of them triggers the fault."""

    def __init__(self, samples: Any, recipe: Faulty) -> None:
        self.samples, self.recipe = samples, recipe

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index % 16 == 5:
            self.recipe.strike("sample")
        return self.samples[index]


def strike(what: str, method: str, detail: str) -> None:
    """Trigger a fault."""
    if what == "raise":
        raise ValueError(f"told to fail in {method}")
    if what == "signal":
        os.kill(os.getpid(), getattr(signal, detail))
    elif what == "signal launcher":
        os.kill(os.getppid(), getattr(signal, detail))
    elif what == "exit":
        os._exit(int(detail))
    elif what == "hang":
        while True:
            time.sleep(1)
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
    elif what == "kernel":  # the kernel's out-of-memory killer, in a control group of faults.py
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
