"""Tests run on the CPU, also where there are GPUs, unless they are asked for: pytest -m gpu."""

import os


def pytest_configure(config):
    if config.option.markexpr == "gpu":
        os.environ["TEST_ON_GPU"] = "1"
