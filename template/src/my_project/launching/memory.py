"""Start again with smaller micro-batches, equal on all nodes, if larger ones do not fit in memory.

A process that fails reports which size to try (memory.py of the package). If the kernel has killed
it for lack of memory, the launcher reports instead: it sees the kill in the kernel's count for the
control group.
"""

import hashlib
import json
from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

from ..config import Config, to_dict
from ..failures import Failure, first_failure, record
from ..files import read_json
from ..loading.layout import batch_layout
from ..run_files import lines, newest_checkpoint
from ..run_folder import starts_over_now
from ..words import say

CONTROL_GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

if TYPE_CHECKING:
    from .attempts import Starts
    from .launch import Launch
    from .workers import Workers


# ---- the micro-batch size ------------------------------------------------------------------------
def lowered_micro_batch(config: Config, options: Namespace) -> int:
    """Return the size of the last start with the same settings and a lowered size; 0 if none.

    So the same command does not retry sizes that did not fit; a command with other settings does.
    """
    if starts_over_now(config):
        return 0
    digest = _digest(config, options)
    starts = [line for line in lines(config.folder) if line.settings == digest]
    return (starts[-1].micro_batch_size or 0) if starts else 0


def with_next_micro_batch(launch: "Launch", failures: list[Failure]) -> "Launch":
    """Return the launch with the size that the first failure on this node asks for, if any."""
    first = first_failure(failures)
    size = first.next_micro_batch_size if first else None
    return replace(launch, lowered_micro_batch_size=size) if size else launch


def with_lowered_micro_batch(
    launch: "Launch", here: "Launch", others: Any
) -> "tuple[Launch, Launch]":
    """Return `launch` and `here` with the smallest size that any node asks for.

    Args:
        launch: the settings as given; the result also stores the size, for later starts.
        here: the settings of the next start, which uses the size.
        others: nodes.OtherNodes; None on one node.
    """
    nodes = others.members if others else [launch]
    size = min(filter(None, (node.lowered_micro_batch_size for node in nodes)), default=0)
    launch = replace(launch, lowered_micro_batch_size=size)
    batches = here.config.batches
    if not size or size >= batch_layout(batches, here.world_size).micro_batch_size:
        return launch, replace(here, lowered_micro_batch_size=0)
    say(f"batches.micro_batch_size is {size}, since larger micro-batches did not fit in memory")
    config = replace(here.config, batches=replace(batches, micro_batch_size=size))
    arguments = (*here.arguments, f"--batches.micro_batch_size={size}")
    return launch, replace(here, config=config, arguments=arguments, lowered_micro_batch_size=size)


def lowered_micro_batch_fields(launch: "Launch", here: "Launch") -> dict[str, str | int]:
    """Return the fields that a start with a lowered size has in starts.jsonl; {} for others."""
    if size := here.lowered_micro_batch_size:
        return {"micro_batch_size": size, "settings": _digest(launch.config, launch.options)}
    return {}


def _digest(config: Config, options: Namespace) -> str:
    text = json.dumps([to_dict(config), options.config_file], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- killed by the kernel ------------------------------------------------------------------------
def count_memory_kills() -> int:
    """Return how many processes of this control group the kernel has killed for lack of memory.

    0 if that is unknown: on systems other than Linux, or in the root group.
    """
    total = 0
    files = {"": "memory.events", "memory": "memory/memory.oom_control"}  # of cgroup v2 and v1
    with suppress(OSError, ValueError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if name := files.get(controllers):
                path = CONTROL_GROUPS / name
                # in a container, the container's own group may be mounted as the root
                paths = path.parent / group.lstrip("/") / path.name, path
                words = next((file.read_text() for file in paths if file.is_file()), "").split()
                total += int(dict(zip(words[::2], words[1::2], strict=True)).get("oom_kill", 0))
    return total


def report_memory_kill(
    before: int,
    codes: dict[int, int],
    failures: list[Failure],
    workers: "Workers",
    logs: Path,
    starts: "Starts",
) -> None:
    """Write the error file of a process that the kernel has killed for lack of memory, if any.

    Args:
        before: count_memory_kills() when the start began.
        codes: exit codes by rank. If a smaller micro-batch may fit, the code of the killed process
            is replaced here by the code in the file micro_batch_rank_*.json: 1, or 2 if only the
            user may set the smaller size.
        failures: the failures of this start on this node; the new one is added.
        workers: the processes of this node.
        logs: the log folder.
        starts: the starts of this launch.
    """
    killed = [rank for rank, code in codes.items() if code == -SIGKILL]
    killed = [rank for rank in killed if rank not in workers.killed]  # not by the launcher
    if not killed or count_memory_kills() <= before:
        return
    rank, reason = killed[0], "killed by the kernel: no memory is left in its control group or host"
    failure = record(reason=reason, cause="out of host memory")
    # written by memory_explained, unless the process was killed before that
    note = read_json(logs / f"micro_batch_rank_{rank:05d}.json")
    is_noted = note.get("launch") == starts.id
    if is_noted and (newest_checkpoint(starts.folder) or 0) <= note["first_step"]:
        facts = {name: note[name] for name in ("next_micro_batch_size", "exit_code")}
        failure = replace(failure, reason=f"{reason}. {note['advice']}", **facts)
        # without a smaller size, the code stays -9, after which a restart is possible
        if facts != {"next_micro_batch_size": None, "exit_code": 1}:
            codes[rank] = failure.exit_code
    failures.append(starts.report(failure, rank=rank))
