"""A learned position bias in rows: the same attention, in a form for which torch has kernels on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.speed.layouts.candidates import Layout, make_layout
from loopwright.speed.planner.decision import BIASED
from loopwright.speed.proof.sample_lengths import UNLIMITED, longest_possible
from loopwright.speed.training_setup import TrainingSetup
from tests.speed.architectures import build, collate, samples
from tests.speed.training import gradients_of

pytest.importorskip("transformers")
DATA = samples(24, "pair")


def loss_and_gradients(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    parameters = list(model.parameters())
    loss = model(**batch).loss
    return [loss, *torch.autograd.grad(loss, parameters)]


def test_loss_and_gradients_are_the_same_and_the_bias_is_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build("t5", "pair", layers=2), collate(DATA[:6])
    layout = make_layout(BIASED, model)
    assert isinstance(layout, Layout)
    expected = loss_and_gradients(model, batch)
    plain, strides = torch.nn.functional.scaled_dot_product_attention, []

    def looked_at(*args: Any, attn_mask: Tensor, **kwargs: Any) -> Tensor:
        strides.append(attn_mask.stride(-1))
        return plain(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", looked_at)
    with layout.active():
        found = loss_and_gradients(model, batch)
    assert set(strides) == {1}
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert model.config._attn_implementation == model.decoder.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("kind", "task"), [("llama", "causal"), ("bart", "pair")])
def test_models_without_a_bias_have_no_use_for_it(kind: str, task: str) -> None:
    assert "no position bias" in str(make_layout(BIASED, build(kind, task)))


def test_lengths_are_limited_by_a_table_beside_the_bias() -> None:
    """On a GPU, a position beyond the table would abort the process when longer samples are compared."""
    from transformers import MPNetConfig, MPNetForSequenceClassification

    assert longest_possible(build("t5", "pair")) == UNLIMITED
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = MPNetForSequenceClassification(MPNetConfig(vocab_size=64, max_position_embeddings=34, **settings))
    most = longest_possible(model)
    assert most is not None
    assert 28 <= most <= 32
    model(torch.full((1, most), 5))


def test_another_attention_is_left_alone() -> None:
    model = build("t5", "pair", layers=2)
    for part in (model, model.encoder, model.decoder):
        part.config._attn_implementation_internal = "eager"
    assert "attention implementation is 'eager'" in str(make_layout(BIASED, model))


def test_it_is_taken_where_there_is_a_gpu(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, only_groups: None) -> None:
    plain = gradients_of(build("t5", "pair", layers=2), DATA, tmp_path / "off", speed="off")
    assert gradients_of(build("t5", "pair", layers=2), DATA, tmp_path / "cpu", speed="max").plan.layout == "grouped"
    monkeypatch.setattr(TrainingSetup, "on_gpu", property(lambda self: True))
    run = gradients_of(build("t5", "pair", layers=2), DATA, tmp_path / "gpu", speed="max")
    assert run.plan.layout == BIASED
    torch.testing.assert_close(run.gradients, plain.gradients, rtol=1e-9, atol=1e-12)


def test_norms_and_activations_of_one_kernel_are_the_same_and_leave_nothing_behind() -> None:
    model = build("t5", "pair", layers=2, dense_act_fn="gelu_new").float()
    batch = collate(DATA[:6])
    expected = loss_and_gradients(model, batch)
    used = []
    layout = make_layout(BIASED, model)
    assert isinstance(layout, Layout)
    with layout.active():
        used = [type(module).__name__ for module in model.modules() if "forward" in module.__dict__]
        found = loss_and_gradients(model, batch)
    assert {"T5LayerNorm", "NewGELUActivation"} <= set(used)
    for mine, its in zip(found, expected, strict=True):
        assert (mine - its).norm() <= 1e-4 * its.norm() + 1e-7
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_forward_of_the_user_is_kept() -> None:
    model = build("t5", "pair", layers=2)
    norm = model.encoder.final_layer_norm
    mine = norm.forward = lambda given: given * 2
    layout = make_layout(BIASED, model)
    assert isinstance(layout, Layout)
    with layout.active():
        assert norm.forward is mine
    assert norm.forward is mine
