"""metrics.jsonl as curves, read piece by piece while a run appends to it."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..callbacks.metrics_file import FILE_NAME, NON_FINITE, non_finite_name, parsed_row
from .series import Series

NOT_A_CURVE = ("_runtime", "_per_second", "_model_preparation_time", "_jit_compilation_time")
POSITION = ("step", "epoch", "time", "pace")
SPEEDS = ("tokens_per_second", "samples_per_second", "steps_per_second", "computed_tokens_per_second")
MOST_TEXTS, MOST_EVALUATIONS, MOST_MARKS, LONGEST_TEXT = 20, 200, 100, 4000


@dataclass
class Metrics:
    """The curves, evaluations and texts of the rows so far."""

    curves: dict[str, Series] = field(default_factory=dict)
    evaluations: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_EVALUATIONS))
    texts: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_TEXTS))
    marks: list[dict[str, Any]] = field(default_factory=list)
    """Places on the curves, over the whole run; of too many, those that are far from each other."""
    summary: dict[str, float] = field(default_factory=dict)
    """Numbers that were logged once, at the end."""
    not_finite: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Curves whose latest value is not finite: the step from which they are not, and the value."""
    nonfinite_steps: int = 0
    """All steps whose loss or gradients were not finite."""
    step: int = 0
    epoch: float | None = None
    rows: int = 0

    def add(self, row: dict[str, Any]) -> None:
        """Add one row."""
        self.rows += 1
        self.step = max(self.step, row["step"])
        epoch = row.get("epoch")
        if isinstance(epoch, (int, float)) and math.isfinite(epoch):
            self.epoch = float(epoch)
        values = {**(row["pace"] if isinstance(row.get("pace"), dict) else {}), **row}
        if "train_runtime" in values:
            self.summary = {name: value for name, value in values.items() if _is_number(value) and name != "step"}
            return
        for name, value in values.items():
            self._take(row["step"], name, value)
        if any(name.endswith("_runtime") for name in values):
            self.evaluations.append({name: _shown(each) for name, each in row.items() if name not in ("time", "pace")})

    def _take(self, step: int, name: str, value: Any) -> None:
        if name in POSITION:
            return
        value = NON_FINITE.get(value, value) if isinstance(value, str) else value
        if isinstance(value, str):
            self.texts.append({"step": step, "name": name, "text": value[:LONGEST_TEXT]})
        elif _is_number(value) and (name in SPEEDS or not name.endswith(NOT_A_CURVE)):
            self.curves.setdefault(name, Series()).add(step, float(value))
            if not math.isfinite(value):
                self._take_not_finite(step, name, value)
            elif name == "nonfinite_steps":
                self.nonfinite_steps += int(value)
                steps = f"{int(value):,} step{'s' if value > 1 else ''} up to step {step:,}"
                self._mark(step, f"{steps} had a loss or gradients that are not finite")
            else:
                self.not_finite.pop(name, None)

    def _take_not_finite(self, step: int, name: str, value: float) -> None:
        """Record since when a curve is not finite; only the first of such values has a mark."""
        if name not in self.not_finite:
            self._mark(step, f"{name} is {value}")
        self.not_finite[name] = (self.not_finite.get(name, (step, ""))[0], non_finite_name(value))

    def _mark(self, step: int, text: str) -> None:
        self.marks.append({"step": step, "kind": "not finite", "text": text})
        if len(self.marks) > MOST_MARKS:  # the others still show where in the run it happened
            steps = [mark["step"] for mark in self.marks]
            del self.marks[min(range(1, MOST_MARKS), key=lambda place: steps[place + 1] - steps[place - 1])]


class MetricsReader:
    """Follows a metrics.jsonl: each call of `read` adds the rows that have been appended since."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / FILE_NAME
        self.metrics = Metrics()
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    def read(self) -> Metrics:
        """The rows so far; all of them are read again if the file was replaced, as when a run resumes."""
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                if (found.st_dev, found.st_ino) != self._identity or found.st_size < self._offset:
                    self.metrics, self._offset = Metrics(), 0
                    self._identity = (found.st_dev, found.st_ino)
                file.seek(self._offset)
                self._take(file)
        except OSError:  # not written yet
            pass
        return self.metrics

    def _take(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            if not line.endswith(b"\n"):
                return  # incomplete at this moment
            self._offset += len(line)
            row = parsed_row(line)
            if row is not None:
                self.metrics.add(row)


def _shown(value: Any) -> Any:
    """A value for a table: JSON has no NaN and infinities."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
