"""Keep Python from importing what lies beside a stranger's weights.

`python -m` puts the current folder first on sys.path, and that may be the folder of the weights. So
predict.py and evaluate.py call this before any other import, and this imports only what Python has
imported already. It comes too late for what `python -m` itself imports (such as contextlib.py or
the package's name): `python -P -m` leaves the current folder out from the start.
"""

import os
import sys


def run_folder(folder: str) -> str:
    """Return the run folder that weights belong to, or their own where they were given alone."""
    folder = os.path.realpath(folder)
    parent = os.path.dirname(folder)
    if os.path.basename(parent) == "checkpoints":
        parent = os.path.dirname(parent)
    return parent if os.path.isfile(os.path.join(parent, "config.yaml")) else folder


def is_inside(path: str, folder: str) -> bool:
    """Return whether a path is the folder or lies in it, wherever links lead."""
    return os.path.join(os.path.realpath(path), "").startswith(os.path.join(folder, ""))


def leave_out_weights(arguments: list[str]) -> None:
    """Take the run folders that the command line names off sys.path."""
    for folder in [run_folder(argument) for argument in arguments if os.path.isdir(argument)]:
        sys.path[:] = [entry for entry in sys.path if not is_inside(entry or ".", folder)]
