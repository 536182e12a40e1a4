"""Runs that get a signal at a line: the n-th time a line of the library is executed in the main thread."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import loopwright
from loopwright import TrainerCallback

from . import runs
from .runs import Traced

LIBRARY = str(Path(loopwright.__file__).parent) + os.sep
STEPS = 5
Line = tuple[str, int]
"""A file below the library, and a line of it."""


class Lines:
    """Calls `reach` with every line of the library that the main thread executes while this is entered."""

    def __init__(self, reach: Callable[[Line], None], only: str | None = None) -> None:
        self._reach = reach
        self._files = LIBRARY if only is None else LIBRARY + only

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._files) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._reach((frame.f_code.co_filename[len(LIBRARY) :], frame.f_lineno))
        return self._line


class EvaluatesToo(TrainerCallback):
    """Evaluates after some updates, evaluations and epochs, under names of its own."""

    trainer: Traced

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % 2:
            self.trainer.evaluate(metric_key_prefix="eval_odd")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        if any(name.startswith(("eval_loss", "eval_first")) for name in metrics):
            self.trainer.evaluate(runs.Rows(3), metric_key_prefix="eval_more")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.evaluate(metric_key_prefix="eval_epoch")


def metrics(prediction: Any) -> dict[str, float]:
    return {"spread": float(prediction.predictions.std())}


VARIANTS: dict[str, dict[str, Any]] = {
    "saved now": {"async_save": False, "metric_for_best_model": "spread"},
    "saved in the background": {
        "accumulation": 3, "save_total_limit": 1, "named": True, "metric_for_best_model": "eval_second_spread",
    },
}  # fmt: skip


def made(folder: str, variant: str) -> Traced:
    """Five updates over two epochs with everything that a run may do beside them."""
    options = dict(VARIANTS[variant])
    named = options.pop("named", False)
    trainer = runs.make(
        folder, max_steps=STEPS, save_steps=2, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=3,
        load_best_model_at_end=True, **options,
    )  # fmt: skip
    if named:
        trainer.eval_dataset = {"first": runs.Rows(4), "second": runs.Rows(6)}
    trainer.compute_metrics = metrics
    callback = EvaluatesToo()
    callback.trainer = trainer
    trainer.add_callback(callback)
    return trainer


# ---- what a forked process can be asked to do -----------------------------------------------------------------------


def warm_up() -> None:
    runs.warm_up()


def train(folder: str, *, variant: str, resume: Any = "auto") -> None:
    runs.finish(made(folder, variant), resume)


class Seen:
    """When a run executed its lines: the number of times, and the first and last moment, in executed lines."""

    def __init__(self) -> None:
        self.now = 0
        self.lines: dict[Line, list[int]] = {}

    def __call__(self, line: Line) -> None:
        self.now += 1
        times, first, _ = self.lines.get(line, (0, self.now, self.now))
        self.lines[line] = [times + 1, first, self.now]


def listed(folder: str, *, variant: str) -> None:
    """A run that writes down when it executed each line."""
    seen = Seen()
    runs.finish(made(folder, variant), "auto", during=Lines(seen))
    Path(f"{folder}.lines").write_text(json.dumps([[*line, *moments] for line, moments in seen.lines.items()]))


def signalled(folder: str, *, variant: str, file: str, line: int, time: int, number: int) -> None:
    """A run that gets a signal the n-th time it executes a line, and writes down in which step."""
    left = time
    trainer = made(folder, variant)

    def strike(at: Line) -> None:
        nonlocal left
        if at == (file, line):
            left -= 1
            if left == 0:
                Path(f"{folder}.struck").write_text(str(trainer.state.global_step))
                os.kill(os.getpid(), number)

    runs.finish(trainer, "auto", during=Lines(strike, only=file))
