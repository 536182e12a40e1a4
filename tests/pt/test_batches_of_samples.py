"""Batches that are lists of samples, from which an override of `_prepare_inputs` makes the inputs of the model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import loopwright
from tests.models import Regression, losses, regression_data


class Made(loopwright.Trainer):
    """Makes inputs from samples, as trainers do that generate text: each call counts."""

    calls = 0

    def _prepare_inputs(self, inputs: Any) -> Any:
        assert isinstance(inputs, list)
        self.calls += 1
        return {name: torch.stack([sample[name] for sample in inputs]) for name in inputs[0]}

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
        return model(**inputs)["loss"] * 2.0


def trained(folder: Path, accumulation: int) -> Made:
    args = loopwright.TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=8 // accumulation, logging_steps=1, use_cpu=True,
        gradient_accumulation_steps=accumulation, save_strategy="no", disable_tqdm=True, learning_rate=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = Made(Regression(), args, train_dataset=regression_data(24), data_collator=lambda samples: samples)
    trainer.train()
    return trainer


def test_inputs_are_made_once_for_each_micro_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = trained(tmp_path / "whole", 1)
    with caplog.at_level(logging.WARNING, logger="loopwright"):
        parts = trained(tmp_path / "parts", 4)
    assert (whole.calls, parts.calls) == (3, 12)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    assert "the loss is not tested: _prepare_inputs makes the model's inputs from samples" in caplog.text
    assert "It is weighted by samples" in caplog.text
