"""Stochastic rounding in software: right on average, and small updates are not lost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import loopwright
from loopwright import NeuronTrainer, NeuronTrainingArguments
from loopwright.neuron.rounding import Bf16Weights, round_stochastically
from tests.models import CPU, Tokens, made, pad, samples

MANY = 40_000


def neighbours(value: float) -> tuple[float, float]:
    """The bf16 numbers around a value, the one nearer to zero first."""
    bits = torch.tensor([value], dtype=torch.float32).view(torch.int32)
    low = (bits & ~0xFFFF).view(torch.float32)
    high = ((bits & ~0xFFFF) + 0x10000).view(torch.float32)
    return float(low), float(high)


@pytest.mark.parametrize("value", [1.0 + 2.0**-10, -3.1415926, 1e-3, 123.456, -1e-20, 6.5e4 + 1.0])
def test_the_mean_of_many_roundings_is_the_number(value: float) -> None:
    torch.manual_seed(1)
    low, high = neighbours(value)
    value = float(torch.tensor(value, dtype=torch.float32))
    found = round_stochastically(torch.full((MANY,), value)).double()
    assert set(found.unique().tolist()) <= {low, high}
    chance = (value - low) / (high - low)
    error = math.sqrt(max(chance * (1 - chance), 1e-9) / MANY)
    assert abs(float((found == high).double().mean()) - chance) < 5 * error + 1e-9


@given(st.floats(width=32, allow_nan=True, allow_infinity=True))
def test_every_number_stays_between_its_neighbours(value: float) -> None:
    found = float(round_stochastically(torch.tensor([value], dtype=torch.float32)))
    if math.isnan(value):
        assert math.isnan(found)
    elif math.isinf(value):
        assert found == value
    else:
        low, high = sorted(neighbours(value))
        assert low <= found <= high or not math.isfinite(high + low)


def test_what_bf16_holds_exactly_is_never_changed() -> None:
    exact = torch.randn(1000).to(torch.bfloat16).float()
    assert torch.equal(round_stochastically(exact).float(), exact)


@pytest.mark.parametrize(("stochastic", "moves"), [(True, True), (False, False)])
def test_updates_too_small_for_bf16_arrive_on_average(stochastic: bool, moves: bool) -> None:
    torch.manual_seed(2)
    weight = nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    precision = Bf16Weights(stochastic=stochastic)
    for _ in range(50):
        weight.grad = torch.ones_like(weight)
        assert precision.step(optimizer)
    moved = 1.0 - float(weight.detach().double().mean())
    assert weight.dtype is torch.bfloat16
    assert moved == pytest.approx(50 * 1e-4, rel=0.1) if moves else moved == 0.0


@pytest.mark.parametrize("stochastic", [True, False])
def test_a_run_with_bf16_weights_learns_saves_and_goes_on(stochastic: bool, tmp_path: Any) -> None:
    options: dict[str, Any] = {
        **CPU, "bf16": True, "optimizer_use_master_weights": False, "stochastic_rounding_enabled": stochastic,
        "optim": "adamw_torch", "learning_rate": 1e-2, "num_train_epochs": 4, "per_device_train_batch_size": 2,
        "save_strategy": "steps", "save_steps": 8, "static_lengths": [128],
    }  # fmt: skip

    def run(folder: str, **more: Any) -> Any:
        args = NeuronTrainingArguments(str(tmp_path / folder), **{**options, **more})
        return NeuronTrainer(made(Tokens).float(), args, pad, samples())

    whole = run("whole")
    whole.train()
    assert {p.dtype for p in whole.model.parameters()} == {torch.bfloat16}
    assert {v.dtype for s in whole.optimizer.state.values() for v in s.values()} == {torch.float32}
    first, last = (log["loss"] for log in (whole.state.log_history[0], whole.state.log_history[-2]))
    assert last < first
    again = run("again")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-8"))
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert loopwright.load_model(made(Tokens).to(torch.bfloat16), tmp_path / "whole" / "checkpoint-16")
