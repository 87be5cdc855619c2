"""Find the files of the package that a training step uses, from its data to its checkpoint.

A run shows them: on rank 0 of two processes under DDP, a profile function in all threads notes the
files whose functions are called between the loss of one step and the loss two steps later, when the
checkpoint in between is on the disk. The recipe's own files do not count.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

FIRST, SAVED, LAST = 2, 4, 4  # the steps of both losses, and that of the checkpoint (steps done)


def entered(folder: Path) -> list[str]:
    """Train in this process; return the files whose functions were called, below the package."""
    import my_project
    from my_project.train import main
    from ragged import Ragged
    from runs import make_config

    package = os.path.dirname(my_project.__file__) + os.sep
    settings = {"checkpoints__every_steps": SAVED, "evaluation__sanity_check": False}
    config = make_config(folder, steps=6, **settings)
    is_on = threading.Event()
    files: set[str] = set()

    def note(frame: Any, event: str, _: object) -> None:
        if is_on.is_set() and event == "call":
            files.add(frame.f_code.co_filename)

    loss = Ragged.loss
    manifest = config.folder / f"checkpoints/step_{SAVED:08d}/manifest.json"

    def marked(self: Any, model: Any, batch: Any, step: int) -> Any:
        if step == FIRST:
            is_on.set()
        elif step == LAST and is_on.is_set():
            deadline = time.monotonic() + 60
            while not manifest.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            is_on.clear()
        return loss(self, model, batch, step)

    Ragged.loss = marked
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        assert main(config) == 0
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(f.removeprefix(package) for f in files if f.startswith(package))
