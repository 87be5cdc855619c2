"""The recipe of the tests, recording the samples of each step; for kills.py."""

import json
import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from ragged import Ragged  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True, kw_only=True)
class Recorded(Ragged):
    """Appends a line to a file for each micro-batch: start, step and indices of its samples."""

    file: str = ""
    step_seconds: float = 0.06  # minimum duration of a step, for any number of processes

    def loss(self, model: Any, batch: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the samples, wait, and compute the loss; checks of the recipe only compute it."""
        if not model.training:
            return super().loss(model, batch, step)
        indices, processes = batch["index"].tolist(), int(os.environ.get("WORLD_SIZE", "1"))
        # a restart in place keeps LAUNCH_TIME; a single process has a new pid, but no restart count
        restart = os.environ["TORCHELASTIC_RESTART_COUNT"] if processes > 1 else os.getpid()
        line = [f"{os.environ['LAUNCH_TIME']} {restart}", step, indices]
        file = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{json.dumps(line)}\n".encode())
        os.close(file)
        time.sleep(self.step_seconds * len(indices) * processes / 12)
        return super().loss(model, batch, step)
