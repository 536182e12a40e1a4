"""How a case ends in a process of its own: it trains, is refused clearly, or fails with a note; in bounded time."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from loopwright.errors import LoopwrightError

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where cases write: in memory, since they wait for the disk otherwise."""

CLEAR = ("trained", "refused", "noted")
"""Endings a user can work with; the others are `raw`, `hangs` and `died`."""


def ending(case: Callable[[], Any], *, seconds: int = 20) -> tuple[str, str]:
    """Run a case in a fork, in an empty folder; returns how it ended, and its message."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        found = _run(case)
        with os.fdopen(writing, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if status == signal.SIGALRM:
        return "hangs", f"still running after {seconds} s"
    return tuple(json.loads(said)) if said else ("died", f"ended with status {status}")


def _run(case: Callable[[], Any]) -> tuple[str, str]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        os.chdir(folder)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            case()
            return "trained", ""
        except LoopwrightError as error:
            return "refused", str(error)
        except BaseException as error:  # everything that a case can raise is its result
            text = "".join(traceback.format_exception(error))
            notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("raised ")]
            return ("noted", notes[0]) if len(notes) == 1 and not isinstance(error, SystemExit) else ("raw", text)
        finally:
            sys.stdout.flush()
