"""Ending with the parent: no rank and no loader worker continues after the process that started it has died.

A thread compares the id of the parent, which changes when the parent dies, also by kill -9.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable

TIME_TO_SAVE = 30.0
"""Seconds for a rank to save and exit after its launcher has died; then it is killed."""
TICK = 1.0

_is_watched = False


def stop_with_launcher() -> None:
    """In a rank: if the launcher dies, save and exit as after SIGTERM; after TIME_TO_SAVE, kill its process group."""
    global _is_watched
    if "TORCHELASTIC_RUN_ID" in os.environ and not _is_watched:
        _is_watched = True
        _when_parent_dies(_save_and_stop)


def stop_with_parent() -> None:
    """In the process of a trial: if the search dies, save and exit as after SIGTERM; after TIME_TO_SAVE, be killed."""
    global _is_watched
    _is_watched = True
    _when_parent_dies(_save_and_stop)


def die_with_parent() -> None:
    """In a loader worker: exit at once if the process that reads its batches has died."""
    _when_parent_dies(lambda: os.kill(os.getpid(), signal.SIGKILL))


def _save_and_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TIME_TO_SAVE)
    if os.getpgrp() == os.getpid():  # torchrun makes each rank the leader of a group
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _when_parent_dies(act: Callable[[], None]) -> None:
    creator = multiprocessing.parent_process()
    # With the start method "forkserver" the parent is the server, not the process that reads the batches.
    reader = creator.pid if creator is not None else None
    threading.Thread(target=_watch, args=(os.getppid(), reader, act), name="parent-watch", daemon=True).start()


def _watch(parent: int, reader: int | None, act: Callable[[], None]) -> None:
    while os.getppid() == parent and (reader is None or _exists(reader)):
        time.sleep(TICK)
    act()


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
