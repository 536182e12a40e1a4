"""Runs with Keras on JAX, in a process of their own: KERAS_BACKEND is read when keras is imported."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"


def main(folder: str, result: str, resume: str, dropout: str) -> None:
    import jax

    from loopwright.jax.arguments import JAXTrainingArguments
    from loopwright.jax.trainer import JAXTrainer
    from tests.contract.frameworks import QUIET, TensorFlow, rows

    framework = TensorFlow()
    model = framework.net(dropout=float(dropout))
    args = JAXTrainingArguments(
        folder, **{**QUIET, "per_device_train_batch_size": 6 // jax.device_count(), "gradient_accumulation_steps": 2,
                   "num_train_epochs": 2, "weight_decay": 0.1, "warmup_steps": 2, "save_steps": 3, "seed": 42,
                   "eval_strategy": "steps", "eval_steps": 4},
    )  # fmt: skip
    framework.seed()
    trainer = JAXTrainer(model, args, rows(26), rows(7), lambda p: {"n": len(p.predictions)})
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model()
    numbers = {
        "devices": jax.device_count(),
        "loss": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "norm": [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row],
        "eval": [[row["eval_loss"], row["eval_n"]] for row in trainer.state.log_history if "eval_loss" in row],
        "weights": [variable.numpy().tolist() for variable in model.variables],
    }
    with open(result, "w", encoding="utf-8") as file:
        json.dump(numbers, file)


def named_values_are_refused(folder: str) -> None:
    """A loss with named values stops the run before its first update."""
    from loopwright import ModelError
    from loopwright.jax.arguments import JAXTrainingArguments
    from loopwright.jax.trainer import JAXTrainer
    from tests.contract.frameworks import QUIET, TensorFlow, rows

    class Named(JAXTrainer):
        def compute_loss(self, features: Any, labels: Any) -> Any:
            loss = super().compute_loss(features, labels)
            return loss, {"rest": loss}

    args = JAXTrainingArguments(f"{folder}/named", **{**QUIET, "max_steps": 1, "save_strategy": "no"})
    try:
        Named(TensorFlow().net(), args, rows(4)).train()
    except ModelError as error:
        assert "returned named values, which only PyTorch trainers log" in str(error)
    else:
        raise AssertionError("the loss was accepted")


def masks_count_and_loss_scaling_is_refused() -> None:
    """Traced arrays of JAX take no attributes, so Keras keeps their masks elsewhere."""
    import jax
    import keras
    import numpy as np

    from loopwright import ModelError
    from loopwright.jax.strategy import JaxStrategy
    from loopwright.keras.loss.compiled_loss import summed_loss

    @jax.jit
    def summed(labels: Any, outputs: Any) -> Any:
        keras.src.backend.set_keras_mask(outputs, keras.ops.array([True, True, False, False]))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
        return summed_loss(loss, labels, outputs, None, family=keras)

    total, items = summed(np.array([0, 1, 2, 0]), np.ones((4, 3), np.float32))
    assert (float(items), round(float(total), 4)) == (1.0, round(float(np.log(3)), 4))
    try:
        JaxStrategy(jax.devices()).setup_optimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    except ModelError as error:
        assert "does not scale the loss" in str(error)
    else:
        raise AssertionError("the optimizer was accepted")


def a_skipped_update_leaves_moving_means(folder: str) -> None:
    import keras
    import numpy as np

    from loopwright.jax.arguments import JAXTrainingArguments
    from loopwright.jax.trainer import JAXTrainer
    from tests.contract.frameworks import QUIET

    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(loss="mse")
    options = {**QUIET, "max_steps": 1, "save_strategy": "no", "on_nonfinite": "skip"}
    data = (np.full((4, 4), np.nan, "float32"), np.zeros((4, 1), "float32"))
    JAXTrainer(model, JAXTrainingArguments(f"{folder}/skipped", **options), data).train()
    assert all(np.isfinite(variable.numpy()).all() for variable in model.variables)


if __name__ == "__main__":
    for first in range(1, len(sys.argv), 4):  # one run after the other
        main(*sys.argv[first : first + 4])
    named_values_are_refused(sys.argv[1])
    masks_count_and_loss_scaling_is_refused()
    a_skipped_update_leaves_moving_means(sys.argv[1])
