"""Measuring how long torch compiles: a listener at its compiler, which costs nothing while it does not compile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class CompileTime:
    """Calls `begin` when torch starts to compile, and `end` with its result when it has compiled."""

    def __init__(self, begin: Callable[[], str], end: Callable[[str], object]) -> None:
        self._begin, self._end = begin, end
        self._before: str | None = None

    def follow(self) -> None:
        """Listen from now on, if torch's compiler is in use: importing it takes seconds."""
        handler = _handler()
        if handler is not None and self._started not in handler.start_callbacks:
            handler.register_start_callback(self._started)
            handler.register_end_callback(self._ended)

    def leave(self) -> None:
        """Stop listening."""
        handler = _handler()
        if handler is not None and self._started in handler.start_callbacks:
            handler.remove_start_callback(self._started)
            handler.remove_end_callback(self._ended)
            self._ended(None)

    def _started(self, event: Any) -> None:
        if self._before is None:
            self._before = self._begin()

    def _ended(self, event: Any) -> None:
        if self._before is not None:
            before, self._before = self._before, None
            self._end(before)


def _handler() -> Any:
    module = sys.modules.get("torch._dynamo.callback")
    return getattr(module, "callback_handler", None)
