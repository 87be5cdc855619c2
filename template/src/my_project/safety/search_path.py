"""Keep Python from importing files of an untrusted folder.

`python -m` puts the current folder first on sys.path; it may be an untrusted run folder. So
__main__.py calls this module before any other import, and this module imports only modules that
Python has already imported. It cannot protect the imports of `python -m` itself (such as
contextlib.py or the package's name): `python -P -m` leaves the current folder out from the start.
"""

import os
import sys

ON_OWN_CONFIG = ("train", "launch", "planner", "preflight")
ON_WEIGHTS = ("evaluate", "predict", "export")


def run_folder(folder: str) -> str:
    """Return the run folder that a folder of weights belongs to, or the folder itself."""
    folder = os.path.realpath(folder)
    parent = os.path.dirname(folder)
    if os.path.basename(parent) == "checkpoints":
        parent = os.path.dirname(parent)
    is_run = os.path.isfile(os.path.join(parent, "config.yaml"))
    # a project may have a config.yaml of its own
    return parent if is_run and not is_inside(__file__, parent) else folder


def is_inside(path: str, folder: str) -> bool:
    """Return whether a path is the folder or in it, with links resolved."""
    return os.path.join(os.path.realpath(path), "").startswith(os.path.join(folder, ""))


def leave_out_untrusted(command: str, arguments: list[str]) -> None:
    """Remove untrusted folders from sys.path, before a command of this package runs.

    A command on the user's own config imports its recipe, from the current folder too. A command on
    weights never imports from a folder of weights. It imports from the current folder only if that
    folder contains this package, so is the user's project, or if code is trusted by name (the
    folder is then last on the path). All other commands import only this package and installed
    code.
    """
    if command in ON_OWN_CONFIG:
        return
    current = os.path.realpath(".")
    if command not in ON_WEIGHTS or not is_inside(__file__, current):
        sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != current]
        if command in ON_WEIGHTS and "--trust" in " ".join(arguments):
            sys.path.append(current)
    for folder in [run_folder(argument) for argument in arguments if os.path.isdir(argument)]:
        sys.path[:] = [
            entry
            for entry in sys.path
            # an environment in the project stays, even for `evaluate .`
            if is_inside(entry, os.path.realpath(sys.prefix)) or not is_inside(entry or ".", folder)
        ]
