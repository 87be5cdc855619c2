"""Collect what the checks of a start find, and warn or end the run."""

import logging
import os
import sys
from contextlib import suppress

from accelerate import Accelerator

from ..config import ConfigError
from ..process import DRY_RUN, LOGS
from ..ranks import gather_on_main, on_main_then_broadcast
from ..run_folder import Run

logger = logging.getLogger(__name__)


class Findings:
    """Warn of what the checks find, or end the run, as the config says."""

    def __init__(self, accelerator: Accelerator, run: Run) -> None:
        self.accelerator = accelerator
        self.run = run
        self.is_restart_in_place = False  # if True, the first step is not checked again

    def is_on(self, check: str) -> bool:
        """Return whether a check is switched on."""
        return getattr(self.run.config.checks, check) not in ("off", False)

    def add(self, check: str, problem: str, *, level: str = "") -> None:
        """Warn of a problem, or end the run. Called on all ranks alike.

        Args:
            check: a field of ChecksConfig.
            problem: one or two sentences.
            level: warn or end; by default, what the config says.

        Raises:
            ConfigError: the level is end.
        """
        if (level or getattr(self.run.config.checks, check)) == "end":
            raise ConfigError(
                f"{problem} (With --checks.{check} warn, training goes on; off skips the check.)"
            )
        if self.run.rank == 0:
            logger.warning(problem)
            self.run.notes.append(("check", {"check": check, "problem": problem}))

    def passed(self, check: str, text: str) -> None:
        """Log that a check found nothing: in the log file or, in a dry run, on screen."""
        if DRY_RUN in os.environ and self.run.rank == 0:
            logger.info("checks.%s: %s", check, text)
        elif LOGS in os.environ and self.run.rank == 0:
            with suppress(OSError):  # a full disk
                print(f"checks.{check}: {text}", file=sys.stderr)

    def gather(self, own: list[str]) -> dict[str, str]:
        """Return what all ranks have found, each text with its ranks (at most 8) and a host.

        Args:
            own: what this rank has found.
        """
        gathered = gather_on_main(self.accelerator, own)
        ranks: dict[str, list[int]] = {}
        for rank, texts in enumerate(on_main_then_broadcast(self.accelerator, lambda: gathered)):
            for text in texts:
                ranks.setdefault(text, []).append(rank)
        hosts = self.run.hosts
        return {text: f"on rank(s) {r[:8]} ({hosts[r[0]]})" for text, r in ranks.items()}
