"""Small training runs with TensorFlow, in forked processes that write down how they ended."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from pathlib import Path
from typing import Any

from tests.contract.frameworks import FRAMEWORKS, rows

from .runs import CLOCKED, Pause, Trace

TF = FRAMEWORKS["tensorflow"]


def warm_up() -> None:
    """Import what a run needs; TensorFlow must not compute anything before the fork."""
    for name in ("tensorflow", "loopwright.tf", "loopwright.keras.trainer", "loopwright.callbacks.defaults"):
        importlib.import_module(name)


def digest(array: Any) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def train(folder: str, *, resume: Any = "auto", pause: float = 0.0, **options: Any) -> None:
    os.fsync = lambda descriptor: None  # a killed process loses nothing that the system already has
    given = {"max_steps": 10, "logging_steps": 1, "save_steps": 3, "eval_strategy": "steps", "eval_steps": 4}
    trainer = TF.trainer(folder, TF.net(dropout=0.3), rows(14), evaluation=rows(6), **{**given, **options})
    trainer.add_callback(Trace(f"{folder}.trace"))
    if pause:
        trainer.add_callback(Pause(pause))
    loss = trainer.train(resume_from_checkpoint=resume).training_loss
    log = [{k: v for k, v in each.items() if not k.endswith(CLOCKED)} for each in trainer.state.log_history]
    same = {
        "weights": [digest(each) for each in TF.weights(trainer)],
        "optimizer": [digest(each) for each in TF.memory(trainer)],
        "log": log,
        "train_loss": loss,
        "step": trainer.state.global_step,
    }
    Path(f"{folder}.result").write_text(json.dumps({"same": json.loads(json.dumps(same)), "seen": []}))
