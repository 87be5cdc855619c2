"""Keep Python from importing files of an untrusted folder.

`python -m` puts the current folder first on sys.path; it may be an untrusted run folder. So
__main__.py calls this module before any other import, and this module imports only modules that
Python has already imported. The imports of `python -m` itself come earlier, and may find a file
such as contextlib.py, or a folder with the package's name, in the current folder: `python -P -m`
leaves that folder out from the start.
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
    """Return whether a path is a folder or lies in it, once the path's links are resolved.

    The path of the folder must not contain links.
    """
    return os.path.join(os.path.realpath(path), "").startswith(os.path.join(folder, ""))


def leave_out_untrusted(command: str, arguments: list[str]) -> None:
    """Remove untrusted folders from sys.path, before a command of this package runs.

    A command on the user's own config imports the recipe, also from the current folder. All other
    commands remove the current folder, and the run folders that their arguments name; a virtual
    environment inside one of these folders stays. There are two exceptions, both for the commands
    on weights: the current folder stays if it contains this package, since it is then the user's
    project; with --trust, it becomes the last on the path.
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
