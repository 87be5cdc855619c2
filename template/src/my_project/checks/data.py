"""Read some samples of each dataset, and say what they hold, to be compared.

Integers, shapes, types and text are kept as hashes, of a path that of its last part. Floating-point
values are kept as three numbers, since another type of CPU rounds differently. The samples are read
in a process of their own, as by a loader worker, while the model is built: the training process
opens no file whose position its loader workers would share, and changes no dataset.
"""

import dataclasses
import hashlib
import math
import multiprocessing
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import PurePath
from pickle import PicklingError
from typing import Any

import numpy as np
import torch

from ..config import Config
from ..loading.layout import is_stream
from ..loading.loader import ignore_signals_except_parents, tell_epoch
from ..loading.seeding import derive_seed, seed_rng

SAMPLES = 4  # of each dataset, evenly spaced
SECONDS = 5.0  # for all of them, and as long again after the model has been built
MOST_PARTS = 64  # of a sample
MOST_ITEMS = 8  # of a list
ARRAYS = ("__array__", "__array_interface__")  # what arrays, tensors and images have
TOLERANCE = 1e-3  # of floating-point values, relative to their root mean square


@dataclasses.dataclass(kw_only=True)
class Facts:
    """What is known of a dataset."""

    length: int  # samples or lanes
    samples: dict[str, dict[str, Any]]  # by index, the parts of each: a hash, or three numbers
    draws: bool  # whether a sample that is read again under the same seed is another one

    @property
    def unknown(self) -> list[str]:
        """Return the types that cannot be compared."""
        found = (part for sample in self.samples.values() for part in sample.items())
        return sorted({fact for name, fact in found if name.endswith("?")})

    def difference(self, known: "Facts") -> str:
        """Return how it differs from what was known before or elsewhere; "" if it does not."""
        if self.length != known.length:
            return f"has {self.length:,} samples, not {known.length:,}"
        numbers = others(self.samples, known.samples)
        return f"has other values in samples {', '.join(numbers)}" if numbers else ""


