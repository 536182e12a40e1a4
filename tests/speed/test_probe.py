"""The proof itself: candidates that are wrong on purpose must be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import loopwright.speed.attention.dispatch as attention
import loopwright.speed.layouts.candidates as candidates
import loopwright.speed.layouts.rows as layouts
from loopwright.speed.attention.document_mask import as_mask, borders_in, borders_of
from loopwright.speed.planner.decision import COLLATED, FLAT
from loopwright.speed.proof.distance import gradient_distance
from loopwright.speed.proof.number_formats import whole_precision
from tests.speed.architectures import build, samples
from tests.speed.training import gradients_of, train

pytest.importorskip("transformers")
DATA = samples(24, "causal")
right = attention.one_by_one


def one_document(documents: Tensor) -> Tensor:
    total = int(borders_in(documents)[-1])
    return as_mask(borders_of(np.array([total])), total)


def leaking(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, ask: Any) -> Tensor:
    """All documents of a row are one."""
    return right(q, k, v, one_document(documents), ask)


def leaking_a_little(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, ask: Any) -> Tensor:
    """Every document sees a trace of the others."""
    return right(q, k, v, documents, ask) + 1e-4 * v.mean(2, keepdim=True).repeat_interleave(2, 1).transpose(1, 2)


def not_causal(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, ask: Any) -> Tensor:
    return right(q, k, v, documents, ask._replace(causal=False))


def scaled(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, ask: Any) -> Tensor:
    return right(q, k, v, documents, ask._replace(scale=(ask.scale or q.shape[-1] ** -0.5) * 1.01))


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 1.001


def wrong_gradient(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, ask: Any) -> Tensor:
    """The right output, and a gradient that is off by a thousandth."""
    return right(_WrongGradient.apply(q), k, _WrongGradient.apply(v), documents, ask)


def raising(*args: Any) -> Tensor:
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize("wrong", [leaking, leaking_a_little, not_causal, scaled, wrong_gradient, raising])
def test_a_wrong_kernel_is_refused_and_the_run_stays_right(
    wrong: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    plain = gradients_of(build("llama", "causal", layers=2), DATA, tmp_path, speed="off")
    monkeypatch.setattr(attention, "one_by_one", wrong)
    run = gradients_of(build("llama", "causal", layers=2), DATA, tmp_path, speed="max")
    flat = next(choice for choice in run.plan.choices if choice.name == FLAT)
    assert not flat.is_on and run.plan.layout not in (FLAT, COLLATED), run.plan.lines()
    assert run.loss == pytest.approx(plain.loss, rel=1e-6)
    assert gradient_distance([*plain.gradients.values()], [*run.gradients.values()]) < 1e-6


def test_a_layout_that_loses_a_sample_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def losing(samples: Any, limits: Any, **options: Any) -> Any:
        return layouts.lay_flat(samples.select(np.arange(len(samples) - 1)), limits, **options)

    monkeypatch.setattr(candidates, "lay_flat", losing)
    run = train(build("llama", "causal", layers=2), DATA, tmp_path, speed="max")
    assert run.plan.layout != FLAT


def test_positions_that_do_not_restart_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def running_on(samples: Any, limits: Any, **options: Any) -> Any:
        laid = layouts.lay_flat(samples, limits, **options)
        for batch in laid.batches:
            batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).unsqueeze(0)
        return laid

    monkeypatch.setattr(candidates, "lay_flat", running_on)
    run = train(build("gpt2", "causal"), samples(24, "causal", longest=12), tmp_path, speed="max")
    assert run.plan.layout != FLAT


def test_a_leak_too_small_for_the_gradient_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The gradient may be off by rounding; what one document does to another may not show at all."""

    def trace(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, ask: Any) -> Tensor:
        return right(q, k, v, documents, ask) + 6e-5 * v.mean(2, keepdim=True).repeat_interleave(2, 1).transpose(1, 2)

    monkeypatch.setattr(attention, "one_by_one", trace)
    run = train(build("llama", "causal", layers=2), DATA, tmp_path, speed="max")
    flat = next(choice for choice in run.plan.choices if choice.name == FLAT)
    assert "affect each other" in flat.reason and flat.numbers["gradient"] < 1e-4


def test_proving_leaves_no_trace(tmp_path: Any) -> None:
    """Dropout of the first update draws what it would have drawn, gradients and modes are as they were."""
    states = []

    for level in ("off", "max"):
        model = build("llama", "causal", layers=2)
        torch.manual_seed(5)
        run = train(model, DATA, tmp_path, speed=level)
        states.append((torch.random.get_rng_state(), model.training))
        assert run.trainer.model.config._attn_implementation == "sdpa"
    assert torch.equal(states[0][0], states[1][0]) and states[0][1] == states[1][1]


def test_half_precision_weights_are_proved_in_single_and_stay_half() -> None:
    model = nn.Linear(2, 2).bfloat16()
    before = model.weight.data
    with whole_precision(model):
        assert model.weight.dtype is torch.float32
    assert model.weight.data_ptr() == before.data_ptr() and model.weight.dtype is torch.bfloat16


def test_gradients_are_compared_as_one_vector() -> None:
    a, b = [torch.tensor([3.0]), torch.tensor([4.0]), None], [torch.tensor([3.0]), torch.tensor([4.5]), None]
    assert gradient_distance(a, b) == pytest.approx(0.1)
    assert gradient_distance([None], [torch.ones(1)]) == float("inf")
    assert gradient_distance([torch.zeros(1)], [None]) == 0.0


def test_imaginary_parts_and_flags_count_as_differences() -> None:
    from loopwright.speed.proof.distance import SINGLE, gradient_distance, unequal_columns

    expected = [torch.tensor([1.0 + 1.0j, 2.0])]
    assert gradient_distance(expected, [torch.tensor([1.0 - 1.0j, 2.0])]) > 0.5
    assert gradient_distance(expected, [expected[0].clone()]) == 0.0
    assert unequal_columns(expected, [torch.tensor([1.0 - 1.0j, 2.0])], SINGLE) == "column 0"
    flags = [torch.tensor([True, False])]
    assert gradient_distance(flags, [torch.tensor([True, True])]) > 0.5 and gradient_distance(flags, flags) == 0.0
