"""KeyboardInterrupt as the orderly end of a script: nothing went wrong, so no traceback is printed."""

from __future__ import annotations

import builtins
import sys
from types import TracebackType
from typing import NoReturn

QUIET = "loopwright_is_quiet"
"""Attribute of a KeyboardInterrupt that ends a process without a traceback."""


def is_interactive() -> bool:
    """Whether commands are typed into this process, as in a notebook."""
    return hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")


def interrupt() -> NoReturn:
    """Raise KeyboardInterrupt; if nothing catches it, the process ends without a traceback."""
    error = KeyboardInterrupt()
    if not is_interactive():
        setattr(error, QUIET, True)
        _hide_tracebacks()
    raise error from None


def _hide_tracebacks() -> None:
    """Let Python print no traceback of a KeyboardInterrupt that ends a run in order; other errors are unchanged."""
    earlier = sys.excepthook
    if getattr(earlier, QUIET, False):
        return

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not getattr(error, QUIET, False):
            earlier(kind, error, trace)

    setattr(report, QUIET, True)
    sys.excepthook = report
