"""The record of the rows that a tracker has received, beside metrics.jsonl: it prevents that a step is sent twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.checkpoint.replacing import replace_text
from ..notices import logger
from .base import Row

Key = tuple[int, str]
"""Step and kind of a row."""
STORED = {"stored": True}
LENGTH_OF_ID = 8
"""Characters of a run's id in the name of its file."""


@dataclass
class Record:
    """What an earlier process has sent of a run."""

    state: dict[str, Any] = field(default_factory=dict)
    """The reporter's state, with the identifier of the tracker's run."""
    stored: list[Key] = field(default_factory=list)
    """Rows that the tracker had stored."""
    uncertain: list[Row] = field(default_factory=list)
    """Rows that were sent shortly before the process ended, with the names of their values only."""


class Journal:
    """metrics.sent.<tracker>.<run>.jsonl: a header, the keys of rows before they are sent, a line once they are stored.

    A row is written here before it is sent, so that a killed process leaves a record of it.
    """

    def __init__(self, folder: str | None, tracker: str, run_id: str) -> None:
        name = f"metrics.sent.{tracker}.{run_id[:LENGTH_OF_ID]}.jsonl"
        self._path = None if folder is None else Path(folder) / name
        self._run_id = run_id
        self._is_broken = False

    def read(self) -> Record | None:
        """What earlier processes sent of this run; None if there is no record of it in the folder."""
        if self._path is None or not self._path.exists():
            return None
        lines = [each for each in map(_parsed, self._path.read_bytes().split(b"\n")) if each is not None]
        if not lines or not isinstance(lines[0], dict) or lines[0].get("run") != self._run_id:
            return None
        found = Record(lines[0].get("state") or {})
        for line in lines[1:]:
            if line == STORED:
                found.stored += map(key_of, found.uncertain)
                found.uncertain = []
            elif isinstance(line, list) and len(line) == 3:
                found.uncertain.append(Row(line[0], line[1], dict.fromkeys(line[2])))
        return found

    def begin(self, state: dict[str, Any], stored: Iterable[Key]) -> None:
        """Start the file of this process with the rows that are stored."""
        lines = [{"run": self._run_id, "state": state}, *([step, kind, []] for step, kind in stored), STORED]
        text = "".join(json.dumps(line) + "\n" for line in lines)

        def replace(path: Path) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, text)

        self._write(replace)

    def sending(self, rows: Iterable[Row]) -> None:
        """Record rows that are about to be sent."""
        self._append("".join(json.dumps([row.step, row.kind, list(row.values)]) + "\n" for row in rows))

    def stored(self) -> None:
        """Record that the tracker has stored all rows."""
        self._append(json.dumps(STORED) + "\n")

    def _append(self, text: str) -> None:
        def append(path: Path) -> None:
            with open(path, "a", encoding="utf-8") as file:
                file.write(text)

        self._write(append)

    def _write(self, action: Any) -> None:
        if self._path is None or self._is_broken:
            return
        try:
            action(self._path)
        except OSError as error:
            self._is_broken = True
            if not self._path.parent.exists():
                return  # the folder was removed, and with it everything that could be resumed
            logger.warning(
                f"{self._path} cannot be written ({error}). If this run is killed and resumed, its tracker may "
                "receive some steps twice."
            )


def key_of(row: Row) -> Key:
    """What identifies a row in its run."""
    return row.step, row.kind


def remaining(rows: Iterable[Row], earlier: Counter[Key]) -> list[Row]:
    """The rows that were not sent earlier; each earlier one is used up by one row."""
    left = []
    for row in rows:
        if earlier[key_of(row)]:
            earlier[key_of(row)] -= 1
        else:
            left.append(row)
    return left


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
