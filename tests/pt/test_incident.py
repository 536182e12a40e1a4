"""on_nonfinite="raise" says what happened: step, samples, batch, gradients and the first module that went bad."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from loopwright import Trainer, TrainingArguments
from loopwright.errors import NonFiniteError


class Net(nn.Module):
    """Two layers; the second one divides by zero when it sees a poisoned sample."""

    def __init__(self, bad: str | None = "second") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)
        self.fragile = Fragile(bad == "second")
        self.early = Fragile(bad == "first")

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.second(self.fragile(self.early(self.first(x), x), x)).squeeze(-1)
        return {"loss": nn.functional.mse_loss(y, labels)}


class Fragile(nn.Module):
    def __init__(self, on: bool) -> None:
        super().__init__()
        self.on = on

    def forward(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return hidden / (x[:, :1] != 99).float() if self.on else hidden


def data(poisoned: int) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    rows = [{"x": torch.randn(3, generator=g), "labels": torch.randn((), generator=g)} for _ in range(40)]
    rows[poisoned]["x"][0] = 99.0
    return rows


def failed(
    tmp_path: Path, *, bad: str = "second", poisoned: int = 17, **options: Any
) -> tuple[Trainer, dict[str, Any], Path]:
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, num_train_epochs=1, on_nonfinite="raise", save_strategy="no",
        use_cpu=True, disable_tqdm=True, seed=5, **options,
    )  # fmt: skip
    trainer = Trainer(Net(bad), args, train_dataset=data(poisoned))
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    [folder] = tmp_path.glob("incident-step-*")
    assert str(folder) in str(caught.value)
    return trainer, json.loads((folder / "incident.json").read_text()), folder


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("waits", [False, True])
def test_the_report_names_step_samples_and_batch(
    accumulation: int, waits: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    if waits:  # as on a device, where the loss is read at log points only
        from loopwright.pt.strategies.single import SingleDevice

        waiting = property(lambda self: False, lambda self, value: None)
        monkeypatch.setattr(SingleDevice, "reads_are_free", waiting, raising=False)
    trainer, report, folder = failed(tmp_path, gradient_accumulation_steps=accumulation, logging_steps=6)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(5)).tolist()
    per_update = 2 * accumulation
    step = order.index(17) // per_update + 1
    assert report["step"] == step
    assert report["sample_ids"] == order[(step - 1) * per_update : step * per_update]
    assert 17 in report["sample_ids"]
    saved = load_file(folder / "batch.safetensors")
    loaded = torch.cat([saved[f"{i}/x"] for i in range(accumulation)])
    assert torch.equal(loaded, torch.stack([data(17)[i]["x"] for i in report["sample_ids"]]))
    assert all(p.isfinite().all() for p in trainer.model.parameters()), "the weights are those before the bad step"


@pytest.mark.parametrize(("bad", "module"), [("first", "early"), ("second", "fragile")])
def test_the_first_bad_module_is_named(bad: str, module: str, tmp_path: Path) -> None:
    _, report, _ = failed(tmp_path, bad=bad)
    assert report["first_bad_module"] == module
    assert report["bad_weights"] == []
    assert "second.weight" in report["gradient_norms"]
    assert report["bad_gradients"]
