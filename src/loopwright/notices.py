"""Warnings about dropped, guessed, changed or skipped settings and data, each logged once; errors in strict mode.

What happens as documented (columns that a model does not take are removed) is logged at the level info instead.
"""

from __future__ import annotations

import logging

from .errors import LoopwrightError

logger = logging.getLogger("loopwright")


class Notices:
    """The warnings of a run; `told` lists them in order."""

    def __init__(self, *, strict: bool = False, quiet: bool = False) -> None:
        self.strict, self.quiet = strict, quiet
        self.told: list[str] = []

    def warn_once(self, text: str) -> None:
        """Log a warning the first time; raise instead when the run is strict."""
        if text in self.told:
            return
        self.told.append(text)
        if self.strict:
            raise LoopwrightError(f"{text} (an error because strict=True)")
        if not self.quiet:
            logger.warning(text)

    def inform_once(self, text: str) -> None:
        """Log what is done as documented, the first time and at the level info; never an error."""
        if text not in self.told:
            self.told.append(text)
            if not self.quiet:
                logger.info(text)
