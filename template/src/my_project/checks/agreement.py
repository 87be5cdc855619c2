"""Compare data, code and the model between all ranks, and data and code with the last start.

If ranks differ, the run ends (with checks.ranks end, the default). A start may continue with
changed data or code; the change is logged and recorded in metrics.jsonl. The run folder's
agreement.json has what the next start compares.
"""

import json
import os
import re
import sys
import sysconfig
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from .. import files
from ..files import Json
from ..loading.layout import is_stream
from ..loading.loader import open_file_in
from ..ranks import on_main_then_broadcast
from ..recipe import DataInfo, Dataset, Datasets
from ..words import short_path
from .data import Facts, Reading, content_hash, differing_names
from .findings import Findings

FILE = "agreement.json"
MAX_FLOATS = 1000  # of an entry of data_info, that are compared with a tolerance
PACKAGE = __name__.partition(".")[0]
LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
PYTHON = tuple(f"{sysconfig.get_path(name)}/" for name in LIBRARIES)
INSTALLED = ("/site-packages/", "/dist-packages/")
PROCESS_DETAILS = re.compile(r" at 0x[0-9a-f]+|(?<=cuda:)\d+")  # in the repr of a model
REMEDY = (
    "give all nodes the same files, read them in the same order (sort what os.listdir returns), let"
    " nothing depend on the rank, and leave the division of the data to the loop."
)
OWN_GENERATOR = (
    "draws from a generator of its own, which the loop cannot seed: a sample changed when it was"
    " read again with the same seed. Draw from torch, random or numpy.random, or create the"
    " generator for each sample from torch.initial_seed()."
)


@dataclass(kw_only=True)
class Known:
    """What one rank knows about the data, code and model of a start."""

    data_info: dict[str, list[Any]] = field(default_factory=dict)  # data_info_facts of each entry
    data: dict[str, Facts] = field(default_factory=dict)  # by the name of the dataset
    code: dict[str, str] = field(default_factory=dict)  # hashes of sources, by module
    model: list[str] = field(default_factory=list)  # the lines of the model's repr

    def differing_data(self, known: "Known") -> dict[str, str]:
        """Return how datasets that are in both objects differ, by name; leave out equal ones."""
        both = [name for name in self.data if name in known.data]
        differences = {name: self.data[name].difference(known.data[name]) for name in both}
        return {name: text for name, text in differences.items() if text}

    def differing_code(self, known: "Known") -> list[str]:
        """Return the files of the modules that are in both objects and whose sources differ."""
        modules = (sys.modules.get(name, name) for name in differing_names(self.code, known.code))
        return [short_path(getattr(module, "__file__", None) or str(module)) for module in modules]

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Known":
        """Return what an earlier start has written; if it is damaged, an empty object."""
        try:
            data = {
                name: Facts(**facts | {"length": int(facts["length"])})
                for name, facts in saved["data"].items()
            }
            info = saved["data_info"].items()
            info = {k: [v[0], *map(float, v[1:])] for k, v in info if isinstance(v, list)}
            return cls(data_info=info, data=data, code=dict(saved["code"]))
        except (LookupError, TypeError, ValueError, AttributeError):
            return cls()