def others(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names that both have, for something else."""
    return [name for name in one if name in other and not is_same(one[name], other[name])]


def is_same(one: Any, other: Any) -> bool:
    """Return whether two samples have the same parts, or two parts are the same."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and not others(one, other)
    if isinstance(one, list) and isinstance(other, list):
        limit = TOLERANCE * max(one[0], other[0])  # the root mean square
        return np.allclose(one, other, rtol=0, atol=limit, equal_nan=True)
    return bool(one == other)


class Reading:
    """Reads the samples, from now on and beside this process."""

    def __init__(
        self, config: Config, datasets: Mapping[str, Any], *, is_backward: bool = False
    ) -> None:
        """Start the process.

        Args:
            config: of the run.
            datasets: map-style, or streams, by their names.
            is_backward: read the last sample first. A generator that a dataset has is forked in the
                same state each time, so that in the same order the samples would be the same.
        """
        how = config.batches.loader.get("multiprocessing_context")
        context: Any = multiprocessing.get_context(how)
        self.pipe, theirs = context.Pipe(duplex=False)
        twice = config.batches.seed_samples is not True
        arguments = theirs, datasets, config.seed, twice, is_backward
        self.process = context.Process(target=_read, args=arguments, daemon=True)
        with suppress(AttributeError, TypeError, PicklingError):  # not forked, and cannot be sent
            self.process.start()
        theirs.close()

    def facts(self) -> dict[str, Facts]:
        """Return what is known of each dataset; {} if it could not be found out in time."""
        try:
            return self.pipe.recv() if self.pipe.poll(SECONDS) else {}
        except (EOFError, OSError):  # the process has died, or was not started
            return {}
        finally:
            self.pipe.close()
            if self.process.pid:
                self.process.kill()
                self.process.join(SECONDS)  # storage that hangs holds it


def _read(
    pipe: Any, datasets: Mapping[str, Any], seed: int, twice: bool, is_backward: bool
) -> None:
    """Send the facts of each dataset, in a process of its own."""
    ignore_signals_except_parents(0)
    torch.set_num_threads(1)
    deadline = time.monotonic() + SECONDS
    found: dict[str, Facts] = {}
    for name, data in datasets.items():
        length = getattr(data, "lanes", None) or len(data)
        samples: dict[str, dict[str, Any]] = {}  # the parts of each: a hash, or three numbers
        indices = {length * k // SAMPLES for k in range(SAMPLES)}
        for index in sorted(indices, reverse=is_backward):
            if time.monotonic() < deadline:
                samples[str(index)] = sample_facts(data, index, seed)
        reads_again = twice and "0" in samples and time.monotonic() < deadline
        reads_again = reads_again and not is_stream(data)
        draws = reads_again and not is_same(samples["0"], sample_facts(data, 0, seed))
        found[name] = Facts(length=length, samples=samples, draws=bool(draws))
    pipe.send(found)


def sample_facts(data: Any, index: int, seed: int) -> dict[str, Any]:
    """Return the parts of a sample, or of the first one in a lane; an error is a part too."""
    try:
        tell_epoch(data, 0, seed)
        seed_rng(derive_seed("check", index))
        if is_stream(data):
            data = {index: next(iter(data.lane(index, 0, seed)))}  # of a stream
        sample = data[index]
        return dict(islice(parts(sample), MOST_PARTS))
    except Exception as error:  # training meets it, too
        return {"?": type(error).__name__}


def parts(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and the facts of all that a sample holds."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, (list, tuple)) and all(type(one) in (int, float) for one in value):
        value = np.array(value)
    if isinstance(value, Mapping):
        yield name, f"{len(value)} keys"
        for key in sorted(value, key=str):
            yield from parts(value[key], f"{name}/{key}")
    elif isinstance(value, (list, tuple)):
        yield name, f"{len(value)} items"
        for number, one in enumerate(value[:MOST_ITEMS]):
            yield from parts(one, f"{name}/{number}")
    elif isinstance(value, (str, bytes, PurePath)):
        yield name, hash_of(last_part(str(value)) if not isinstance(value, bytes) else value)
    elif isinstance(value, (int, float)) or any(hasattr(value, name) for name in ARRAYS):
        yield from numbers(value, name)
    else:
        yield name + "?" * (value is not None), type(value).__qualname__


def last_part(text: str) -> str:
    """Return the last part of a path, whose others may be of the node; any other text whole."""
    is_path = text.startswith(("/", "./", "../", "~")) or not any(map(str.isspace, text))
    return PurePath(text).name if is_path and "\n" not in text else text


def numbers(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the facts of an array, of whatever library."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().to_dense()
        kind = str(value.dtype).removeprefix("torch.")
        array = (value.double() if value.is_floating_point() else value).numpy()
    else:
        array = np.asarray(value)
        kind = str(array.dtype)
    yield f"{name}:", f"{kind} {array.shape}"
    # images as bytes are resized with other roundings on another type of CPU
    is_image = array.dtype == np.uint8 and array.ndim > 1
    if not array.size or not (is_image or np.issubdtype(array.dtype, np.inexact)):
        yield name, hash_of(np.ascontiguousarray(array).tobytes())
        return
    flat = np.abs(array).ravel() if np.iscomplexobj(array) else array.ravel()
    flat = np.nan_to_num(flat.astype(np.float64), nan=1e9, posinf=1e9, neginf=-1e9)
    # with weights that differ, since samples are often scaled to a mean of 0 and a norm of 1
    weighted = flat @ np.cos(np.arange(flat.size)) / math.sqrt(flat.size)
    yield name, [float(number) for number in (np.sqrt(np.mean(flat**2)), flat.mean(), weighted)]


def hash_of(content: str | bytes) -> str:
    """Hash a text or the bytes of an array."""
    content = content.encode(errors="replace") if isinstance(content, str) else content
    return hashlib.blake2b(content, digest_size=8).hexdigest()
