"""Preparing torch's compiler while other work is done: its worker processes and its imports take seconds."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from threading import Thread, current_thread

MOST_SECONDS = 60.0
"""How long a fork waits at most for what is imported."""

_imports: Thread | None = None


def get_ready() -> None:
    """Start inductor's worker processes and import the rest of it, which takes seconds, while other work is done."""
    global _imports
    try:
        from torch._inductor.async_compile import maybe_warm_pool
    except ImportError:  # inductor starts them when it needs them
        return
    maybe_warm_pool()
    if _imports is None:
        _hash_triton()
        _imports = Thread(target=_import_inductor, name="loopwright-imports", daemon=True)
        _imports.start()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=_before_fork)


def _hash_triton() -> None:
    """Begin to hash Triton's library of 400 MB, on which the keys of its cache depend: it does so once per process.

    Hashing does not hold the interpreter. Triton is imported here, and not beside this thread.
    """
    try:
        from triton.runtime.cache import triton_key
    except Exception:  # not installed, or a version that has it elsewhere: it hashes when it needs that
        return

    def compute() -> None:
        with suppress(Exception):  # it is raised where a kernel is compiled
            triton_key()

    Thread(target=compute, name="loopwright-triton", daemon=True).start()


def _import_inductor() -> None:
    # The garbage collector would traverse everything imported so far, which takes a quarter of the time.
    is_ours = gc.get_freeze_count() == 0
    if is_ours:
        gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        import torch._inductor.compile_fx  # noqa: F401
    except Exception:  # it is raised where the compiler is used
        pass
    finally:
        if is_ours and gc.get_freeze_count() <= frozen:  # more if others have frozen objects in the meantime
            gc.unfreeze()


def _before_fork() -> None:
    """Wait for the imports: the locks of modules that are half imported would never be released in the new process."""
    if _imports is not None and _imports is not current_thread():
        _imports.join(MOST_SECONDS)


def await_imports() -> None:
    """Wait until nothing is imported beside this thread: modules of torch import each other in circles."""
    if _imports is not None:
        _imports.join()
