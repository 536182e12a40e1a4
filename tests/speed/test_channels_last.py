"""Images with their channels last in memory: the same run, if it is faster and proved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright.speed.engine as engine
import loopwright.speed.planner.cost as cost
import loopwright.speed.planner.decision as decision
import loopwright.speed.planner.regions as regions
from loopwright.pt.acceleration import Acceleration
from loopwright.speed.channels_last import CHANNELS_LAST, images_last
from loopwright.speed.proof.region import RegionProver
from tests.speed.test_graphing import Recorder
from tests.speed.test_regions import equal, images, losses, train

CONVERTED: list[Any] = []
"""Batches that were converted in training."""


class Convolutions(nn.Module):
    """Four convolutions; `what` makes the loss depend on the memory order of images."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)))
        self.last, self.what = nn.Linear(3, 5), what

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scale = 1.5 if self.what and not pixel_values.is_contiguous() else 1.0
        logits = self.last(self.layers(pixel_values).mean((2, 3))) * scale
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    CONVERTED.clear()

    def noted(batch: Any) -> Any:
        CONVERTED.append(batch)
        return images_last(batch)

    monkeypatch.setattr(engine, "images_last", noted)
    monkeypatch.setattr(regions, "COMPILING_DEVICES", ("cpu",))
    monkeypatch.setattr(cost, "MARGIN", 0.0)
    monkeypatch.setattr(Acceleration, "region_backend", "aot_eager")
    monkeypatch.setattr(Acceleration, "graph_recorder", Recorder())
    monkeypatch.setitem(decision.WORTH_SECONDS, "cpu", 0.0)
    monkeypatch.setitem(cost.HOST_SECONDS, "cpu", 1.0)
    yield
    torch._dynamo.reset()


def takes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Compiled for images with channels last it takes this long, and as written a second."""
    monkeypatch.setattr(
        RegionProver, "device_seconds", lambda self, batches, *, is_compiled: seconds if is_compiled else 1.0
    )


def choice(trainer: Any) -> Any:
    return next(each for each in trainer._loopwright.run.speed.plan.choices if each.name == CHANNELS_LAST)


def test_the_run_is_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, 0.5)
    plain = train(Convolutions(), images(), tmp_path / "a", speed="off", bf16=True, max_steps=9)
    assert not CONVERTED
    fast = train(Convolutions(), images(), tmp_path / "b", bf16=True, max_steps=9)
    plan = fast._loopwright.run.speed.plan
    assert plan.channels_last and plan.graphed and plan.region, plan.lines()
    assert CONVERTED and losses(fast) == pytest.approx(losses(plain), rel=1e-2)
    assert all(p.is_contiguous() for p in fast.model.parameters()), "weights stay as they are"


def test_what_is_not_faster_or_not_the_same_is_not_used(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, 1.0)
    slow = train(Convolutions(), images(), tmp_path / "a", bf16=True, max_steps=9)
    assert not choice(slow).is_on and "not faster" in choice(slow).reason and not CONVERTED
    takes(monkeypatch, 0.5)
    other = train(Convolutions("reads the order"), images(), tmp_path / "b", bf16=True, max_steps=9)
    assert not choice(other).is_on and "differs" in choice(other).reason
    assert not other._loopwright.run.speed.plan.channels_last


def test_a_resumed_run_makes_the_same_choice_to_the_last_bit(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, 0.5)
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "max_steps": 12, "bf16": True}
    whole = train(Convolutions(), images(), tmp_path, **options)
    assert whole._loopwright.run.speed.plan.channels_last
    for start in (4, 8):
        torch._dynamo.reset()
        rest = train(Convolutions(), images(), tmp_path, resume=str(tmp_path / f"checkpoint-{start}"), **options)
        assert rest._loopwright.run.speed.plan.channels_last and equal(whole, rest)


def test_only_images_are_converted() -> None:
    batch = {"x": torch.ones(2, 3, 4, 5), "mask": torch.ones(2, 3, 4, 5, dtype=torch.bool), "y": torch.ones(2, 3)}
    found = images_last(batch)
    assert not found["x"].is_contiguous() and torch.equal(found["x"], batch["x"])
    assert found["mask"] is batch["mask"] and found["y"] is batch["y"] and images_last([1]) == [1]
