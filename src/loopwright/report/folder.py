"""A run as its output folder shows it: curves, time ledger, incidents, configuration, state."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..callbacks.metrics_file import FILE_NAME
from ..core.checkpoint.ownership.claim import decoded
from ..core.checkpoint.ownership.lock_file import LOCK
from ..core.checkpoint.ownership.run_id import RUNNING
from ..core.measure.ledger import PARTS
from ..core.measure.ledger_file import FILE as LEDGER, Recorded, read_ledger
from ..errors import ArgumentsError
from .data_file import read_facts
from .facts import command, resolved, saved_arguments
from .metrics import Metrics, MetricsReader

SPEED_PLAN = "speed_plan.json"
SILENT_AFTER = 120.0
"""Seconds without a sign of life after which a run on another machine is called killed."""
MOST_INCIDENTS = 100


@dataclass
class RunView:
    """What is known about a run at one moment."""

    name: str
    folder: Path
    metrics: Metrics
    recorded: Recorded | None
    facts: dict[str, Any] = field(default_factory=dict)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    speed_plan: dict[str, Any] = field(default_factory=dict)
    status: str = "unknown"
    now: float = 0.0

    @property
    def step(self) -> int:
        return max(self.metrics.step, 0 if self.recorded is None else self.recorded.step)

    @property
    def max_steps(self) -> int:
        return 0 if self.recorded is None else self.recorded.max_steps

    @property
    def seconds(self) -> dict[str, float]:
        """The time ledger: seconds by part."""
        return dict.fromkeys(PARTS, 0.0) if self.recorded is None else dict(self.recorded.account.seconds)

    @property
    def wall(self) -> float:
        return sum(self.seconds.values())

    def last(self, name: str) -> float | None:
        """The latest value of a curve that is finite."""
        curve = self.metrics.curves.get(name)
        return None if curve is None else curve.last

    def latest(self, name: str) -> float | str | None:
        """The latest value of a curve; one that is not finite as text."""
        return self.metrics.not_finite[name][1] if name in self.metrics.not_finite else self.last(name)

    @property
    def is_running(self) -> bool:
        return self.status == RUNNING

    def marks(self) -> list[dict[str, Any]]:
        """Restarts, rollbacks, incidents and numbers that are not finite, in the order of steps."""
        starts = [] if self.recorded is None else self.recorded.account.starts
        texts = {"resume": "resumed from the checkpoint of step {}", "rollback": "rolled back to step {}"}
        found = [
            {"step": each["step"], "kind": each["kind"], "text": texts[each["kind"]].format(each["step"])}
            for each in starts
            if each["kind"] in texts
        ]
        return sorted([*found, *self.incidents, *self.metrics.marks], key=lambda mark: mark["step"])


class RunFolder:
    """Reads an output folder again and again, the metrics piece by piece."""

    def __init__(self, folder: str | os.PathLike[str], *, facts: dict[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        self._reader = MetricsReader(self.folder)
        self._facts = facts

    def read(self) -> RunView:
        """The run now."""
        now, recorded = time.time(), read_ledger(self.folder)
        return RunView(
            name=self.folder.resolve().name,
            folder=self.folder,
            metrics=self._reader.read(),
            recorded=recorded,
            facts=self._all_facts(),
            incidents=incidents(self.folder),
            speed_plan=_document(self.folder / SPEED_PLAN),
            status=_status(self.folder, recorded, now),
            now=now,
        )

    def _all_facts(self) -> dict[str, Any]:
        facts = dict(read_facts(self.folder) if self._facts is None else self._facts)
        facts["config"] = resolved(self.folder) or facts.get("config") or saved_arguments(self.folder)
        facts["command"] = command(self.folder)
        return facts


def open_run(folder: str | os.PathLike[str]) -> RunFolder:
    """The folder of a run; raises if it does not hold one."""
    path = Path(folder)
    if path.name in (FILE_NAME, LEDGER, "report.html"):
        path = path.parent
    if not path.is_dir():
        raise ArgumentsError(f"{folder} is not a folder; pass the output_dir of a run")
    if not (path / FILE_NAME).exists() and not (path / LEDGER).exists():
        raise ArgumentsError(
            f"{folder} holds no run: it has neither {FILE_NAME} nor {LEDGER}; pass the output_dir of a run"
        )
    return RunFolder(path)


def incidents(folder: Path) -> list[dict[str, Any]]:
    """The latest incident folders of a run, in the order of steps."""
    places = {place.name.removeprefix("incident-step-"): place for place in folder.glob("incident-step-*")}
    steps = sorted(int(step) for step in places if step.isdecimal())[-MOST_INCIDENTS:]
    found = []
    for step in steps:
        place = folder / f"incident-step-{step}"
        module = _document(place / "incident.json").get("first_bad_module")
        where = f", first in {module}" if isinstance(module, str) else ""
        text = f"loss or gradients were not finite{where}; see {place.name}"
        found.append({"step": step, "kind": "incident", "text": text})
    return found


def _status(folder: Path, recorded: Recorded | None, now: float) -> str:
    """How the run ended; for one that is recorded as running, whether its process lives."""
    if recorded is None:
        return "unknown"
    if recorded.status != RUNNING:
        return recorded.status
    claim, seen = None, recorded.updated
    try:
        claim = decoded((folder / LOCK).read_bytes())
        seen = max(seen, (folder / LOCK).stat().st_mtime)  # its owner touches it every few seconds
    except OSError:
        pass
    ended = None if claim is None else claim.has_ended()
    return "killed" if ended or (ended is None and now - seen > SILENT_AFTER) else RUNNING


def _document(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
