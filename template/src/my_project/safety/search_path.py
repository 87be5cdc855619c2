"""Keep Python from importing files beside untrusted weights.

`python -m` puts the current folder first on sys.path, which may be the folder of the weights. So
__main__.py calls this module before any other import, and it imports only modules
that Python has imported already. It cannot protect the imports of `python -m` itself (such as
contextlib.py or the package's name): `python -P -m` leaves the current folder out from the start.
"""

import os
import sys


def run_folder(folder: str) -> str:
    """Return the run folder that a folder of weights belongs to, or the folder itself."""
    folder = os.path.realpath(folder)
    parent = os.path.dirname(folder)
    if os.path.basename(parent) == "checkpoints":
        parent = os.path.dirname(parent)
    return parent if os.path.isfile(os.path.join(parent, "config.yaml")) else folder


def is_inside(path: str, folder: str) -> bool:
    """Return whether a path is the folder or in it, with links resolved."""
    return os.path.join(os.path.realpath(path), "").startswith(os.path.join(folder, ""))


def leave_out_weights(arguments: list[str]) -> None:
    """Remove the run folders that the command line names from sys.path."""
    for folder in [run_folder(argument) for argument in arguments if os.path.isdir(argument)]:
        sys.path[:] = [entry for entry in sys.path if not is_inside(entry or ".", folder)]
