"""Overrides of `_maybe_log_save_evaluate`; tests/compat/patterns.py compares their numbers with transformers'."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from loopwright import Trainer, TrainerCallback
from tests.models import losses, regression_run


class Alone(Trainer):
    """Saves without calling the method it overrides, and changes a file of the checkpoint afterwards."""

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *given: Any) -> None:
        if self.control.should_save:
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
            self.change_file()

    def change_file(self) -> None:
        path = Path(str(self.args.output_dir), f"checkpoint-{self.state.global_step}", "trainer_state.json")
        path.write_text(path.read_text() + " ")


class Around(Alone):
    """Calls the method it overrides, and changes a file of the checkpoint afterwards."""

    def _maybe_log_save_evaluate(self, *given: Any, **named: Any) -> None:
        saves = self.control.should_save
        Trainer._maybe_log_save_evaluate(self, *given, **named)
        if saves:
            self.change_file()


@pytest.mark.parametrize("cls", [Alone, Around])
def test_a_file_that_an_override_changes_after_a_save_belongs_to_the_checkpoint(tmp_path: Path, cls: Any) -> None:
    trainer = regression_run(tmp_path, cls=cls, save_steps=1, max_steps=2)
    assert len(losses(trainer)) == (0 if cls is Alone else 2), "only one of them logs"
    again = regression_run(tmp_path, cls=cls, save_strategy="no", max_steps=3, resume_from_checkpoint=True)
    assert again.state.global_step == 3


@pytest.mark.parametrize("cls", [Alone, Around])
def test_a_signal_is_followed_after_an_override(tmp_path: Path, cls: Any) -> None:
    class Sends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        regression_run(tmp_path, cls=cls, save_strategy="no", max_steps=4, callbacks=[Sends()])
    assert left.value.code == 75 and (tmp_path / "checkpoint-2").is_dir()


def test_an_override_is_called_after_each_update_and_epoch(tmp_path: Path) -> None:
    steps: list[int] = []

    class Counts(Trainer):
        def _maybe_log_save_evaluate(self, *given: Any, **named: Any) -> None:
            steps.append(self.state.global_step)
            super()._maybe_log_save_evaluate(*given, **named)

    regression_run(tmp_path, cls=Counts, n=8, num_train_epochs=2, save_strategy="no")
    assert steps == [1, 2, 2, 3, 4, 4]


def test_an_override_that_is_assigned_during_a_run_is_called_from_then_on(tmp_path: Path) -> None:
    called: list[int] = []

    class Assigns(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **named: Any) -> Any:
            if self.state.global_step == 1:
                self._maybe_log_save_evaluate = lambda *given, **named: called.append(self.state.global_step)
            return super().compute_loss(model, inputs, **named)

    trainer = regression_run(tmp_path, cls=Assigns, save_strategy="no", max_steps=4)
    assert called[:3] == [2, 3, 4] and len(losses(trainer)) == 1
