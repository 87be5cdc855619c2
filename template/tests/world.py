"""Real processes for tests, forked from one that has imported everything: 0.1 s, not 8."""

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil

TESTS = Path(__file__).parent
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["world_imports"])


def free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class World:
    """Processes that run function(*arguments), each with its rank."""

    def __init__(self, processes: int, function: Callable, *arguments: Any) -> None:
        port = free_port()
        self.pipes, self.workers = [], []
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
            work = (theirs, environment, function, arguments)
            worker = PROCESSES.Process(target=_work, args=work)
            worker.start()
            theirs.close()
            self.pipes.append(ours)
            self.workers.append(worker)

    def results(self, seconds: float = 240) -> list:
        """Wait; return by rank what was returned, or the exit code that is not 0.

        A process that raises makes this raise, with the rank and the traceback; one that hangs,
        with the stacks of all on stderr.
        """
        results: list = []
        try:
            for rank, pipe in enumerate(self.pipes):
                if not pipe.poll(seconds):
                    self._print_stacks()
                    raise TimeoutError(f"rank {rank} gave no result in {seconds} s")
                try:
                    outcome, value = pipe.recv()
                except EOFError:
                    outcome, value = "failed", "the process died"
                if outcome == "failed":
                    raise RuntimeError(f"rank {rank} of {len(self.pipes)}: {value}")
                results.append(value)
        finally:
            for worker in self.workers:
                worker.join(10)
            self.close()
        return results

    def _print_stacks(self) -> None:
        for worker in self.workers:
            process = psutil.Process(worker.pid)
            for each in [process, *process.children(recursive=True)]:
                print(f"process {each.pid} of {worker.pid}:", file=sys.stderr, flush=True)
                each.send_signal(signal.SIGUSR2)
                time.sleep(1)

    def close(self) -> None:
        """Kill what is left, as the kernel does."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.join()


def run_world(processes: int, function: Callable, *arguments: Any, seconds: float = 240) -> list:
    """Run function(*arguments) on each process of a world of its own; return its results."""
    return World(processes, function, *arguments).results(seconds)


def _work(pipe: Any, environment: dict[str, Any], function: Callable, arguments: tuple) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
    faulthandler.register(signal.SIGUSR2, sys.__stderr__, all_threads=True)
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
