"""A problem whose best learning rate is known, and a script that searches for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import loopwright
from loopwright import Trainer, TrainerCallback, TrainingArguments

DATA = [{"x": torch.tensor(1.0)} for _ in range(8)]
BEST = 1.0
"""The weight shrinks by the factor 1 - learning_rate in each update."""


class Shrinking(nn.Module):
    """A weight that should become 0."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(start))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": 0.5 * (self.weight * x).square().mean(), "logits": x}


def make_model(trial: Any = None) -> nn.Module:
    return Shrinking(1.0 if trial is None else trial.params.get("start", 1.0))


def space(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 0.01, 1.99)}


def arguments(folder: Path | str, **more: Any) -> TrainingArguments:
    usual = {
        "use_cpu": True, "disable_tqdm": True, "report_to": [], "optim": "sgd", "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "max_steps": 6, "per_device_train_batch_size": 2, "eval_strategy": "steps",
        "eval_steps": 2, "save_steps": 2, "logging_steps": 2, "speed": "off", "log_level": "warning",
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**usual, **more})


def make_trainer(folder: Path | str, callbacks: list[Any] | None = None, **more: Any) -> Trainer:
    return Trainer(
        model_init=make_model,
        args=arguments(folder, **more),
        train_dataset=DATA,
        eval_dataset=DATA,
        callbacks=callbacks,
    )


class Slow(TrainerCallback):
    """Waits before every update until a file exists, so that a search can be killed inside a trial."""

    def __init__(self, folder: str, step: int) -> None:
        self.folder, self.step = Path(folder), step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and Path(args.output_dir).name == "run-2":
            (self.folder / "waiting").touch()
            while not (self.folder / "go").exists():
                torch.zeros(1)


class Counting(TrainerCallback):
    """Writes a line for every update of every trial."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with open(self.folder / "updates.txt", "a", encoding="utf-8") as file:
            file.write(f"{Path(args.output_dir).name} {state.global_step}\n")
