"""Compiled blocks of a T5: all of an encoder share their code, as do all of a decoder, with the same gradients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

import loopwright.pt.acceleration as acceleration
from loopwright.notices import Notices
from loopwright.speed.attention import pairs
from loopwright.speed.attention.per_document import AttentionRequest
from loopwright.speed.compile.blocks import Compiled, as_written, compile_blocks, repeated_blocks
from loopwright.speed.layouts.candidates import Layout, make_layout
from loopwright.speed.layouts.rows import Limits
from loopwright.speed.layouts.samples import take_apart
from loopwright.speed.memory.recompute import checkpoint_selectively
from loopwright.speed.planner.decision import PAIRED
from loopwright.speed.proof.distance import gradient_distance
from loopwright.speed.training_setup import TrainingSetup
from tests.speed.architectures import build, collate, samples
from tests.speed.training import train

pytest.importorskip("transformers")
LENGTHS = (24, 150, 40)
"""Longest documents of batches: distances up to 128, up to 256, and up to 128 again."""


def traceable(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, key_borders: Tensor, ask: AttentionRequest, *,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention within documents that is part of the compiled code, as kernels on GPUs are."""
    rows, columns = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None]
    documents = [torch.searchsorted(each.contiguous(), n.int(), right=True)
                 for each, n in ((borders, rows), (key_borders, columns))]  # fmt: skip
    seen, distance = documents[0] == documents[1], columns - rows
    if ask.causal:
        seen = seen & (distance <= 0)
    scores = query @ key.transpose(2, 3) * ask.scale
    if bias is not None:
        last = bias.shape[1] - 1
        scores = scores + bias[:, (distance + last // 2).clamp(0, last)]
    return (scores.masked_fill(~seen, -1e9).softmax(-1) @ value).transpose(1, 2)


def in_double_precision(self: Any, hidden_states: Tensor) -> Tensor:
    """The norm of a T5, which otherwise squares in single precision."""
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    normed: Tensor = self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return normed


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, doubles_stay: None) -> Iterator[None]:
    from transformers.models.mt5.modeling_mt5 import MT5LayerNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    for norm in (T5LayerNorm, MT5LayerNorm):
        monkeypatch.setattr(norm, "forward", in_double_precision)
    monkeypatch.setattr(pairs, "each_document", traceable)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model_of(kind: str = "t5", **more: Any) -> Any:
    model = build(kind, "pair", layers=2, **more)
    for part in model.modules():
        if hasattr(part, "config"):
            part.config.use_cache = False  # as a trainer sets it
    return model


def compiled(model: Any, backend: Any = "eager") -> Compiled:
    return compile_blocks(model, backend=backend, dynamic=True, notices=Notices(quiet=True))


def layout_of(model: Any) -> Layout:
    layout = make_layout(PAIRED, model)
    assert isinstance(layout, Layout)
    return layout


def loss_and_gradients(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    loss = model(**inputs).loss
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def row_of(layout: Layout, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    (row,) = layout.lay(take_apart([batch], is_pair=True), Limits(1 << 20, 0), shifts=False, fill=True).batches
    return layout.for_model(row)


def compare(model: Any, layout: Layout, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Compiled rows and padded batches as written have the same loss and gradients."""
    names = [name for name, _ in model.named_parameters()]
    assert sum("relative_attention_bias" in name for name in names) == 2
    for longest in lengths:
        batch = collate(samples(8, "pair", longest=longest, seed=longest))
        with as_written(model):
            expected = loss_and_gradients(model, batch)
        with layout.active():
            found = loss_and_gradients(model, row_of(layout, batch))
        for name, mine, plain in zip(["loss", *names], found, expected, strict=True):
            assert (mine - plain).norm() <= 1e-8 * plain.norm(), name


@pytest.mark.parametrize("kind", ["t5", "mt5"])
def test_blocks_of_a_stack_share_their_code(kind: str) -> None:
    model = model_of(kind)
    layout, session = layout_of(model), compiled(model)
    compare(model, layout)
    session.finish()
    assert session.counter.compilations == 2, list(session.counter.reasons)
    assert session.fell_back == {}


def test_so_do_blocks_that_recompute() -> None:
    model = model_of()
    recomputing = checkpoint_selectively(repeated_blocks(model))
    layout, session = layout_of(model), compiled(model)
    compare(model, layout)
    session.finish()
    recomputing.remove()
    assert session.counter.compilations == 2, list(session.counter.reasons)


def test_dropout_is_that_of_the_model_as_written() -> None:
    model = model_of(dropout_rate=0.1).train()
    layout, session = layout_of(model), compiled(model)
    batch = collate(samples(8, "pair", longest=24))
    with layout.active():
        found = loss_and_gradients(model, row_of(layout, batch))
        with as_written(model):
            expected = loss_and_gradients(model, row_of(layout, batch))
    session.finish()
    assert session.counter.compilations == 2
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["bart", "umt5"])
def test_models_whose_blocks_are_alike_are_left_alone(kind: str) -> None:
    model = model_of(kind)
    layout, session = layout_of(model), compiled(model)
    calls = [block._compiled_call_impl for block in repeated_blocks(model)]
    with layout.active():
        assert [block._compiled_call_impl for block in repeated_blocks(model)] == calls
        loss_and_gradients(model, row_of(layout, collate(samples(8, "pair", longest=24))))
    session.finish()
    assert session.counter.compilations == 2


def test_the_model_is_left_as_it_was() -> None:
    model = model_of()
    layout = layout_of(model)
    with layout.active():
        assert not any(block._compiled_call_impl for block in repeated_blocks(model)), "only what is compiled"
    session = compiled(model)
    keys, modules = list(model.state_dict()), [*model.named_modules()]
    with layout.active(), layout.active():
        first = [model.encoder.block[0], model.decoder.block[0]]
        assert not any(block._compiled_call_impl in session.calls for block in first)
        assert list(model.state_dict()) == keys and [*model.named_modules()] == modules
    assert [block._compiled_call_impl for block in repeated_blocks(model)] == session.calls
    session.finish()


def test_hooks_get_what_the_model_passes() -> None:
    model, seen = model_of(), []
    first = model.encoder.block[0]
    first.register_forward_pre_hook(lambda module, args: seen.append(args[2]))
    layout, session = layout_of(model), compiled(model)
    compare(model, layout, LENGTHS[:1])
    session.finish()
    assert seen and all(bias is None for bias in seen)


def test_a_forward_of_the_user_gets_what_the_model_passes() -> None:
    model, seen = model_of(), []
    attention = model.decoder.block[0].layer[0].SelfAttention

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["position_bias"])
        return type(attention).forward(attention, *args, **kwargs)

    attention.forward = forward
    layout, session = layout_of(model), compiled(model)
    compare(model, layout, LENGTHS[:1])
    session.finish()
    assert seen and all(bias is None for bias in seen)


def test_a_block_that_cannot_be_compiled_stays_as_written() -> None:
    def refusing(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no")

    model = model_of()
    layout, session = layout_of(model), compiled(model, refusing)
    compare(model, layout, LENGTHS[:2])
    session.finish()
    assert len(session.fell_back) == 4
    assert not any(block._compiled_call_impl for block in repeated_blocks(model))


def test_training_is_that_without_accelerations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingSetup, "on_gpu", property(lambda self: True))
    monkeypatch.setattr(acceleration, "compile_as_asked", lambda model, *args, **kwargs: compiled(model))
    data = samples(36, "pair", longest=24)
    options: dict[str, Any] = {"learning_rate": 1e-3, "max_steps": 3}
    plain = train(model_of(), data, tmp_path / "off", speed="off", **options)
    fast = train(model_of(), data, tmp_path / "max", speed="max", **options)
    assert fast.plan.layout == PAIRED and fast.plan.compiled, fast.plan.lines()
    assert fast.trainer.compiled.figures()["compilations"] == 2, fast.trainer.compiled.figures()["reasons"]
    assert fast.losses == pytest.approx(plain.losses, rel=1e-10)
    assert gradient_distance([*plain.gradients.values()], [*fast.gradients.values()]) < 1e-7
