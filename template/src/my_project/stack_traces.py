"""Report where threads are in the code: for hangs."""

import os
import re
import sys
import threading
import traceback
from types import FrameType

# A process whose innermost frame is in one of these files waits for other ranks.
WAITING_FILES = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/torch/autograd/graph.py",
    "/torch/cuda/streams.py",
)
LIBRARIES = ("<", os.path.dirname(os.__file__))
PACKAGE_FOLDER = os.path.dirname(__file__)
INSTALLED = re.compile(r".*/(?:site|dist)-packages/([^/]+)")


def current_line(frame: FrameType | None) -> tuple[str, bool]:
    """Return the innermost line of a thread outside of libraries, and whether it waits for ranks.

    C code has no frame; the innermost frame is that of the Python function that called it.
    """
    innermost = frame
    own = frame
    while own and library_of(own.f_code.co_filename):
        own = own.f_back
    if not (frame and innermost):
        return "an unknown place", False
    at = own or innermost
    name = innermost.f_code.co_qualname
    waits = name == "StepSums.wait" or any(
        part in innermost.f_code.co_filename for part in WAITING_FILES
    )
    return f"{at.f_code.co_name} ({at.f_code.co_filename}, line {at.f_lineno})", waits


def library_of(file: str) -> str | None:
    """Return the name of the installed package that a file belongs to; None for a user's own."""
    if file.startswith(PACKAGE_FOLDER):
        return None
    if found := INSTALLED.search(file):
        return found[1]
    return "python" if file.startswith(LIBRARIES) else None


def is_in_debugger() -> bool:
    """Return whether the main thread waits for a command to pdb, or to a debugger made from it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame:
        if frame.f_code.co_name == "interaction" and frame.f_globals.get("__name__") == "pdb":
            return True
        frame = frame.f_back
    return False


def stacks() -> str:
    """Return the Python stack of every thread as text, the main thread first."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    own = threading.get_ident()
    parts = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        if ident != own:
            stack = "".join(traceback.format_stack(frames[ident]))
            parts.append(f"thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(parts)
