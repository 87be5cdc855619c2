"""The processes that load data: how many, what ends them, what they can send."""

import io
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import get_worker_info

from ..config import ConfigError


def start_worker(also: Callable | None, worker: int) -> None:
    """Prepare a loader worker, then call the worker_init_fn of the user, if there is one."""
    ignore_signals_except_parents()
    if also:
        also(worker)


def cpus_per_process() -> float:
    """Count the CPUs that this process may use, by affinity and by the container's quota."""
    cpus: float = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file() and not (parts := quota.read_text().split())[0].startswith("max"):
        cpus = min(cpus, int(parts[0]) / int(parts[1]))
    return cpus / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def ignore_signals_except_parents() -> None:
    """Ignore signals in a loader worker: the training process handles them.

    Only a SIGTERM from the parent counts, by which it ends its workers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # macOS
        return
    parent = os.getppid()

    def wait_for_parent() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=wait_for_parent, name="signals", daemon=True).start()


class _TrialPickler(ForkingPickler):
    """Pickle as the queue of a loader worker does, but without the contents of tensors."""

    def reducer_override(self, value: Any) -> Any:
        """Pickle a number in place of a tensor that can be sent."""
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.requires_grad and not value.is_leaf:
            raise TypeError("a tensor that is part of a graph; detach() it")
        return int, (0,)


def check_sendable(batch: Any) -> None:
    """Raise a ConfigError in a loader worker for a batch that its queue would drop silently.

    The training process would wait for it until the watchdog ends the run.
    """
    if get_worker_info() is None:
        return
    try:
        _TrialPickler(io.BytesIO()).dump(batch)
    except Exception as error:  # what pickle raises has many types
        raise ConfigError(
            f"a loader worker cannot send what the dataset or collate returned: {error}; return"
            " tensors, numbers, strings, or lists and dictionaries of these, or set batches.workers"
            " to 0."
        ) from error
