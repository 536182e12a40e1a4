"""A signal while a callback evaluates: the callback is finished, the run exits as promised, and resumes exactly."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core.numpy_trainer import NumpyTrainer

from loopwright import TrainerCallback
from loopwright.args.base import BaseArguments
from tests.core.numpy_strategy import LinearModel

SAMPLES = [(np.array([float(i), 1.0]), np.array([float(i) * 2])) for i in range(16)]
SAFE = ("on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end", "on_step_end", "on_log", "on_save",
        "on_epoch_end")  # fmt: skip
INSIDE = ("on_pre_optimizer_step", "on_optimizer_step")
"""Events between the gradients and the count of an update."""


class Evaluates(TrainerCallback):
    """Calls evaluate() at one event of a step, and gets a signal meanwhile."""

    def __init__(self, event: str, number: int | None, step: int = 2) -> None:
        self.trainer: Any = None
        self.number, self.step, self.done = number, step, False
        setattr(self, event, self.act)

    def act(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.done or state.global_step < self.step:
            return
        self.done = True
        if self.number is not None:
            os.kill(os.getpid(), self.number)
        self.trainer.evaluate()


def made(folder: Path, *callbacks: Any) -> NumpyTrainer:
    args = BaseArguments(str(folder), max_steps=6, save_steps=3, logging_steps=1, per_device_train_batch_size=2,
                         gradient_accumulation_steps=2)  # fmt: skip
    trainer = NumpyTrainer(LinearModel(2, dropout=0.5), args, SAMPLES, eval_dataset=SAMPLES, callbacks=callbacks)
    for each in callbacks:
        each.trainer = trainer
    return trainer


def weights(trainer: NumpyTrainer) -> list[Any]:
    return [value.tolist() for value in trainer.model.parameters.values()]


def rows(trainer: NumpyTrainer) -> list[dict[str, Any]]:
    """What was logged, without what a clock made."""
    clocked = ("runtime", "per_second")
    return [{k: v for k, v in row.items() if not k.endswith(clocked)} for row in trainer.state.log_history]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("event", [*SAFE, *INSIDE])
def test_a_signal_while_a_callback_evaluates(event: str, number: int, tmp_path: Path) -> None:
    step = {"on_train_begin": 0}.get(event, 2)
    whole = made(tmp_path / "whole", Evaluates(event, None, step))
    whole.train()
    stopped = made(tmp_path / "run", Evaluates(event, number, step))
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            stopped.train()
    else:
        with pytest.raises(SystemExit) as left:
            stopped.train()
        assert left.value.code == 75
        assert (tmp_path / "run" / f"checkpoint-{stopped.state.global_step}").is_dir()
    assert not stopped.is_in_train
    again = made(tmp_path / "run", Evaluates(event, None, 7))
    again.train("auto")
    assert again.state.global_step == 6 and weights(again) == weights(whole)
    if number != signal.SIGINT:  # after which the run goes on from an older checkpoint, before the callback's turn
        assert rows(again) == rows(whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_when_training_is_complete(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the effect it has without a run: nothing is left to save, and Ctrl-C shows no traceback."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    heard: list[int] = []
    before = signal.signal(number, lambda *given: heard.append(number))
    try:
        done = made(tmp_path / "run", Evaluates("on_train_end", number, 6))
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt) as raised:
                done.train()
            capsys.readouterr()
            sys.excepthook(raised.type, raised.value, raised.tb)
            assert "Traceback" not in capsys.readouterr().err
        else:
            assert done.train().global_step == 6
            assert heard == [number]
    finally:
        signal.signal(number, before)
    assert not done.is_in_train
