"""The same seed, data and arguments give the numbers of transformers, digit by digit."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import loopwright
from tests.models import TASKS

transformers = pytest.importorskip("transformers")

KEYS = ("loss", "learning_rate", "grad_norm", "epoch")


def run(library: Any, model: torch.nn.Module, data: Any, folder: Any, **options: Any) -> list[dict[str, Any]]:
    options = {"logging_steps": 1, "num_train_epochs": 2, "save_strategy": "no", "use_cpu": True, "seed": 7,
               "disable_tqdm": True, "learning_rate": 1e-2, "per_device_train_batch_size": 4, **options}  # fmt: skip
    args = library.TrainingArguments(output_dir=str(folder), **options)
    trainer = library.Trainer(copy.deepcopy(model), args, train_dataset=data)
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def assert_same(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float = 1e-6, keys: tuple[str, ...] = KEYS
) -> None:
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for key in keys:
            assert math.isclose(mine[key], other[key], rel_tol=tolerance, abs_tol=1e-12), (key, mine, other)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", TASKS)
def test_every_logged_number_is_transformers_own(name: str, dropout: float, tmp_path: Any) -> None:
    task = TASKS[name]
    torch.manual_seed(0)
    model, data = task.model(dropout), task.data(22)
    ours = run(loopwright, model, data, tmp_path / "ours")
    theirs = run(transformers, model, data, tmp_path / "theirs")
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", TASKS)
def test_accumulation_equals_the_batch_it_stands_for(name: str, tmp_path: Any) -> None:
    task = TASKS[name]
    torch.manual_seed(0)
    model, data = task.model(0.0), task.data(22)
    whole = run(loopwright, model, data, tmp_path / "whole", per_device_train_batch_size=8)
    parts = run(
        loopwright, model, data, tmp_path / "parts", per_device_train_batch_size=2, gradient_accumulation_steps=4
    )
    # fp32 sums in another order; the epoch counts micro-batches, of which there are more
    assert_same(parts, whole, tolerance=2e-5, keys=("loss", "learning_rate", "grad_norm"))
