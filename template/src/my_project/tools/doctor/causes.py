"""The cause of a failure that a process has reported, and the remedy.

What is known, since a file says so, stands apart from what is only likely, and why.
"""

import math
import re
import shutil
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ...failures import CONSEQUENCES
from ..spikes import spikes
from .evidence import Evidence, place, ranks_in_words

FULL_DISK = re.compile(r"No space left on device|Disk quota exceeded|os error (28|122)\b")
GPU_MEMORY = re.compile(r"(CUDA|HIP) (error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED")
HOST_MEMORY = re.compile(r"^MemoryError\b|[Cc]an(no|')t allocate memory|std::bad_alloc")
ON_THE_GPU = re.compile(r"device-side assert|illegal memory access|CUDA error")
OWN_LOSS = re.compile(r"the loss on this rank is (?:nan|-?inf)")
IN_A_ROW = re.compile(r"in (\d+) steps in a row, up to step (\d+)")
LOST_STORE = re.compile(r"Dist(Store|Network|Backend)Error\b")  # of torch.distributed
CLOCKS_SECONDS = 5.0  # by which the clocks of hosts may differ
LITTLE_BYTES = 10e6  # of free space: less than a checkpoint of most models


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What happened first, and why."""

    kind: str  # as listed in doctor.py
    is_known: bool = True  # a file says so; otherwise it is likely
    rank: int | None = None  # on which it happened first; None: several, or not known
    host: str = ""  # where it is not that of the rank
    time: float | None = None  # when, or when another rank noticed it; seconds since 1970
    what: str = ""  # in one sentence
    at: str = ""  # the line of the project's code
    says: str = ""  # the file that says so
    known: tuple[str, ...] = ()
    likely: tuple[str, ...] = ()  # each with its reason
    look_at: tuple[str, ...] = ()  # what may tell more
    remedy: tuple[str, ...] = ()


def reported(evidence: Evidence) -> Cause | None:
    """Return the cause of the first failure that follows from no other; None without one."""
    roots = [one for one in evidence.failures if not _follows(one)]
    if not roots:
        return None
    with_own_loss = [one for one in roots if OWN_LOSS.search(one["reason"])]
    first = (with_own_loss or roots)[0]
    cause = judge(evidence, first)
    by_other_clocks = [
        one["rank"]
        for one in roots
        if one["host"] != first["host"]
        and one["reason"] != first["reason"]
        and abs((one["time"] or 0) - (first["time"] or 0)) < CLOCKS_SECONDS
    ]
    if by_other_clocks:
        others = ranks_in_words(by_other_clocks, evidence.hosts)
        note = f"{others} failed at almost the same time, by another clock: compare errors/"
        cause = replace(cause, look_at=(*cause.look_at, note))
    return cause


def judge(evidence: Evidence, failure: dict[str, Any]) -> Cause:
    """Return the cause that a failure reports."""
    rules = {
        "not finite": _not_finite,
        "full disk": lambda evidence, failure: full_disk(evidence, of(failure, "full disk")),
        "out of memory": _gpu_memory,
        "out of host memory": _host_memory,
        "loader worker": _loader_worker,
        "setting": _setting,
        "stopped": _stopped,
        "exception": _exception,
    }
    return rules[_kind(failure)](evidence, failure)


def _follows(failure: dict[str, Any]) -> bool:
    """Return whether a failure follows from another one, or is that of a watchdog."""
    watched = failure["cause"] in (*CONSEQUENCES, "stalled")
    return watched or bool(LOST_STORE.match(failure["reason"]))


def _kind(failure: dict[str, Any]) -> str:
    reason, cause = failure["reason"], failure["cause"]
    kinds = {
        "not finite": cause == "not finite",
        "full disk": FULL_DISK.search(reason),
        "out of memory": cause == "out of memory" or GPU_MEMORY.search(reason),
        "out of host memory": HOST_MEMORY.search(reason),
        "loader worker": cause == "loader worker",
        "setting": cause == "setting",
        "stopped": reason.startswith("KeyboardInterrupt: second signal"),
    }
    return next((kind for kind, is_so in kinds.items() if is_so), "exception")


def of(failure: dict[str, Any], kind: str, **more: Any) -> Cause:
    """Return a cause with what an error file says."""
    about = {"rank": failure["rank"], "time": failure["time"], "says": str(failure["file"])}
    return Cause(kind=kind, **about | {"what": failure["reason"], "at": place(failure)} | more)


def _setting(evidence: Evidence, failure: dict[str, Any]) -> Cause:
    known = ("a setting, or what it names, is wrong",)
    return of(failure, "setting", known=known, remedy=("as the sentence says",), at="")


def _stopped(evidence: Evidence, failure: dict[str, Any]) -> Cause:
    known = ("it was told to stop again, before it had saved",)
    remedy = ("one signal is enough: a run saves after its step",)
    return of(failure, "stopped", known=known, remedy=remedy)


def _exception(evidence: Evidence, failure: dict[str, Any]) -> Cause:
    remedy = "correct that line" if place(failure) else "correct it: that file has the traceback"
    cause = of(failure, "exception", known=("this exception ended the process",), remedy=(remedy,))
    if ON_THE_GPU.search(failure["reason"]):
        likely = (
            "an earlier line is at fault, since the GPU reports errors later; often an index that"
            " is out of range, such as a label"
        )
        remedy = "CUDA_LAUNCH_BLOCKING=1, in one process, shows the line that is at fault"
        cause = replace(cause, likely=(likely,), remedy=(remedy,))
    killed = [rank for rank, one in evidence.exits.items() if one.code == -9]
    if killed := [rank for rank in killed if not evidence.exits[rank].by_launcher]:
        other = f"{ranks_in_words(killed, evidence.hosts)} was ended by SIGKILL"
        cause = replace(cause, look_at=(f"{other}: the files do not say which came first",))
    return cause


def _loader_worker(evidence: Evidence, failure: dict[str, Any]) -> Cause:
    workers = evidence.setting("batches.workers", "one less than the CPUs")
    likely = (
        "the kernel killed it for lack of host memory, or it crashed in C code, since a worker"
        " passes an exception on"
    )
    if "Bus error" in failure["reason"]:
        likely = "/dev/shm is full, since a worker then ends with a bus error"
    return of(
        failure,
        "loader worker",
        at="",  # where the process noticed it
        known=("a loader worker ended without an exception",),
        likely=(likely,),
        look_at=(kernel_log(evidence, failure["rank"]),),
        remedy=(
            f"fewer batches.workers (now {workers}) or a smaller batches.loader.prefetch_factor;"
            " more memory for the job; in a container a larger /dev/shm (--shm-size)",
        ),
    )


# ---- not finite ----------------------------------------------------------------------------------
def _not_finite(evidence: Evidence, failure: dict[str, Any]) -> Cause:
    """Judge a run that skipped too many steps; the records tell when that began."""
    known, likely, first_step = [], [], None
    if found := IN_A_ROW.search(failure["reason"]):
        count, last = int(found[1]), int(found[2])
        first_step = last + 1 - count
        steps = f"steps {first_step} to {last} were" if count > 1 else f"step {last} was"
        known.append(f"{steps} skipped")
    intervals = evidence.intervals()
    skipped = [_skipped(one, before) for before, one in pairwise([{}, *intervals])]
    begins = len(skipped)
    while begins and skipped[begins - 1]:
        begins -= 1
    if begins < len(skipped):
        at = intervals[begins]["step"]
        known.append(f"the first interval with skipped steps is that of step {at}")
        first_step = min(first_step or at, at)
    likely += _spike_before(evidence, first_step)
    if "num_items 0" in failure["reason"]:
        remedy = ("check the labels: all items of these steps are masked",)
        return of(failure, "not finite", known=(*known,), remedy=remedy)
    if OWN_LOSS.search(failure["reason"]):
        known.append("the loss of this rank was not finite: look at its data first")
    else:
        likely.append("it overflowed in the backward pass, since no rank had a loss that is NaN")
    now = [evidence.setting(f"optim.{name}", "the default") for name in ("lr", "warmup_steps")]
    remedy = (
        f"check the data of these steps; a lower optim.lr (now {now[0]}), a longer"
        f" optim.warmup_steps (now {now[1]})",
        "--precision no shows whether the precision is the reason",
    )
    return of(failure, "not finite", known=(*known,), likely=(*likely,), remedy=remedy)


def _skipped(interval: dict[str, Any], before: dict[str, Any]) -> bool:
    """Return whether an interval has skipped steps; old records have only their sum."""
    if "skipped" in interval:
        return bool(interval["skipped"])
    return _int(interval.get("skipped_steps")) > _int(before.get("skipped_steps"))


def _spike_before(evidence: Evidence, step: int | None) -> list[str]:
    """Return a sentence about the last spike shortly before a step; [] without one."""
    intervals = evidence.intervals()
    last = evidence.step if step is None else step
    every = _int(evidence.setting("telemetry.every_steps"))
    found = []
    for name in ("loss", "gradient_norm"):
        values = [one.get(name) for one in intervals]
        numbers = [v if isinstance(v, (int, float)) else math.nan for v in values]
        for index, median in spikes(numbers):
            found.append((intervals[index]["step"], name, numbers[index], median))
    found = [one for one in found if one[0] in range(last - max(100, 10 * every), last + 1)]
    return [
        f"training was unstable before, since {name} was {_number(value)} at step {at}, against a"
        f" median of {_number(median)}"
        for at, name, value, median in sorted(found)[-1:]
    ]


# ---- memory and disk -----------------------------------------------------------------------------
def _gpu_memory(evidence: Evidence, failure: dict[str, Any]) -> Cause:
    known = ("the GPU had no memory left for this process",)
    cause = of(failure, "out of memory", known=known, remedy=_smaller_micro_batch(evidence))
    return with_memory(evidence, cause, of_gpu=True)


def _host_memory(evidence: Evidence, failure: dict[str, Any]) -> Cause:
    known = ("the host had no memory left for this process",)
    cause = of(failure, "out of host memory", known=known, remedy=(less_host_memory(evidence),))
    return with_memory(evidence, cause, of_gpu=False)


def with_memory(evidence: Evidence, cause: Cause, *, of_gpu: bool) -> Cause:
    """Add how the peak of the memory of a process went, by the records of this start."""
    found = [one for one in evidence.of_this_start if _int(one.get("peak_memory_bytes"))]
    is_of_gpu = any("gpu_utilization" in one or "allocator_retries" in one for one in found)
    if not found or is_of_gpu != of_gpu:
        return cause
    peaks = [one["peak_memory_bytes"] for one in found]
    rises = sum(now > before for before, now in pairwise(peaks))
    first, last = (f"{one['peak_memory_bytes'] / 1e9:.3g} GB" for one in (found[0], found[-1]))
    if len(peaks) >= 4 and peaks[-1] > 1.1 * peaks[0] and rises > len(peaks) / 2:
        likely = (
            f"something is kept from step to step, since the peak memory of a process rose in"
            f" {rises} of {len(peaks) - 1} intervals, from {first} to {last}: such as losses that"
            " are collected without detach()"
        )
        return replace(cause, likely=(likely, *cause.likely))
    at = f"the peak memory of a process was {last} up to step {found[-1]['step']}"
    return replace(cause, known=(*cause.known, at))


def _smaller_micro_batch(evidence: Evidence) -> tuple[str, ...]:
    part = _int(evidence.setting("batches.global_batch_size")) // evidence.world_size
    now = _int(evidence.setting("batches.micro_batch_size")) or part
    fitting = [size for size in range(1, min(now, 10_000) // 2 + 1) if part % size == 0]
    remedy = "then --precision bf16, --distributed.activation_checkpointing true, FSDP2"
    if not fitting:
        return (f"the micro-batch has {now or '?'} samples already; {remedy}",)
    size = f"--batches.micro_batch_size {fitting[-1]} (now {now})"
    return (f"{size}: accumulation rises to match, so the curve stays; {remedy}",)


def less_host_memory(evidence: Evidence) -> str:
    """Return the settings that need less memory of the host."""
    workers = evidence.setting("batches.workers", "one less than the CPUs")
    settings = f"fewer batches.workers (now {workers}), checkpoints.background false"
    return f"{settings}; or more memory for the job"


def free_bytes(evidence: Evidence) -> int:
    """Return the free space of the run folder's file system, now."""
    return shutil.disk_usage(evidence.folder).free


def full_disk(evidence: Evidence, cause: Cause) -> Cause:
    """Add what is known of the disk, and what frees it."""
    free = f"{free_bytes(evidence) / 1e9:.3g} GB are free now where the run folder is"
    return replace(cause, known=(*cause.known, free), remedy=(more_room(evidence),))


def more_room(evidence: Evidence) -> str:
    """Return what frees space on a disk."""
    keep = evidence.setting("checkpoints.keep", 2)
    settings = f"checkpoints.keep (now {keep}), checkpoints.keep_every_steps"
    return f"free space, or keep fewer checkpoints: {settings}"


def kernel_log(evidence: Evidence, rank: int) -> str:
    """Return the command that shows whether the kernel has killed a process of a rank's host."""
    host = evidence.hosts.get(rank, "its host")
    return f"dmesg -T | grep -iE 'killed process|out of memory', on {host}"


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "not finite"
