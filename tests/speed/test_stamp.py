"""A plan looks again when anything it takes for granted has changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from loopwright.speed.fused_modules import FusedModules
from loopwright.speed.model_stamp import ModelStamp, fingerprint, left_differently, state_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(3, 3), nn.Dropout(0.1), nn.BatchNorm1d(3)
        self.weight_of_kl, self.kind, self.scales = 0.5, "plain", [1, 2]
        self.shares: dict[str, Any] = {"kl": 0.5, "parts": [{"a": 1}, 2]}
        self.config = type("Config", (), {})()
        self.config.alpha, self.config.name = 2.0, "a name"

    def forward(self, x: Any) -> Any:
        return self.norm(self.drop(self.linear(x)))


class Scaled(nn.Linear):
    def forward(self, input: Any) -> Any:
        return 2 * super().forward(input)


CHANGES: dict[str, Callable[[Block], Any]] = {
    "norm.training": lambda model: model.norm.eval(),
    "drop.p": lambda model: setattr(model.drop, "p", 0.2),
    "weight_of_kl": lambda model: setattr(model, "weight_of_kl", 0.6),
    "kind": lambda model: setattr(model, "kind", "other"),
    "scales": lambda model: model.scales.append(3),
    "shares['kl']": lambda model: model.shares.update(kl=0.6),
    "shares['new']": lambda model: model.shares.update(new=0.6),
    "shares['parts'][0]['a']": lambda model: model.shares["parts"][0].update(a=2),
    "shares['parts'][1]": lambda model: model.shares["parts"].pop(),
    "shares['parts'][2]": lambda model: model.shares["parts"].append("b"),
    "config.alpha": lambda model: setattr(model.config, "alpha", 3.0),
    "added": lambda model: setattr(model, "added", 1),
    "requires_grad of linear.bias": lambda model: model.linear.bias.requires_grad_(False),
    "hooks": lambda model: model.linear.register_forward_hook(lambda *args: None),
    "linear.forward": lambda model: setattr(model.linear, "forward", lambda x: x),
    "the class of linear": lambda model: setattr(model.linear, "__class__", Scaled),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_named_once(name: str) -> None:
    model = Block()
    stamp = ModelStamp(model)
    assert stamp.changes() == []
    CHANGES[name](model)
    assert name in stamp.changes() and stamp.changes() == []


@pytest.mark.parametrize("kind", [Block, nn.Linear])
def test_another_function_of_a_class_is_a_change(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = ModelStamp(Block())
    monkeypatch.setattr(kind, "forward", lambda self, x: x)
    assert stamp.changes() == [f"{kind.__module__}.{kind.__qualname__}.forward"] and stamp.changes() == []


def test_another_function_in_place_of_one_that_was_set_is_a_change() -> None:
    model = Block()
    model.linear.forward = lambda x: x  # type: ignore[method-assign]
    stamp = ModelStamp(model)
    assert stamp.changes() == []
    model.linear.forward = lambda x: 2 * x  # type: ignore[method-assign]
    assert stamp.changes() == ["linear.forward"]


def test_what_an_acceleration_sets_is_no_change() -> None:
    model = Block()
    stamp, replaced = ModelStamp(model), FusedModules(nn.Identity())
    model.linear.forward = replaced.active  # type: ignore[method-assign]
    assert stamp.changes() == []
    del model.linear.forward
    assert stamp.changes() == []


def test_what_a_save_writes_into_a_configuration_is_no_change() -> None:
    model = Block()
    stamp = ModelStamp(model)
    model.config.name, model.config.architectures = "another name", ["Block"]
    assert stamp.changes() == []


def test_a_number_that_becomes_a_tensor_is_a_change() -> None:
    model = Block()
    stamp = ModelStamp(model)
    model.weight_of_kl = torch.ones(2)  # type: ignore[assignment]
    assert "weight_of_kl" in stamp.changes()


def test_a_list_that_an_update_has_emptied_is_no_change() -> None:
    model = Block()
    stamp = ModelStamp(model)
    model.shares["parts"].clear()
    stamp.settle()
    assert stamp.changes() == []


def test_objects_around_the_model_are_part_of_the_stamp() -> None:
    objects: list[Any] = [object(), 4]
    stamp = ModelStamp(Block(), lambda: tuple(objects))
    assert stamp.changes() == []
    objects[1] = 8
    assert stamp.changes() and stamp.changes() == []


def test_looking_takes_no_calls_per_value() -> None:
    """Asked at every update: what it costs must not grow by a call for every attribute."""
    import sys

    stamp = ModelStamp(nn.ModuleList(Block() for _ in range(50)))
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    stamp.changes()
    sys.setprofile(None)
    assert calls < 250  # 450 modules of about 20 attributes each


def test_what_two_runs_leave_behind_is_compared() -> None:
    before = {"a": 1, "b": torch.zeros(2), "c": "x"}
    same = {"a": 2, "b": torch.ones(2), "c": "x"}
    assert left_differently((before, same), (before, dict(same)), 1e-6) is None
    for name, value in (("a", 3), ("b", torch.full((2,), 1.1)), ("c", "y")):
        assert left_differently((before, same), (before, {**same, name: value}), 1e-6) == name
    longer = {**same, "b": torch.ones(5)}
    assert left_differently((before, same), (before, longer), 1e-6) is None  # a table that grew
    assert left_differently((before, same), (before, {**same, "b": torch.zeros(5)}), 1e-6) == "b"


def test_what_was_different_before_and_did_not_change_is_no_difference() -> None:
    one, other = {"checkpointing": False}, {"checkpointing": True}
    assert left_differently((one, one), (other, other), 1e-6) is None


def test_state_has_buffers_attributes_and_tensors() -> None:
    model = Block()
    model.memory = torch.ones(3)
    found = state_of(model)
    assert {"norm.running_mean", ".weight_of_kl", ".memory", "drop.p"} <= set(found)
    assert not any("training" in name for name in found)


def scaled(by: float) -> Callable[[float], float]:
    return lambda x: x * by


def test_a_fingerprint_changes_with_code_and_with_bound_values() -> None:
    class One:
        def __init__(self, pad: int) -> None:
            self.pad = pad

        def __call__(self, rows: Any) -> Any:
            return rows

    assert fingerprint(scaled(2.0)) == fingerprint(scaled(2.0)) != fingerprint(scaled(3.0))
    assert fingerprint(One(1)) == fingerprint(One(1)) != fingerprint(One(2))
    assert fingerprint(functools.partial(scaled, 2.0)) != fingerprint(functools.partial(scaled, 3.0))
    assert fingerprint(lambda x: x + 1) != fingerprint(lambda x: x - 1)
    assert fingerprint(Block()) == fingerprint(Block()) != fingerprint(nn.Linear(1, 1))