class Agreement:
    """Compare the ranks with each other, and this start with the last start."""

    def __init__(
        self,
        findings: Findings,
        data_info: DataInfo,
        train_set: Dataset,
        validation_sets: Datasets,
    ) -> None:
        """Begin to read samples, in parallel with building the model. Called by every rank."""
        self.findings = findings
        self.run = findings.run
        self.path = self.run.folder / FILE
        self.data_info = {name: data_info_facts(value) for name, value in data_info.items()}
        self.datasets = {"the training set": train_set} | {
            f"validation set {name}": data for name, data in validation_sets.items()
        }
        # "" if our launcher has not started this process
        self.launch = self.run.token.rpartition(".")[0]
        self.before = on_main_then_broadcast(
            findings.accelerator, lambda: files.read_json(self.path)
        )
        # after a restart on other hosts, the ranks are compared again: a node may have joined
        self.start = {"launch": self.launch, "hosts": self.run.hosts}
        before = {name: self.before.get(name) for name in self.start}
        self.is_restart_in_place = bool(self.launch) and before == self.start
        findings.is_restart_in_place = self.is_restart_in_place
        is_on = findings.is_on("data") or findings.is_on("ranks")
        self.reading = self._read() if is_on and not self.is_restart_in_place else None

    def _read(self, *, is_backward: bool = False) -> Reading:
        """Read samples; only one rank of each node reads lanes.

        A dataset with an open file is left out: another process would move the file's position.
        """
        sets = {name: data for name, data in self.datasets.items() if not open_file_in(data)}
        reads_streams = os.environ.get("LOCAL_RANK", "0") == "0"
        sets = {name: data for name, data in sets.items() if reads_streams or not is_stream(data)}
        return Reading(self.run.config, sets, is_backward=is_backward)

    def compare(self, model: nn.Module, *, is_resumed: bool) -> None:
        """Compare samples, code and model, except in a restart in place. Called by every rank.

        Args:
            model: the model, before it is wrapped.
            is_resumed: whether this start continues from a checkpoint.

        Raises:
            ConfigError: ranks or starts differ, and config.checks says to end the run.
        """
        if self.is_restart_in_place:
            return
        own = Known(
            data_info=self.data_info,
            data=self.reading.facts() if self.reading else {},
            code=sources(),
            model=PROCESS_DETAILS.sub("", repr(model)).splitlines(),
        )
        main = on_main_then_broadcast(self.findings.accelerator, lambda: own)
        saved = Known.from_json(self.before)
        earlier = saved if is_resumed else Known()
        self._leave_out_random(own, main, earlier)
        if self.findings.is_on("ranks"):
            self._compare_ranks(own, main)
        self._compare_starts(main, earlier)
        for name in self.datasets if self.reading else ():
            types = own.data[name].unknown if name in own.data else ["samples that were not read"]
            if types:
                self.findings.passed("data", f"{name}: {', '.join(types)} cannot be compared")
        if self.run.rank == 0:
            now = asdict(replace(own, data=saved.data | own.data))  # keep unread datasets
            del now["model"]
            with files.writing(self.run.folder):
                # without fsync, which takes longer than the checks; a damaged file is ignored
                with files.open_own(self.path, "wb") as file:
                    file.write(json.dumps(self.start | now).encode())

    def _leave_out_random(self, own: Known, *compared: Known) -> None:
        """Leave out, with a warning, datasets whose samples differ each time they are read."""
        draws = [name for name, facts in own.data.items() if facts.draws]
        differing = [name for known in compared for name in own.differing_data(known)]
        if self.findings.gather(differing) and self.reading:
            again = Known(data=self._read(is_backward=True).facts())
            draws += again.differing_data(own)
        for name in self.findings.gather(draws):
            for known in (own, *compared):
                known.data.pop(name, None)
            if self.findings.is_on("data"):
                self.findings.add("data", f"{name} {OWN_GENERATOR}", level="warn")

    def _compare_ranks(self, own: Known, main: Known) -> None:
        lines = [line.strip() for line in own.model if line not in main.model][:3]
        lines = lines or ["other lines"] * (own.model != main.model)
        differing = [f"{name} {text}" for name, text in own.differing_data(main).items()]
        differing += [f"other code in {file}" for file in own.differing_code(main)]
        differing += [f"a model with {line}" for line in lines]
        if places := self.findings.gather(differing):
            differences = "; ".join(f"{text} {place}" for text, place in places.items())
            self.findings.add("ranks", f"ranks differ from rank 0: {differences}: {REMEDY}")
        else:
            self.findings.passed("ranks", "data, code and model are the same on all ranks")

    def _compare_starts(self, now: Known, earlier: Known) -> None:
        infos = now.data_info, earlier.data_info
        keys = [k for k in infos[0] if k in infos[1] and not is_same_info(infos[0][k], infos[1][k])]
        data = [f"{name} {text}" for name, text in now.differing_data(earlier).items()]
        data += [f"data_info has another {key}" for key in keys]
        for check, differing in {"data": data, "code": now.differing_code(earlier)}.items():
            if not self.findings.is_on(check):
                continue
            if differing:
                problem = f"this start continues with other {check} than the last one"
                problem += f": {'; '.join(differing)}. To train a new run, set --run_name."
                self.findings.add(check, problem)
            elif earlier.code:
                self.findings.passed(check, "the same as in the last start")
            else:
                self.findings.passed(check, "noted for the next start")


def data_info_facts(value: Json) -> list[str | float]:
    """Return a hash of a value of data_info without its first MAX_FLOATS floats, then these floats.

    Another type of CPU rounds a mean or a standard deviation differently.
    """
    floats: list[str | float] = []

    def take(text: str) -> str:
        if len(floats) == MAX_FLOATS:
            return text
        floats.append(float(text))
        return "float"

    rest = json.loads(json.dumps(value), parse_float=take)
    return [content_hash(repr(rest)), *floats]


def is_same_info(facts: list[Any], other: list[Any]) -> bool:
    """Return whether two lists of data_info_facts are the same, apart from rounding."""
    is_same = facts[0] == other[0] and len(facts) == len(other)
    return is_same and np.allclose(facts[1:], other[1:], rtol=1e-5, atol=1e-9, equal_nan=True)


# ---- the code of the user ------------------------------------------------------------------------
def sources() -> dict[str, str]:
    """Return a hash of the source of each imported module that is not installed, by its name."""
    hashes: dict[str, str] = {}
    for key, module in [*sys.modules.items()]:
        if is_installed_package(key.partition(".")[0]):
            continue
        spec = getattr(module, "__spec__", None)  # `python -m` sets it; a script has none
        name, file = getattr(spec, "name", ""), getattr(spec, "origin", None) or ""
        is_own = name.startswith(f"{PACKAGE}.")
        is_tool = f"{name}.".startswith(f"{PACKAGE}.tools.")
        if file.endswith(".py") and not is_tool and (is_own or not is_installed(name, file)):
            with suppress(OSError):  # the file was removed since, or is in an archive
                hashes[name] = content_hash(Path(file).read_bytes())
    return hashes


@cache
def is_installed_package(name: str) -> bool:
    """Return whether a top-level package, and so each of its modules, is installed."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    # a folder without __init__.py has no origin, and a script has no spec
    file = getattr(spec, "origin", None) or f"{name}.py"
    is_own = name in (PACKAGE, "__main__")
    return not is_own and (not file.endswith(".py") or is_installed(name, file))


def is_installed(name: str, file: str) -> bool:
    """Return whether a module belongs to Python or to an installed package."""
    if file.startswith(PYTHON) or any(part in file for part in INSTALLED):
        return True
    levels = name.count(".") + file.endswith("/__init__.py")
    parents = Path(file).parents
    return levels < len(parents) and has_packages(parents[levels])


@cache
def has_packages(folder: Path) -> bool:
    """Return whether packages are installed into a folder, as by `pip install --target`."""
    return any(folder.glob("*.dist-info/RECORD"))
