"""The environment of every process that a test starts, through the launcher or by forking."""

import atexit
import gc
import os
import signal
from pathlib import Path

TESTS = Path(__file__).parent


def pytest_configure(config):
    """Use the CPU, also where there are GPUs, unless they are asked for: pytest -m gpu."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    os.environ["OMP_NUM_THREADS"] = "1"
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    # as at Ctrl-C: tests end the processes that they have started
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    gc.disable()  # until all is imported


def pytest_collection_finish():
    """Look no more at what imports made: each run here begins with a full collection."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # C++ modules report what is left at the end as leaked
    gc.unfreeze = lambda: None  # a run ends with it: the next would look at the imports again
    gc.enable()
