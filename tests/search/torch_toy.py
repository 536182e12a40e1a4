"""The same problem on torch: a weight that shrinks by the factor 1 - learning_rate in each update."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loopwright import Trainer, TrainingArguments

DATA = [{"x": torch.tensor(1.0)} for _ in range(8)]
BEST = 1.0


class Shrinking(nn.Module):
    """A weight that should become 0."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(start))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": 0.5 * (self.weight * x).square().mean(), "logits": x}


def make_model(trial: Any = None) -> nn.Module:
    params = trial if isinstance(trial, Mapping) else getattr(trial, "params", {})
    return Shrinking(params.get("start", 1.0))


def space(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 0.01, 1.99)}


def arguments(folder: Path | str, **more: Any) -> TrainingArguments:
    usual = {
        "use_cpu": True, "disable_tqdm": True, "report_to": [], "optim": "sgd", "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "max_steps": 4, "per_device_train_batch_size": 2, "eval_strategy": "steps",
        "eval_steps": 2, "save_steps": 2, "logging_steps": 2, "speed": "off", "log_level": "warning",
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**usual, **more})


def torch_toy(folder: Path | str, *, kind: type[Trainer] = Trainer, callbacks: Any = None, **more: Any) -> Trainer:
    return kind(
        model_init=make_model,
        args=arguments(folder, **more),
        train_dataset=DATA,
        eval_dataset=DATA,
        callbacks=callbacks,
    )
