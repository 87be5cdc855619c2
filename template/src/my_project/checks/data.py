"""Read some samples of each dataset, and describe their content, so that it can be compared.

Integers and text are kept as hashes (of a path from a root, or a URL, only the last part is hashed,
since folders may depend on the node). Floating-point values and uint8 images are kept as three
numbers, since another type of CPU rounds differently. A separate process, like a loader worker,
reads the samples while the model is built. So the training process opens no file whose position its
loader workers would share, and changes no dataset.
"""

import dataclasses
import hashlib
import math
import multiprocessing
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import PurePath
from pickle import PicklingError
from typing import Any, TypeAlias

import numpy as np
import torch

from ..config import Config
from ..files import Json
from ..loading.layout import is_stream
from ..loading.loader import ignore_signals_except_parents, tell_epoch
from ..loading.seeding import derive_seed, seed_rng
from ..recipe import Dataset

SAMPLES = 4  # the number of samples read from each dataset, evenly spaced
SECONDS = 5.0  # time limit for reading them all, and maximum wait for them once the model is built
MAX_PARTS = 64  # the number of parts of a sample that are compared
MAX_ITEMS = 8  # the number of items of a list that are compared
ARRAYS = ("__array__", "__array_interface__")  # attributes of arrays, tensors and images
TOLERANCE = 1e-3  # for floating-point values, relative to their root mean square


# what describes a part of a sample: a text, such as a hash, or three numbers
Fact: TypeAlias = str | list[float]


@dataclasses.dataclass(kw_only=True)
class Facts:
    """What is known about a dataset."""

    length: int  # the number of samples or lanes
    samples: dict[str, dict[str, Fact]]  # the facts of each sample, by index and name of the part
    draws: bool  # whether a sample differs when it is read again under the same seed

    @property
    def unknown(self) -> list[str]:
        """Return the types of the parts that cannot be compared."""
        named = (part for sample in self.samples.values() for part in sample.items())
        return sorted({str(fact) for name, fact in named if name.endswith("?")})

    def difference(self, known: "Facts") -> str:
        """Return how these facts differ from another start's or rank's; "" if they do not."""
        if self.length != known.length:
            return f"has length {self.length:,}, not {known.length:,}"
        indices = differing_names(self.samples, known.samples)
        return f"has other values in samples {', '.join(indices)}" if indices else ""


def differing_names(first: Mapping[str, Json], second: Mapping[str, Json]) -> list[str]:
    """Return the names that are in both mappings, with different values."""
    return [name for name in first if name in second and not is_same(first[name], second[name])]


def is_same(first: Any, second: Any) -> bool:
    """Return whether two samples have the same parts, or two parts are the same."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and not differing_names(first, second)
    if isinstance(first, list) and isinstance(second, list):
        limit = TOLERANCE * max(first[0], second[0])  # the root mean square
        return np.allclose(first, second, rtol=0, atol=limit, equal_nan=True)
    return bool(first == second)


class Reading:
    """Read the samples in another process, which starts now."""

    def __init__(
        self, config: Config, datasets: Mapping[str, Dataset], *, is_backward: bool = False
    ) -> None:
        """Start the process.

        Args:
            config: the run's config.
            datasets: map-style datasets or streams, by name.
            is_backward: whether to read the last sample first. A dataset's own generator has the
                same state in each new process: in the same order it would give the same samples.
        """
        method = config.batches.loader.get("multiprocessing_context")
        context: Any = multiprocessing.get_context(method)
        self.pipe, sender = context.Pipe(duplex=False)
        twice = config.batches.seed_samples is not True
        arguments = sender, datasets, config.seed, twice, is_backward
        self.process = context.Process(target=_read, args=arguments, daemon=True)
        with suppress(AttributeError, TypeError, PicklingError):  # no fork, and not picklable
            self.process.start()
        sender.close()

    def facts(self) -> dict[str, Facts]:
        """Return what is known about each dataset; {} if they were not read in time."""
        try:
            return self.pipe.recv() if self.pipe.poll(SECONDS) else {}
        except (EOFError, OSError):  # the process has died, or was not started
            return {}
        finally:
            self.pipe.close()
            if self.process.pid:
                self.process.kill()
                self.process.join(SECONDS)  # the process may not end while storage hangs


def _read(
    pipe: Connection, datasets: Mapping[str, Dataset], seed: int, twice: bool, is_backward: bool
) -> None:
    """Send the facts of all datasets; this runs in a separate process."""
    ignore_signals_except_parents(0)
    torch.set_num_threads(1)
    deadline = time.monotonic() + SECONDS
    facts: dict[str, Facts] = {}
    for name, data in datasets.items():
        has_lanes = False  # so that the next line can be deleted with loading/streams.py
        has_lanes = is_stream(data)
        length = getattr(data, "lanes", 0) if has_lanes else len(data)
        samples: dict[str, dict[str, Fact]] = {}
        indices = {length * k // SAMPLES for k in range(SAMPLES)}
        for index in sorted(indices, reverse=is_backward):
            if time.monotonic() < deadline:
                samples[str(index)] = sample_facts(data, index, seed)
        reads_again = twice and "0" in samples and not has_lanes and time.monotonic() < deadline
        draws = reads_again and not is_same(samples["0"], sample_facts(data, 0, seed))
        facts[name] = Facts(length=length, samples=samples, draws=draws)
    pipe.send(facts)


def sample_facts(data: Any, index: int, seed: int) -> dict[str, Fact]:
    """Return the parts of a sample, or of a lane's first sample; an error is a part too."""
    try:
        tell_epoch(data, 0, seed)
        seed_rng(derive_seed("check", index))
        if is_stream(data):
            data = {index: next(iter(data.lane(index, 0, seed)))}  # a sample of a stream
        sample = data[index]
        return dict(islice(parts(sample), MAX_PARTS))
    except Exception as error:  # training will raise it too
        return {"?": type(error).__name__}


