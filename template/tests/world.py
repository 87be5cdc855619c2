"""Real processes for tests, forked from one that has imported everything: 0.1 s, not 8."""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["world_imports"])


def free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_world(processes: int, function: Callable, *arguments: Any, seconds: float = 120) -> list:
    """Run function(*arguments) on each process of a world of its own; return the results by rank.

    A process that raises makes this raise, with the rank and the traceback; an exit code that is
    not 0 stands in the result's place.
    """
    port = free_port()
    pipes, workers = [], []
    for rank in range(processes):
        ours, theirs = PROCESSES.Pipe()
        environment = {
            "RANK": rank,
            "WORLD_SIZE": processes,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": processes,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        if processes == 1:
            environment = {}
        worker = PROCESSES.Process(target=_work, args=(theirs, environment, function, arguments))
        worker.start()
        theirs.close()
        pipes.append(ours)
        workers.append(worker)
    results: list = []
    try:
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(seconds):
                raise TimeoutError(f"rank {rank} of {processes} gave no result in {seconds} s")
            try:
                outcome, value = pipe.recv()
            except EOFError:
                outcome, value = "failed", "the process died"
            if outcome == "failed":
                raise RuntimeError(f"rank {rank} of {processes}: {value}")
            results.append(value)
    finally:
        for worker in workers:
            worker.join(10)
            if worker.is_alive():
                worker.kill()
    return results


def _work(pipe: Any, environment: dict[str, Any], function: Callable, arguments: tuple) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    multiprocessing.set_start_method("fork", force=True)  # loader workers: as in a real run
    try:
        with open(os.devnull, "w") as nowhere:
            sys.stdout = nowhere
            pipe.send(("returned", function(*arguments)))
    except SystemExit as leaving:
        pipe.send(("exited", leaving.code))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    finally:
        pipe.close()
        sys.stdout = sys.__stdout__
