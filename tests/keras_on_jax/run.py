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


if __name__ == "__main__":
    for first in range(1, len(sys.argv), 4):  # one run after the other
        main(*sys.argv[first : first + 4])
    named_values_are_refused(sys.argv[1])