def parts(value: Any, name: str = "") -> Iterator[tuple[str, Fact]]:
    """Yield the name and the fact of each part of a sample."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, (list, tuple)) and all(type(item) in (int, float) for item in value):
        value = np.array(value)
    if isinstance(value, Mapping):
        yield name, f"{len(value)} keys"
        for key in sorted(value, key=str):
            yield from parts(value[key], f"{name}/{key}")
    elif isinstance(value, (list, tuple)):
        yield name, f"{len(value)} items"
        for number, item in enumerate(value[:MAX_ITEMS]):
            yield from parts(item, f"{name}/{number}")
    elif isinstance(value, PurePath):
        yield name, content_hash(value.name)
    elif isinstance(value, (str, bytes)):
        yield name, content_hash(last_part(value) if isinstance(value, str) else value)
    elif isinstance(value, (int, float)) or any(hasattr(value, name) for name in ARRAYS):
        yield from numbers(value, name)
    else:
        yield name + "?" * (value is not None), type(value).__qualname__


def last_part(text: str) -> str:
    """Return a text, or only the last part if it is a path: its folders may depend on the node."""
    # not every text with a slash: a label may have one
    is_path = re.match(r"/|~|\.\.?/|\w+://", text)
    return PurePath(text).name if is_path and "\n" not in text else text


def numbers(value: Any, name: str) -> Iterator[tuple[str, Fact]]:
    """Yield the facts of a number, or of an array from any library."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().to_dense()
        kind = str(value.dtype).removeprefix("torch.")
        array = (value.double() if value.is_floating_point() else value).numpy()
    else:
        array = np.asarray(value)
        kind = str(array.dtype)
    yield f"{name}:", f"{kind} {array.shape}"
    # resized images, which are bytes, round differently on another type of CPU
    is_image = array.dtype == np.uint8 and array.ndim > 1
    if not array.size or not (is_image or np.issubdtype(array.dtype, np.inexact)):
        content: str | bytes = np.ascontiguousarray(array).tobytes()
        if array.dtype.hasobject:  # these bytes are addresses
            content = re.sub(r" at 0x[0-9a-f]+", "", repr(array.tolist()))
        yield name, content_hash(content)
        return
    flat = np.abs(array).ravel() if np.iscomplexobj(array) else array.ravel()
    flat = np.nan_to_num(flat.astype(np.float64), nan=1e9, posinf=1e9, neginf=-1e9)
    # unequal weights, since samples are often scaled to a mean of 0 and a norm of 1
    weighted = flat @ np.cos(np.arange(flat.size)) / math.sqrt(flat.size)
    yield name, [float(number) for number in (np.sqrt(np.mean(flat**2)), flat.mean(), weighted)]


def content_hash(content: str | bytes) -> str:
    """Hash a text or the bytes of an array."""
    content = content.encode(errors="replace") if isinstance(content, str) else content
    return hashlib.blake2b(content, digest_size=8).hexdigest()
