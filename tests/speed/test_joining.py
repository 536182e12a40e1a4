"""Micro-batches of images and arrays computed together: the same update, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright.speed.joining as joining
from loopwright import Trainer, TrainingArguments
from loopwright.speed.joining import JOINED, CannotJoin, joined

ROWS: list[int] = []
"""The samples of every micro-batch that a model was called with."""


class Net(nn.Module):
    """A model of images; `what` mixes the samples of a batch, or does not."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last, self.what = nn.Conv2d(3, 4, 3), nn.Linear(4, 5), what
        self.between = nn.BatchNorm2d(4) if what == "batch norm" else nn.GroupNorm(2, 4)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        ROWS.append(len(labels))
        logits = self.last(self.between(torch.relu(self.first(pixel_values))).mean((2, 3)))
        if self.what == "centred":
            logits = logits - logits.mean(0)
        loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": loss + (logits.std(0).sum() if self.what == "spread" else 0.0), "logits": logits}


def images(count: int = 96) -> list[dict[str, Tensor]]:
    made = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return [{"pixel_values": image, "labels": torch.tensor(i % 5)} for i, image in enumerate(made)]


def train(what: str, folder: Any, *, resume: Any = None, **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": 4, "learning_rate": 1e-2,
        "logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "speed": "max", **options,
    }  # fmt: skip
    trainer = Trainer(Net(what).double(), TrainingArguments(str(folder), **arguments), train_dataset=images())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def choice(trainer: Any) -> Any:
    return next(each for each in trainer._loopwright.run.speed.plan.choices if each.name == JOINED)


def states_differ(a: Any, b: Any) -> float:
    mine, other = a.model.state_dict(), b.model.state_dict()
    return max(float((mine[name] - other[name]).abs().max()) for name in mine)


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "JOINING_DEVICES", ("cpu",))


def test_the_update_is_the_same(tmp_path: Any) -> None:
    plain = train("", tmp_path / "a", speed="off")
    assert ROWS[-1] == 4
    fast = train("", tmp_path / "b")
    assert choice(fast).is_on and fast._loopwright.run.speed.plan.joined == 3, choice(fast).reason
    assert ROWS[-1] == 12
    assert states_differ(plain, fast) < 1e-12
    assert fast.state.global_step == 4 and fast.state.epoch == plain.state.epoch


@pytest.mark.parametrize(
    ("what", "word"),
    [("batch norm", "batch statistics"), ("centred", "losses of its samples"), ("spread", "losses of its samples")],
)
def test_what_mixes_samples_is_refused(what: str, word: str, tmp_path: Any) -> None:
    plain, fast = train(what, tmp_path / "a", speed="off"), train(what, tmp_path / "b")
    assert not choice(fast).is_on and word in choice(fast).reason
    assert states_differ(plain, fast) == 0.0 and ROWS[-1] == 4


def test_a_resumed_run_joins_to_the_last_bit(tmp_path: Any) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole = train("", tmp_path, **options)
    rest = train("", tmp_path, resume=str(tmp_path / "checkpoint-2"), **options)
    assert rest._loopwright.run.speed.plan.joined == 3 and states_differ(whole, rest) == 0.0


def test_what_fits_is_joined(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(joining, "_activation_bytes", lambda here, batch: 1 << 20)
    monkeypatch.setattr("loopwright.pt.acceleration.total_memory", lambda device: 5 << 20)
    trainer = train("", tmp_path, gradient_accumulation_steps=4)
    assert trainer._loopwright.run.speed.plan.joined == 2, "a number that divides the update, within the memory"
    monkeypatch.setattr("loopwright.pt.acceleration.total_memory", lambda device: 1 << 20)
    assert "would not fit" in choice(train("", tmp_path)).reason


def test_only_rows_of_samples_are_joined() -> None:
    row = {"x": torch.ones(2, 3), "n": 1}
    assert joined([row] * 4, 2)[0]["x"].shape == (4, 3) and len(joined([row] * 4, 2)) == 2
    for other in (
        {"x": torch.ones(2, 4), "n": 1}, {"x": torch.ones(2, 3), "n": 2}, {"x": torch.ones(2, 3)},
        {"x": torch.ones(2, 3, dtype=torch.float64), "n": 1}, [torch.ones(2, 3)],
    ):  # fmt: skip
        with pytest.raises(CannotJoin):
            joined([row, other], 2)
    with pytest.raises(CannotJoin, match="one row for each sample"):
        joined([{"x": torch.ones(2, 3), "scale": torch.ones(1)}] * 2, 2)
