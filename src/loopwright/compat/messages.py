"""loopwright's messages through the loggers of transformers, which scripts configure."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..notices import logger

CALLBACKS = ("events", "early_stopping")
"""The modules whose messages transformers logs as those of its module trainer_callback."""


class ToTransformers(logging.Handler):
    """Passes every record to a logger of transformers, whose level and handlers then decide."""

    def emit(self, record: logging.LogRecord) -> None:
        name = "trainer_callback" if record.module in CALLBACKS else "trainer"
        target = logging.getLogger(f"transformers.{name}")
        if record.levelno == logging.WARNING:
            target.warning(record.getMessage())
        else:
            target.log(record.levelno, record.getMessage())


def forward_messages() -> Callable[[], None]:
    """Forward the messages of loopwright's logger; returns a function that ends it."""
    handler, propagates, level = ToTransformers(), logger.propagate, logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)  # the level of transformers' loggers decides
    logger.propagate = False  # a handler of the root logger would print them twice

    def end() -> None:
        logger.removeHandler(handler)
        logger.propagate = propagates
        logger.setLevel(level)

    return end
