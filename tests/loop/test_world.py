"""The worlds of processes that tests start: no process outlives its test."""

import subprocess
import sys
import time

import psutil
import pytest
import world


def test_a_world_whose_start_is_interrupted_leaves_no_process(monkeypatch):
    kind = type(world.PROCESSES.Process())
    start, started = kind.start, []

    def start_one(worker):
        if started:
            raise KeyboardInterrupt
        started.append(worker)
        start(worker)

    monkeypatch.setattr(kind, "start", start_one)
    with pytest.raises(KeyboardInterrupt):
        world.World(2, time.sleep, 600)
    assert started[0].exitcode is not None


@pytest.mark.slow
def test_a_world_ends_with_tests_that_are_killed():
    code = """if __name__ == "__main__":
    import time, world
    workers = world.World(2, time.sleep, 600).workers
    print(*[worker.pid for worker in workers], flush=True)
    time.sleep(600)
"""
    tests = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert tests.stdout
    workers = [psutil.Process(int(pid)) for pid in tests.stdout.readline().split()]
    tests.kill()
    tests.wait()
    tests.stdout.close()
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=100)
    for worker in alive:
        worker.kill()
    assert not alive
