"""What the watchdog counts as progress; here its intervals take no time, on any machine."""

import faulthandler
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from my_project.run_folder import Run
from my_project.watchdog import Watchdog
from runs import make_config


def is_ended(folder: Path, act: Callable[[Any], object]) -> bool:
    """Return whether the run is ended within 20 intervals, of which 4 are the limit."""
    limits = {"distributed__timeout_seconds": 1, "distributed__startup_timeout_seconds": 1}
    watchdog: Any = Watchdog(Run(make_config(folder, **limits), 0))
    intervals, aborted = iter(range(20)), []

    def wait(seconds: float) -> bool:
        act(watchdog)
        return bool(aborted) or next(intervals, None) is None

    watchdog._ended, watchdog._abort = SimpleNamespace(wait=wait), aborted.append
    try:
        watchdog._run()
    finally:
        faulthandler.cancel_dump_traceback_later()
    return bool(aborted)


def test_only_a_run_without_progress_is_ended(tmp_path):
    assert not is_ended(tmp_path, lambda watchdog: watchdog.run.note_progress(is_step=True))
    assert not is_ended(tmp_path, lambda watchdog: watchdog.run.note_progress())
    assert is_ended(tmp_path, lambda watchdog: None)


def test_a_recipes_function_of_the_name_of_pdbs_is_no_debugger(tmp_path):
    def interaction() -> bool:
        return is_ended(tmp_path, lambda watchdog: None)

    assert interaction()
