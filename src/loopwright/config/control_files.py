"""Requests to a run as files in its output folder: `loopwright ctl` writes them, the run reads and removes them."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..args.field import advised
from ..args.reading import read_float, read_int
from ..core.checkpoint.ownership.claim import decoded
from ..core.checkpoint.ownership.lock_file import LOCK
from ..core.checkpoint.replacing import replace_text
from ..errors import ArgumentsError
from ..notices import logger

FOLDER = "control"
"""The folder of requests; it exists while a run accepts them."""
HISTORY = "control.jsonl"
"""Every request that was carried out, with its step."""
ACTIONS = ("save", "evaluate", "stop", "set")
SETTINGS = {"learning_rate": read_float, "logging_steps": read_int, "eval_steps": read_int, "save_steps": read_int}
"""What `set` can change, and how a value is read."""


class Request(NamedTuple):
    """Something a run is to do after its current update."""

    action: str
    key: str = ""
    value: float = 0.0

    def __str__(self) -> str:
        return f"{self.action} {self.key}={self.value:g}" if self.action == "set" else self.action


def read_request(words: Sequence[str]) -> Request:
    """A request from words such as `save` or `set learning_rate=1e-4`."""
    action, *rest = words
    if action not in ACTIONS:
        more = f"there are {', '.join(ACTIONS)}"
        raise ArgumentsError(advised(f"{action!r} is not a request", action, ACTIONS, more))
    if action != "set":
        if rest:
            raise ArgumentsError(f"{action!r} takes nothing after it, but {' '.join(rest)!r} was given; remove it")
        return Request(action)
    if len(rest) != 1 or "=" not in rest[0]:
        raise ArgumentsError("'set' needs one key=value, such as: set learning_rate=1e-4")
    key, _, text = rest[0].partition("=")
    if key not in SETTINGS:
        problem = f"{key!r} cannot be changed while a run trains"
        raise ArgumentsError(advised(problem, key, SETTINGS, f"`set` takes {', '.join(SETTINGS)}"))
    try:
        value = SETTINGS[key](text)
    except ValueError as error:
        raise ArgumentsError(f"{key}: {error}") from None
    if value < 0 or (value == 0 and key != "learning_rate"):
        raise ArgumentsError(f"{key}={text} must be above 0")
    return Request("set", key, value)


# ---- the side of `loopwright ctl` ------------------------------------------------------------------------------------


def send(run: Path, request: Request) -> Path:
    """Write a request for a run; returns the file, which disappears when the run has done it."""
    check_training(run)
    name = f"{time.time_ns():020d}-{secrets.token_hex(3)}.json"
    path = run / FOLDER / name
    try:
        replace_text(path, json.dumps(request._asdict()) + "\n")
    except OSError as error:
        raise ArgumentsError(f"{run}: the request cannot be written ({error.strerror or error})") from None
    return path


def check_training(run: Path) -> None:
    """Raise unless a run trains in this folder and accepts requests."""
    if not run.is_dir():
        raise ArgumentsError(f"there is no folder {str(run)!r}; name the output folder of a run")
    try:
        claim = decoded((run / LOCK).read_bytes())
    except OSError:
        claim = None
    if claim is None or claim.has_ended():
        raise ArgumentsError(f"{run}: no run is training in this folder")
    if not (run / FOLDER).is_dir():
        raise ArgumentsError(f"{run}: its run accepts no requests; only runs of `loopwright train` do")


# ---- the side of the run ---------------------------------------------------------------------------------------------


class Inbox:
    """The requests of a run."""

    def __init__(self, run: Path) -> None:
        self.folder, self.history = run / FOLDER, run / HISTORY
        self._finished: set[str] = set()
        """Names of requests that were carried out: one whose file cannot be removed is not repeated."""

    def open(self, *, is_fresh: bool) -> None:
        """Accept requests from now on; what an earlier run left is removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            path.unlink(missing_ok=True)
        if is_fresh:
            self.history.unlink(missing_ok=True)

    def close(self) -> None:
        """Accept no more requests."""
        with suppress(OSError):  # another request may arrive meanwhile; the next run removes it
            for path in self.folder.iterdir():
                path.unlink(missing_ok=True)
            self.folder.rmdir()

    def waiting(self) -> list[tuple[str, Request]]:
        """The requests that wait, oldest first, with the names of their files."""
        try:
            found = os.listdir(self.folder)
        except OSError:
            return []
        names = sorted(name for name in found if name.endswith(".json") and name not in self._finished)
        return [(name, request) for name in names if (request := self._read(name)) is not None]

    def _read(self, name: str) -> Request | None:
        try:
            values = json.loads((self.folder / name).read_text(encoding="utf-8"))
            words = [values["action"]] + ([f"{values['key']}={values['value']}"] if values["action"] == "set" else [])
            return read_request(words)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning(f"the request {name} cannot be read ({error}) and is ignored")
            self.done(name)
            return None

    def done(self, name: str) -> None:
        """Remove a request that was carried out."""
        self._finished.add(name)
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            logger.warning(f"the request {name} cannot be removed ({error}); it is not repeated")

    def record(self, step: int, request: Request) -> None:
        """Write a request that was carried out into the history, durably."""
        row = {"step": step, "time": time.time(), **request._asdict()}
        try:
            with open(self.history, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            logger.warning(
                f"{self.history} cannot be written ({error}); a run resumed from before step {step} does not repeat "
                f"{str(request)!r}"
            )

    def recorded(self) -> list[tuple[int, Request]]:
        """The settings of the history with their steps; an incomplete last line is skipped."""
        found: list[tuple[int, Request]] = []
        try:
            lines = self.history.read_text(encoding="utf-8").splitlines()
        except OSError:
            return found
        for line in lines:
            try:
                row: dict[str, Any] = json.loads(line)
                if row["action"] == "set":
                    found.append((int(row["step"]), Request("set", str(row["key"]), float(row["value"]))))
            except (ValueError, KeyError, TypeError):
                logger.warning(f"{self.history}: a line is incomplete and is skipped")
        return found
