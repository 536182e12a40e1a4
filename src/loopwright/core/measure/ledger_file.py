"""time_ledger.json: the time ledger of a run in its output folder, written every few seconds."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...notices import logger
from ..checkpoint.json_files import read_json
from ..checkpoint.ownership.run_id import FINISHED, RUNNING
from ..checkpoint.replacing import replace_text
from ..checkpoint.schema import named
from .ledger import PARTS, Account, Ledger, Seconds

FILE = "time_ledger.json"
BEAT = 2.0
"""Seconds between two writings while the run trains."""


@dataclass
class Recorded:
    """The content of time_ledger.json."""

    account: Account
    updated: float = 0.0
    """When it was written, in seconds since 1970."""
    run: str | None = None
    launch: str | None = None
    status: str = RUNNING
    step: int = 0
    max_steps: int = 0


@dataclass
class LedgerFile:
    """Writes the ledger of one call of `train()`; without a folder it writes nothing."""

    ledger: Ledger
    folder: Path | None = None
    run: str | None = None
    launch: str | None = None
    due: float = math.inf
    """When the next writing is due, by `time.perf_counter`; the loop compares it with its own clock."""
    began: float = field(default_factory=time.time)
    _has_failed: bool = False

    def begin(self, recorded: Recorded | None, *, step: int, is_resumed: bool, waited: Callable[[], float]) -> None:
        """Continue the recorded ledger if it belongs to this run or, before its first checkpoint, to this launch."""
        mine = recorded is not None and (
            (is_resumed and recorded.run == self.run)
            or (self.launch is not None and recorded.launch == self.launch and recorded.status != FINISHED)
        )
        earlier, away = None, 0.0
        if recorded is not None and mine:
            # A run that has ended was not waiting to be restarted.
            earlier, away = recorded.account, 0.0 if recorded.status == FINISHED else self.began - recorded.updated
        self.ledger.begin(earlier, step=step, away=away, waited=waited)

    @property
    def age(self) -> float:
        """Seconds since the last writing."""
        return math.inf if self.due == math.inf else time.perf_counter() - (self.due - BEAT)

    def write(self, *, step: int, max_steps: int, status: str = RUNNING) -> None:
        """Write the ledger; a disk that cannot be written is reported once."""
        if self.folder is None:
            return
        self.due = time.perf_counter() + BEAT
        account = self.ledger.settle()
        values = {
            "run": self.run,
            "launch": self.launch,
            "status": status,
            "step": step,
            "max_steps": max_steps,
            "updated": time.time(),
            "seconds": _rounded(account.seconds),
            "starts": account.starts,
            "saved": {each: _rounded(seconds) for each, seconds in account.saved.items()},
        }
        try:
            replace_text(self.folder / FILE, json.dumps(values) + "\n")
        except OSError as error:
            if not self._has_failed:
                logger.warning(f"{self.folder / FILE} cannot be written ({error}); training continues without it")
            self._has_failed = True


def read_ledger(folder: str | os.PathLike[str]) -> Recorded | None:
    """The ledger in a folder; None if there is none, or if it is damaged."""
    try:
        values: dict[str, Any] = read_json(Path(folder) / FILE, named())
        return _recorded(values)
    except (CheckpointError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _recorded(values: dict[str, Any]) -> Recorded:
    saved = {int(step): _seconds(seconds) for step, seconds in values["saved"].items()}
    starts = [
        {"kind": str(each["kind"]), "step": int(each["step"]), "time": float(each["time"])} for each in values["starts"]
    ]
    return Recorded(
        account=Account(_seconds(values["seconds"]), saved, starts),
        updated=_number(values["updated"]),
        run=values["run"],
        launch=values["launch"],
        status=str(values["status"]),
        step=int(values["step"]),
        max_steps=int(values["max_steps"]),
    )


def _rounded(seconds: Seconds) -> Seconds:
    return {name: max(round(value, 4), 0.0) for name, value in seconds.items()}


def _seconds(values: dict[str, Any]) -> dict[str, float]:
    return {part: _number(values.get(part, 0.0)) for part in PARTS}


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{value!r} is not a time")
    return number
