"""A recipe for tests: the samples of ragged.py as a stream, whose lanes note what they read."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from ragged import Ragged
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Streamed(Ragged):
    """The same samples as a stream; files in `book` list samples that are opened, read and seen."""

    lanes: int = 8
    fewer: int = 3  # in each pass, another lane is this many samples shorter
    ends: int = -1  # the lane that ends after its first pass
    book: str = field(default="", metadata={"changes_curve": False})  # the folder of these files
    # what lanes return: "" generators, or iterables with state_dict: "saved" or a wrong one
    state: str = field(default="", metadata={"changes_curve": False})

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        train, validation = super().build_datasets(data_info)
        return Lanes(train, self), validation

    def loss(self, model: nn.Module, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        if model.training:  # a check calls loss in evaluation mode
            with open(f"{self.book}/seen_{os.environ.get('RANK', '0')}", "a") as file:
                file.write(f"{step} {batch['index'].tolist()}\n")
        return super().loss(model, batch, step)


class Lanes:
    def __init__(self, samples: Any, recipe: Streamed) -> None:
        self.samples = samples
        self.recipe = recipe
        self.lanes = recipe.lanes

    def indices(self, i: int, epoch: int) -> list[int]:
        """Return the samples of a lane in one pass over them."""
        generator = torch.Generator().manual_seed(epoch)
        own = torch.randperm(len(self.samples), generator=generator)[i :: self.lanes].tolist()
        return own[: len(own) - self.recipe.fewer * (i == epoch % self.lanes)]

    def lane(self, i: int, start: int, seed: int) -> Any:
        kinds = {"": Lane, "saved": StatefulLane, "forgets": ForgetfulLane}
        lane = kinds.get(self.recipe.state, WrongLane)(self, i, start)
        return lane if self.recipe.state else iter(lane)


class Lane:
    """A lane without random access: to reach its start, it reads the samples before it."""

    def __init__(self, stream: Lanes, i: int, start: int) -> None:
        self.stream = stream
        self.i = i
        self.start = start
        self.live = {"epoch": 0, "index": 0, "count": 0}  # changed in place, as in datasets

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.note("opened", self.start)
        live = self.live
        while live["epoch"] == 0 or self.i != self.stream.recipe.ends:
            own = self.stream.indices(self.i, live["epoch"])
            while live["index"] < len(own):
                position = live["count"]
                self.note("read", position)
                live["index"] += 1
                live["count"] += 1
                if position >= self.start:
                    yield self.stream.samples[own[live["index"] - 1]]
            live |= {"epoch": live["epoch"] + 1, "index": 0}

    def note(self, what: str, position: int) -> None:
        path = f"{self.stream.recipe.book}/{what}_{os.environ.get('RANK', '0')}"
        with open(path, "a") as file:
            file.write(f"{self.i} {position}\n")


class StatefulLane(Lane):
    def state_dict(self) -> Any:
        return self.live

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.live = state


class ForgetfulLane(StatefulLane):
    """Knows its position only at some samples, as a lane that reads through a buffer does."""

    def state_dict(self) -> Any:
        return self.live if self.live["count"] <= 6 or self.live["count"] == 12 else None


class WrongLane(StatefulLane):
    def state_dict(self) -> Any:
        nested: list[Any] = []
        for _ in range(100_000 * (self.stream.recipe.state == "nested")):
            nested = [nested]
        count = self.live["count"]
        wrong = {
            "tensor": torch.tensor(count),
            "nan": float("nan"),
            "tuple": (count,),
            "nested": nested,
        }
        if self.stream.recipe.state == "raises":
            raise KeyError("no such shard")
        return wrong.get(self.stream.recipe.state, {count: self.i})
