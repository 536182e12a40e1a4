"""Attention kernels of runs whose batches have many shapes, also where a user's override keeps the batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright.pt.acceleration as acceleration
import loopwright.speed.engine as engine
import loopwright.speed.planner.planner as planner
from loopwright import Trainer, TrainingArguments
from loopwright.speed.attention import kernel_choice
from loopwright.speed.attention.kernel_choice import VARIED, without_cudnn

ENTERED: list[int] = []
"""The updates that were computed without cuDNN's attention."""


class Sums(nn.Module):
    """Takes rows of any width."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(1, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x.sum(1, keepdim=True))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Own(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    width = max(len(row["x"]) for row in rows)
    x = torch.stack([nn.functional.pad(row["x"], (0, width - len(row["x"]))) for row in rows])
    return {"x": x, "labels": torch.tensor([row["labels"] for row in rows])}


def samples(widths: int) -> list[dict[str, Any]]:
    return [{"x": torch.full((1 + i % widths,), 0.01 * i, dtype=torch.float64), "labels": i % 3} for i in range(64)]


def train(kind: type[Trainer], folder: Any, *, widths: int = 30, resume: Any = None, **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2, "max_steps": 26, "learning_rate": 1e-2, "logging_steps": 5,
        "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, **options,
    }  # fmt: skip
    trainer = kind(Sums().double(), TrainingArguments(str(folder), **arguments), collate, train_dataset=samples(widths))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def noted() -> Iterator[None]:
        ENTERED.append(1)
        yield

    ENTERED.clear()
    for module in (planner, acceleration):
        monkeypatch.setattr(module, "VARYING_DEVICES", ("cpu",))
    monkeypatch.setattr(engine, "without_cudnn", noted)


def test_batches_of_many_shapes_are_computed_without_cudnn(tmp_path: Any) -> None:
    plain, mine = train(Own, tmp_path / "a", speed="off"), train(Own, tmp_path / "b")
    plan = mine._loopwright.run.speed.plan
    assert plan.varied and plan.layout == "collated" and VARIED in [each.name for each in plan.choices]
    assert "training_step is overridden" in str(mine.speed_report())
    assert 10 < len(ENTERED) < 20, "from the update on that shows the ninth shape"
    for a, b in zip(plain.model.parameters(), mine.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_batches_of_few_shapes_keep_their_kernels(tmp_path: Any) -> None:
    trainer = train(Own, tmp_path, widths=2)
    assert not trainer._loopwright.run.speed.plan.varied and not ENTERED


def test_a_resumed_run_uses_the_same_kernels(tmp_path: Any) -> None:
    train(Own, tmp_path, save_strategy="steps", save_steps=4, save_total_limit=9)
    whole = len(ENTERED)
    for start in (4, 24):  # before and after the choice
        ENTERED.clear()
        train(Own, tmp_path, resume=str(tmp_path / f"checkpoint-{start}"))
        assert len(ENTERED) == min(whole, 26 - start)


def test_torchs_setting_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice.torch.cuda, "is_available", lambda: True)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        with pytest.raises(KeyError), without_cudnn():
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            raise KeyError
        assert torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        with without_cudnn():
            pass
        assert not torch.backends.cuda.cudnn_sdp_enabled(), "a user's choice stays"
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
