"""Searches, and waits at a moment of its second trial: `python signalled.py FOLDER BACKEND MOMENT [here]`.

At the moment it writes its process id into FOLDER/waiting, and goes on once FOLDER/go exists.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from loopwright.core.events import TrainerCallback
from tests.search.toy import Counting, make_model, space, toy

MOMENTS = ("values", "model", "ready", "update", "evaluation", "objective")
"""Values are chosen; the model is built; training begins; an update; an evaluation; its objective is computed."""
TRIALS = 3
SECOND = 1


def wait(folder: Path) -> None:
    if (folder / "go").exists():  # the second search does not wait
        return
    (folder / "waiting").write_text(str(os.getpid()), encoding="utf-8")
    while not (folder / "go").exists():
        time.sleep(0.02)


class Chooses:
    """The space: waits while it chooses the values of the second trial."""

    def __init__(self, folder: Path, waits: bool) -> None:
        self.folder, self.waits = folder, waits

    def __call__(self, trial: Any) -> dict[str, Any]:
        if self.waits and trial.number == SECOND:
            wait(self.folder)
        return space(trial)


class Builds:
    """`model_init`: waits while it builds the model of the second trial."""

    def __init__(self, folder: Path, waits: bool) -> None:
        self.folder, self.waits = folder, waits

    def __call__(self, trial: Any = None) -> Any:
        if self.waits and trial is not None and trial.number == SECOND:
            wait(self.folder)
        return make_model(trial)


class Judges:
    """`compute_objective`: waits after the second evaluation of the second trial."""

    def __init__(self, folder: Path, waits: bool) -> None:
        self.folder, self.waits, self.calls = folder, waits, 0

    def __call__(self, metrics: dict[str, float]) -> float:
        self.calls += 1
        if self.waits and self.calls == 5:
            wait(self.folder)
        return metrics["eval_loss"]


class Waits(TrainerCallback):
    """Waits at an event of the second trial."""

    def __init__(self, folder: Path, event: str) -> None:
        self.folder, self.event = folder, event

    def _at(self, event: str, args: Any) -> None:
        if event == self.event and Path(args.output_dir).name == f"run-{SECOND}":
            wait(self.folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._at("ready", args)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            self._at("update", args)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            self._at("evaluation", args)


def main(folder: Path, backend: str, moment: str, is_here: bool) -> None:
    trainer = toy(folder / "run", [Counting(folder), Waits(folder, moment)], Builds(folder, moment == "model"))
    best = trainer.search(
        Chooses(folder, moment == "values"), backend, TRIALS, compute_objective=Judges(folder, moment == "objective"),
        in_process=is_here,
    )  # fmt: skip
    found = [best.run_id, best.objective, best.hyperparameters, best.checkpoint]
    (folder / "best.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4], "here" in sys.argv)
