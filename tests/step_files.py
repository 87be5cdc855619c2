"""Find the files of the package that a training step uses, from its data to its checkpoint.

A run shows them: on rank 0 of two processes under DDP, a profile function notes the files whose
functions are called between the loss of one step and the loss two steps later, when the save in
between has ended. Only the main thread and the thread of the save count: other threads, such as the
watchdog's, act after a time, and so may or may not act between the two losses. The recipe's own
files do not count.
"""

import os
import sys
import threading
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
        counts = threading.current_thread().name in ("MainThread", "checkpoint")
        if is_on.is_set() and event == "call" and counts:
            files.add(frame.f_code.co_filename)

    loss = Ragged.loss

    def marked(self: Any, model: Any, batch: Any, step: int) -> Any:
        if step == FIRST:
            is_on.set()
        elif step == LAST and is_on.is_set():
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
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
