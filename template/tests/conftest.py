"""The environment of every process that a test starts, through the launcher or by forking."""

import atexit
import gc
import os
import signal
from pathlib import Path

TESTS = Path(__file__).parent


def pytest_configure(config):
    """Use the CPU, even if there are GPUs, except with pytest -m gpu."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    os.environ["OMP_NUM_THREADS"] = "1"
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    # as with Ctrl-C, so that tests end the processes that they have started
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells' background jobs ignore it
    gc.disable()  # until all modules are imported


def pytest_collection_finish():
    """Exclude imported objects from garbage collections: each run begins with a full one."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # C++ modules report objects that are left at the end as leaked
    # each run ends with unfreeze, after which the next run would scan the imports again
    gc.unfreeze = lambda: None
    gc.enable()
