"""The journal of a search without a package: one line of JSON for each event, so that a killed search continues."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.trial import CONTINUE, PAUSE, PRUNE
from ..errors import SearchError
from .trial_run import Job, Outcome

FILE = "search.jsonl"
RUNNING, PAUSED, COMPLETE, PRUNED, FAILED = "running", "paused", "complete", "pruned", "failed"
ENDS = {CONTINUE: COMPLETE, PAUSE: PAUSED, PRUNE: PRUNED}


@dataclass(frozen=True)
class Task:
    """A trial to begin, or to continue up to an evaluation at or after a step."""

    number: int
    params: dict[str, Any] = field(default_factory=dict)
    until: int | None = None
    """The step at whose next evaluation the trial is paused; None to train to its end."""
    stage: int = 0
    """Which part of the trial this is: the rung of successive halving, the generation of a population."""
    source: int | None = None
    """The trial whose checkpoint it continues from; None for its own, if it has begun before."""


@dataclass
class Entry:
    """What is known of a trial."""

    number: int
    task: Task
    state: str = RUNNING
    params: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    objective: Any = None
    step: int = 0
    checkpoint: str | None = None
    begun_from: str | None = None
    """The checkpoint from which the current part began."""
    stages: dict[int, float] = field(default_factory=dict)
    """The objective at the end of each stage."""
    steps: dict[int, int] = field(default_factory=dict)
    """The step at the end of each stage."""
    name: str | None = None


class Journal:
    """The trials of a search, in memory and in the file."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / FILE
        self.entries: dict[int, Entry] = {}
        self.head: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._read()

    def _read(self) -> None:
        if not self.path.exists():
            return
        lines = self.path.read_bytes().split(b"\n")
        if lines[-1]:  # the last line of a search that was killed while it wrote
            with open(self.path, "r+b") as file:
                file.truncate(self.path.stat().st_size - len(lines[-1]))
        for number, line in enumerate(lines[:-1], 1):
            try:
                self._apply(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise SearchError(
                    f"{self.path}: line {number} is damaged ({error}); delete the file to search from the beginning"
                ) from None

    def _apply(self, row: dict[str, Any]) -> None:
        if "search" in row:
            self.head = row["search"]
        elif "begin" in row:
            task = Task(**row["begin"])
            entry = self.entries.setdefault(task.number, Entry(task.number, task))
            entry.task, entry.state, entry.params, entry.values = task, RUNNING, row["params"], row["values"]
            entry.begun_from, entry.name = row["from"], row["name"]
        else:
            entry = self.entries[row["end"]]
            entry.state, entry.objective, entry.step = row["state"], row["objective"], row["step"]
            entry.checkpoint = row["checkpoint"]
            if entry.objective is not None:
                entry.stages[entry.task.stage], entry.steps[entry.task.stage] = entry.objective, entry.step

    def _write(self, row: dict[str, Any]) -> None:
        with self._lock:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self._apply(row)

    def describe(self, head: dict[str, Any]) -> None:
        """Write what the search is, before its first trial."""
        self._write({"search": head})

    def begin(self, task: Task, job: Job, origin: str | None) -> None:
        """Record that a trial begins, or continues from a checkpoint."""
        self._write({"begin": vars(task), "params": job.params, "values": job.values, "name": job.name, "from": origin})

    def end(self, number: int, outcome: Outcome | None) -> None:
        """Record what a trial has reached; None if it failed."""
        if outcome is None:
            self._write({"end": number, "state": FAILED, "objective": None, "step": 0, "checkpoint": None})
            return
        self._write(
            {
                "end": number,
                "state": ENDS[outcome.decision],
                "objective": outcome.objective,
                "step": outcome.step,
                "checkpoint": outcome.newest if outcome.decision == PAUSE else outcome.checkpoint,
            }
        )
