"""Real processes for tests, forked from one that has imported everything: in 0.1 s, not 8 s."""

import faulthandler
import fcntl
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import cycle, islice
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil

TESTS = Path(__file__).parent
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["world_imports"])


# These ports are below those that the kernel assigns to connections, which could take a port before
# it is used. Pytest processes whose IDs have the same remainder begin at different ports.
START = 10_000 + 500 * (os.getpid() % 40)
PORTS = islice(cycle(range(START, START + 500)), os.getpid() // 40 % 500, None)


def free_port() -> int:
    for port in PORTS:
        with closing(socket.socket()) as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError


class World:
    """Processes that each run function(*arguments) as one rank."""

    def __init__(self, processes: int, function: Callable, *arguments: Any) -> None:
        self.pipes, self.workers = [], []
        try:
            self._start(processes, function, arguments)
        except BaseException:  # a time limit or Ctrl-C
            self.close()
            raise

    def _start(self, processes: int, function: Callable, arguments: tuple) -> None:
        port = free_port()
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
            self.workers.append(worker)
            worker.start()
            theirs.close()
            self.pipes.append(ours)

    def results(self, seconds: float = 200) -> list:
        """Wait, and return the result of each rank: a value, or the code of SystemExit.

        Raises:
            RuntimeError: a process raised or died; the message has its rank and traceback.
            TimeoutError: a process hangs; the stacks of all are printed on stderr.
        """
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        deadline = time.monotonic() + seconds
        try:
            while waiting:
                ready = connection.wait([*waiting], max(0.0, deadline - time.monotonic()))
                if not ready and not failures:
                    self._print_stacks()
                    raise TimeoutError(f"ranks {[*waiting.values()]} gave no result in {seconds} s")
                if not ready:  # the other processes wait for the one that failed
                    break
                for pipe in ready:
                    rank = waiting.pop(pipe)
                    try:
                        outcome, value = pipe.recv()
                    except EOFError:
                        outcome, value = "failed", "the process died"
                    results[rank] = value
                    if outcome == "failed":
                        failures[rank] = value
                        deadline = min(deadline, time.monotonic() + 30)
            if failures:
                rank = min(failures)
                raise RuntimeError(f"rank {rank} of {len(self.pipes)}: {failures[rank]}")
        finally:
            for worker in self.workers:
                worker.join(10)
            self.close()
        return [results[rank] for rank in range(len(self.pipes))]

    def _print_stacks(self) -> None:
        for worker in self.workers:
            process = psutil.Process(worker.pid)
            for each in [process, *process.children(recursive=True)]:
                print(f"process {each.pid} of {worker.pid}:", file=sys.stderr, flush=True)
                each.send_signal(signal.SIGUSR2)
                time.sleep(1)

    def close(self) -> None:
        """Kill the remaining processes with SIGKILL."""
        started = [worker for worker in self.workers if worker.pid]
        for worker in started:
            worker.kill()
        for worker in started:
            worker.join()


def run_world(processes: int, function: Callable, *arguments: Any, seconds: float = 200) -> list:
    """Run function(*arguments) on each process of a new world; return the results by rank."""
    return World(processes, function, *arguments).results(seconds)


def _work(pipe: Any, environment: dict[str, Any], function: Callable, arguments: tuple) -> None:
    # end with the tests, even if they are killed: SIGIO arrives when their end of the pipe closes
    tests: Any = multiprocessing.parent_process()
    fcntl.fcntl(tests.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(tests.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    if connection.wait([tests.sentinel], 0):
        return  # the tests ended before
    os.environ.update({name: str(value) for name, value in environment.items()})
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # even if the tests run under nohup
    faulthandler.register(signal.SIGUSR2, sys.__stderr__, all_threads=True)
    multiprocessing.set_start_method("fork", force=True)  # for loader workers, as in a real run
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
