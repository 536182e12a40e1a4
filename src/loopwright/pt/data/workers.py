"""Processes that load data: how they begin, and that none is left after an error."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ...core.shutdown.parent import die_with_parent
from ...core.shutdown.signals import outlive_signals

PATIENCE = 2.0
"""Seconds in which workers may finish their sample when they are ended; then they are killed."""


def begin_worker(worker: int) -> None:
    """Set up a new loader worker: ignore signals, end with the main process, and do not collect garbage of it.

    A fork has the main process's garbage but not its threads: a finalizer that waits for a thread (such as that of a
    process group) would wait for ever.
    """
    gc.freeze()
    outlive_signals(worker)
    die_with_parent()


@cache
def kill_workers_at_exit() -> None:
    """Kill the workers that are alive when this process exits: Python waits for them, and they outlive its SIGTERM."""
    atexit.register(kill_workers)


def kill_workers() -> None:
    """Kill the workers of all loaders."""
    for iterator in _iterators_started_since(set()):
        _stop_watching(iterator)
        _kill(_workers_of(iterator))


def stop_workers(loader: Any) -> None:
    """End the persistent workers of a loader; it can be used again."""
    if isinstance(loader, DataLoader) and loader.persistent_workers and loader._iterator is not None:
        iterator, loader._iterator = loader._iterator, None
        end_workers(iterator)


@contextmanager
def workers_end_with_errors() -> Iterator[None]:
    """A context that, if an error leaves it, ends the loader workers that were started in it.

    The error's traceback refers to the iterators of the loaders, which would keep the workers alive.
    """
    earlier = {child.pid for child in multiprocessing.active_children()}
    try:
        yield
    except BaseException:  # KeyboardInterrupt and SystemExit too
        for iterator in _iterators_started_since(earlier):
            end_workers(iterator)
        raise


def _iterators_started_since(earlier: set[int | None]) -> list[_MultiProcessingDataLoaderIter]:
    """Iterators with workers other than the earlier ones: of any loader, also inside the user's own loops."""
    if {child.pid for child in multiprocessing.active_children()} <= earlier:
        return []
    found = [each for each in gc.get_objects() if issubclass(type(each), _MultiProcessingDataLoaderIter)]
    return [each for each in found if not earlier.intersection(worker.pid for worker in _workers_of(each))]


def _workers_of(iterator: _MultiProcessingDataLoaderIter) -> list[Any]:
    return list(getattr(iterator, "_workers", []))  # without workers if it failed while it was made


def end_workers(iterator: _MultiProcessingDataLoaderIter) -> None:
    """End the workers of an iterator, and kill those that do not exit in PATIENCE seconds."""
    workers = _workers_of(iterator)
    _stop_watching(iterator)
    # In a thread: a worker that was killed while it held a lock of the iterator makes torch wait for ever.
    ending = threading.Thread(target=iterator._shutdown_workers, name="end-workers", daemon=True)
    ending.start()
    ending.join(PATIENCE)
    _kill(workers)
    ending.join(PATIENCE)


def _stop_watching(iterator: _MultiProcessingDataLoaderIter) -> None:
    """Without this, torch raises an error in this process for each worker that is killed."""
    if getattr(iterator, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def _kill(workers: list[Any]) -> None:
    for worker in workers:
        with suppress(ValueError, AssertionError):  # already closed, or waited for in another thread
            if worker.is_alive():
                worker.kill()
    for worker in workers:
        with suppress(ValueError, AssertionError):
            worker.join(PATIENCE)
