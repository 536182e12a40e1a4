"""Telling the user, once, what was dropped, guessed, changed or skipped; in strict mode that is an error."""

from __future__ import annotations

import logging

from .errors import LoopwrightError

logger = logging.getLogger("loopwright")


class Notices:
    """What this run has told its user so far."""

    def __init__(self, *, strict: bool = False, quiet: bool = False) -> None:
        self.strict, self.quiet = strict, quiet
        self.told: list[str] = []

    def tell_once(self, text: str) -> None:
        """Say it the first time; raise instead when the run is strict."""
        if text in self.told:
            return
        self.told.append(text)
        if self.strict:
            raise LoopwrightError(f"{text} (an error because strict=True)")
        if not self.quiet:
            logger.warning(text)
