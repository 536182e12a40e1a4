"""A signal before the first update: the run ends with the promised code, and starts again as if nothing had been."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopwright import Trainer, TrainingArguments


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        found = self.layer(x).squeeze(-1)
        return {"loss": None if labels is None else (found - labels).square().mean(), "logits": found}


DATA = [{"x": torch.tensor([float(i), 1.0]), "labels": torch.tensor(float(i))} for i in range(12)]


def made(folder: Path, strikes: Any = None, **options: Any) -> Trainer:
    def metrics(prediction: Any) -> dict[str, float]:
        if strikes is not None:
            os.kill(os.getpid(), strikes)
        return {"accuracy": 1.0}

    args = TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=2, use_cpu=True, disable_tqdm=True, report_to="none",
        eval_strategy="steps", eval_steps=2, save_steps=2, metric_for_best_model="accuracy", **options,
    )  # fmt: skip
    return Trainer(Line(), args, train_dataset=DATA, eval_dataset=DATA, compute_metrics=metrics)


class Strikes(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A dataset that gets a signal when it is first read, by the check of the metric or by training."""

    def __init__(self, number: int) -> None:
        self.number: int | None = number

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> Any:
        number, self.number = self.number, None
        if number is not None:
            os.kill(os.getpid(), number)
        return DATA[index]


@pytest.mark.parametrize("where", ["the metric", "the evaluation data", "the training data"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_before_the_first_update(number: int, where: str, tmp_path: Path) -> None:
    trainer = made(tmp_path, number if where == "the metric" else None)
    if where != "the metric":
        setattr(trainer, "eval_dataset" if "evaluation" in where else "train_dataset", Strikes(number))
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    else:
        with pytest.raises(SystemExit) as left:
            trainer.train()
        assert left.value.code == 75
    assert not trainer.is_in_train and trainer.state.global_step <= 1
    again, whole = made(tmp_path), made(tmp_path / "whole")
    again.train(resume_from_checkpoint="auto")
    whole.train()
    assert again.state.global_step == 4
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True))
