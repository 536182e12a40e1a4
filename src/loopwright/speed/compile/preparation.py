"""Preparing torch's compiler in a thread: importing it and starting its worker processes take seconds."""

from __future__ import annotations

import os
from contextlib import suppress
from threading import Lock, Thread, current_thread

_LOCK = Lock()
_STARTED: list[Thread] = []
"""The thread that prepares the compiler; it is started once in a process."""
LONGEST = 60.0
"""Seconds that a fork waits for it."""


def get_ready() -> None:
    """Start to import inductor and to start its worker processes; call it as soon as compiling is likely."""
    with _LOCK:
        if not _STARTED:
            # Not a daemon: a process that ends in the middle of an import could crash.
            thread = Thread(target=_prepare, name="loopwright-compiler")
            with suppress(RuntimeError):  # there can be no more threads: it is imported where it is used
                thread.start()
                _STARTED.append(thread)


def await_compiler() -> None:
    """Wait for the preparation, if it was started.

    Everything that imports parts of the compiler calls this first: two threads that import modules which import each
    other may see one of them half made.
    """
    for thread in _STARTED:
        thread.join()


def _before_fork() -> None:
    """A child process made in the middle of an import, such as a loader's, would wait for that import forever."""
    for thread in _STARTED:
        if thread is not current_thread():
            thread.join(LONGEST)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


def _prepare() -> None:
    with suppress(Exception):  # the compiler is imported where it is used, which raises the error
        # The package that the other threads import comes first, so that the second to import it waits.
        import torch._dynamo
        import torch._inductor.compile_fx  # noqa: F401
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()
