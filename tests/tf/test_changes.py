"""What callbacks change while TensorFlow trains: taken up, or refused, or said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loopwright import NotAvailable, TrainerCallback

from .tools import MARKS, logged, trainer, weights

pytestmark = MARKS


class At(TrainerCallback):
    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action, self.weights, self.run = step, action, [], None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights.append(weights(self.run))
        if state.global_step == self.step:
            self.action(self.run)


def changed(folder: Any, action: Any, **options: Any) -> tuple[Any, At]:
    given = {"per_device_train_batch_size": 2, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant",
             "max_grad_norm": 1e-3, "max_steps": 4, **options}  # fmt: skip
    made = trainer(folder, **given)
    callback = At(2, action)
    callback.run = made
    made.add_callback(callback)
    made.train()
    return made, callback


def test_another_limit_of_the_norm_counts_from_the_next_update_on(tmp_path: Any) -> None:
    _, seen = changed(tmp_path, lambda run: setattr(run.args, "max_grad_norm", 1e-4))
    moves = [
        np.sqrt(sum(((new - old) ** 2).sum() for old, new in zip(before, after, strict=True)))
        for before, after in zip(seen.weights, seen.weights[1:], strict=False)
    ]
    assert moves == pytest.approx([1e-3, 1e-4, 1e-4], rel=1e-2)


def test_another_accumulation_counts_from_the_next_update_on(tmp_path: Any) -> None:
    made, _ = changed(tmp_path, lambda run: setattr(run.args, "gradient_accumulation_steps", 2), max_steps=-1,
                      num_train_epochs=1)  # fmt: skip
    assert (made.state.global_step, made.state.max_steps, made._loopwright.run.progress.samples_seen) == (4, 4, 12)
    assert made.state.epoch == 1.0 and len(logged(made, "loss")) > 0


def test_another_optimizer_is_refused(tmp_path: Any) -> None:
    with pytest.raises(NotAvailable, match="assigned after step 2"):
        changed(tmp_path, lambda run: setattr(run, "optimizer", type(run.optimizer)(0.1)))


def test_layers_frozen_during_training_are_said(tmp_path: Any) -> None:
    made, _ = changed(tmp_path, lambda run: setattr(run.model.layers[-1], "trainable", False))
    assert any("layers were frozen" in told for told in made._loopwright.notices.told)
