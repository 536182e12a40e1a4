"""The trainer refuses overrides that are never called, and has no method of their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import loopwright
from loopwright.core.user_code.overrides import NEVER_CALLED


def test_the_trainer_refuses_when_it_is_created(tmp_path: Any) -> None:
    cls = type("Mine", (loopwright.Trainer,), {"_inner_training_loop": lambda self: None})
    with pytest.raises(loopwright.OverrideError, match="training_step or compute_loss"):
        cls(torch.nn.Linear(1, 1), loopwright.TrainingArguments(str(tmp_path), use_cpu=True))


OF_TORCH_ONLY = {"_maybe_log_save_evaluate", "_load_callback_state"}
"""PyTorch's trainer calls them, the others do not."""


def test_what_is_refused_does_not_exist_here() -> None:
    assert {name for name in NEVER_CALLED if hasattr(loopwright.Trainer, name)} == OF_TORCH_ONLY
