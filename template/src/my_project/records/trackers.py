"""Trackers, by accelerate: none of them ends a run."""

import logging

logger = logging.getLogger(__name__)


def report_tracker(name: str, what: str, error: Exception) -> None:
    """Say in one line which tracker failed; no tracker's failure ends a run."""
    told = " ".join(f"{type(error).__name__}: {error}".split())
    logger.error("tracker %s cannot %s, the run goes on without it: %s", name, what, told)
