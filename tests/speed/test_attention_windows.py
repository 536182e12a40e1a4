"""Models that put more than padding into their masks: rows of documents keep it, or the collator's batches are kept."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from loopwright.speed.attention.dispatch import AttentionRefused
from loopwright.speed.attention.document_mask import as_given, borders_of, split_at_chunks
from loopwright.speed.attention.mask_patterns import Pattern, mask_of_documents, pattern_of
from loopwright.speed.attention.switch import AttentionSwitch
from loopwright.speed.layouts.candidates import make_layout
from loopwright.speed.layouts.positions import longest_alike
from loopwright.speed.layouts.rows import Limits
from loopwright.speed.layouts.samples import NoSamples, real_tokens, take_apart
from loopwright.speed.planner.decision import COLLATED, FLAT, UNPADDED
from loopwright.speed.proof.prober import gradient_distance
from tests.speed.architectures import build, collate, samples
from tests.speed.training import InOrder, gradients_of, train
from tests.speed.windowed import AS_THEY_ARE, FLAT_OF, MODELS, made, rows_of
from tests.spreads import some, spread

transformers = pytest.importorskip("transformers")
masking_utils = pytest.importorskip("transformers.masking_utils")

IN_SINGLE_PRECISION = {"gemma2", "cohere2"}


@pytest.mark.parametrize("name", some(MODELS, step=2))
def test_what_a_mask_holds_besides_padding_is_kept(name: str, doubles_stay: None, tmp_path: Any) -> None:
    task = {"modernbert": "masked", "modernbert by class": "class"}.get(name, "causal")
    model, data = MODELS[name](), samples(12, task, longest=40)
    plain = gradients_of(model, data, tmp_path, speed="off")
    laid = gradients_of(model, data, tmp_path, speed="max")
    tolerance = 1e-5 if name in IN_SINGLE_PRECISION else 1e-10
    assert laid.plan.layout in FLAT_OF[name], laid.plan.lines()
    assert laid.loss == pytest.approx(plain.loss, rel=tolerance)
    assert gradient_distance([*plain.gradients.values()], [*laid.gradients.values()]) < tolerance


# ---- the switch alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("fill", [False, True], ids=["", "filled"])
@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_rows_are_the_padded_batch_without_being_proved(
    name: str, fill: bool, implementation: str, doubles_stay: None
) -> None:
    model = AS_THEY_ARE[name]().eval()
    if name == "gemma2" and implementation == "sdpa":
        pytest.skip("torch's kernel has no softcap")
    if implementation == "eager":
        model.to(torch.float32)  # transformers' own mask overflows its softmax in double precision
    model.set_attn_implementation(implementation)
    data = samples(6, "masked" if name == "modernbert" else "causal", longest=40)
    parameters = list(model.parameters())
    expected, found = (
        [loss, *torch.autograd.grad(loss, parameters, allow_unused=True)]
        for loss in (model(**collate(data)).loss, rows_of(model, data, fill=fill))
    )
    tolerance = 1e-4 if model.dtype == torch.float32 or name in IN_SINGLE_PRECISION else 1e-10
    assert gradient_distance(expected, found) < tolerance
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_a_change_in_one_document_moves_no_other(name: str, doubles_stay: None) -> None:
    model, data = AS_THEY_ARE[name]().eval(), samples(4, "causal", longest=30)
    data[0]["labels"] = data[0]["input_ids"].clone()
    for each in data[1:]:
        each["labels"] = torch.full_like(each["labels"], -100)
    before = rows_of(model, data)
    for each in data[1:]:
        each["input_ids"] = each["input_ids"].flip(0)
    assert rows_of(model, data).item() == pytest.approx(before.item(), rel=1e-12)


# ---- patterns --------------------------------------------------------------------------------------------------------


def seen_by(function: Any, tokens: int) -> Tensor:
    place = torch.arange(tokens)
    return torch.broadcast_to(function(0, 0, place[:, None], place[None, :]), (tokens, tokens))


def seen_in(pattern: Pattern, tokens: int) -> Tensor:
    place = torch.arange(tokens)
    distance = place[:, None] - place[None, :]
    seen = distance >= 0 if pattern.causal else torch.ones(tokens, tokens, dtype=torch.bool)
    if pattern.window is not None:
        seen = seen & (distance.abs() < pattern.window)
    if pattern.chunk is not None:
        seen = seen & (place[:, None] // pattern.chunk == place[None, :] // pattern.chunk)
    return seen


NO_PADDING = torch.zeros(1, dtype=torch.long)
KNOWN = {
    "causal": masking_utils.causal_mask_function,
    "both sides": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "window on both sides": masking_utils.sliding_window_bidirectional_mask_function(3),
    "chunks": masking_utils.chunked_causal_mask_function(4, NO_PADDING),
    "window and chunks": masking_utils.and_masks(
        masking_utils.chunked_causal_mask_function(4, NO_PADDING), masking_utils.sliding_window_causal_mask_function(2)
    ),
    "two windows": masking_utils.and_masks(
        masking_utils.sliding_window_causal_mask_function(5), masking_utils.sliding_window_causal_mask_function(2)
    ),
    "chunks seen from both sides": masking_utils.chunked_overlay(4, NO_PADDING),
}
UNKNOWN = {
    "union": masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function),
    "a user's": lambda batch, head, q, k: q >= k,
    "with a user's": masking_utils.and_masks(masking_utils.causal_mask_function, lambda batch, head, q, k: q - k != 2),
    "blocks": masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.blockwise_overlay(torch.zeros(1, 9))
    ),
    "packed already": masking_utils.packed_sequence_mask_function(torch.zeros(1, 9)),
    "padding": masking_utils.padding_mask_function(torch.ones(1, 9)),
    "a window that looks ahead for ever": masking_utils.and_masks(
        masking_utils.sliding_window_overlay(3), masking_utils.bidirectional_mask_function
    ),
    "only a window": masking_utils.sliding_window_overlay(3),
    "chunks of two lengths": masking_utils.and_masks(
        masking_utils.chunked_overlay(4, NO_PADDING), masking_utils.chunked_causal_mask_function(3, NO_PADDING)
    ),
    "a part of one": partial(masking_utils.causal_mask_function),
    "no place at all": masking_utils.sliding_window_causal_mask_function(0),
    "nothing": None,
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("tokens", [1, 4, 9, 13])
def test_a_pattern_lets_through_what_its_function_does(name: str, tokens: int) -> None:
    assert torch.equal(seen_in(pattern_of(KNOWN[name]), tokens), seen_by(KNOWN[name], tokens))


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_said_is_refused(name: str) -> None:
    with pytest.raises(AttentionRefused):
        pattern_of(UNKNOWN[name])
    given = as_given(borders_of(np.array([3, 4])), 4)
    with pytest.raises(AttentionRefused):
        mask_of_documents(mask_function=UNKNOWN[name], attention_mask=given, batch_size=1, q_length=7)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("lengths", [[1], [7], [3, 4, 9], [8, 1, 1, 12], [4] * 5])
def test_documents_are_cut_into_chunks(lengths: list[int], fill: bool, chunk: int) -> None:
    total = sum(lengths)
    for spare in (0, 5):  # the number of tokens is known no better where a batch is padded
        given = split_at_chunks(as_given(borders_of(np.array(lengths), fill=fill), max(lengths)), chunk, total + spare)
        borders = given[0, 0, 0, 0]
        pieces = [min(chunk, length - start) for length in lengths for start in range(0, length, chunk)]
        assert borders.dtype is torch.int32 and borders.diff().clamp(min=0).equal(borders.diff())
        assert [each for each in borders.diff().tolist() if each] == pieces
        assert borders[0] == 0 and given.shape[3] >= max(pieces)


class OddMask(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Does not see the place two before, by a mask function of its own."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Any = None, labels: Any = None) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        mask = masking_utils.create_causal_mask(
            self.config, embedded, attention_mask, None, position_ids=position_ids,
            and_mask_function=lambda batch, head, q, k: q - k != 2,
        )  # fmt: skip
        return super().forward(
            inputs_embeds=embedded, attention_mask=mask, position_ids=position_ids, labels=labels, use_cache=False
        )


def test_a_model_that_adds_to_its_mask_is_not_laid_out_in_rows(doubles_stay: None, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = OddMask(made("llama").config).double()
    data = samples(12, "causal", longest=20)
    plain = gradients_of(model, data, tmp_path, speed="off")
    laid = gradients_of(model, data, tmp_path, speed="max")
    assert laid.plan.layout != FLAT
    assert gradient_distance([*plain.gradients.values()], [*laid.gradients.values()]) < 1e-10


def test_flash_attention_that_is_not_told_of_a_window_is_refused() -> None:
    model = MODELS["mixtral"]()
    switch = AttentionSwitch(model)
    model.config._attn_implementation_internal = "flash_attention_2"
    layer = model.model.layers[0].self_attn
    with switch.active():
        assert model.config._attn_implementation == "loopwright_told"
        run = transformers.AttentionInterface()["loopwright_told"]
        q = torch.randn(1, 4, 7, 8)
        mask = mask_of_documents(
            mask_function=masking_utils.sliding_window_causal_mask_function(3), batch_size=1, q_length=7,
            attention_mask=as_given(borders_of(np.array([3, 4])), 4),
        )  # fmt: skip
        run(layer, q, q, q, mask, sliding_window=3)
        with pytest.raises(AttentionRefused, match="not passed to flash attention"):
            run(layer, q, q, q, mask)
    assert model.config._attn_implementation == "flash_attention_2"


# ---- positions -------------------------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> dict[str, Any]:
    rope = model.model.rotary_emb
    return {"inv_freq": rope.inv_freq.clone(), "cached": int(getattr(rope, "max_seq_len_cached", 0))}


@pytest.mark.parametrize(
    ("name", "limit"), [("LongRoPE", 16), ("dynamic NTK", 15), ("mistral", None), ("gemma3", None)]
)
def test_how_long_a_batch_may_be_for_its_positions_to_stay(name: str, limit: int | None) -> None:
    assert longest_alike(MODELS[name]()) == limit


LONGEST = [(12, 40, 12, 16, 15), (40, 12, 12, 40, 17), (12, 12, 12, 12, 12)]


@pytest.mark.parametrize(("order", "name"), spread(LONGEST, ["LongRoPE", "dynamic NTK"]), ids=str)
def test_updates_of_long_samples_among_short_ones_are_those_of_padded_batches(
    name: str, order: tuple[int, ...], doubles_stay: None, tmp_path: Any
) -> None:
    data = [each for seed, longest in enumerate(order) for each in at_most(longest, seed)]
    runs, states = [], []
    for speed in ("off", "max"):
        model = MODELS[name]()
        runs.append(train(model, data, tmp_path, kind=InOrder, speed=speed, max_steps=5, learning_rate=1e-3))
        states.append(state_of(model))
    plain, laid = runs
    assert laid.losses == pytest.approx(plain.losses, rel=1e-10)
    assert gradient_distance([*plain.gradients.values()], [*laid.gradients.values()]) < 1e-10
    assert torch.equal(states[0]["inv_freq"], states[1]["inv_freq"]) and states[0]["cached"] == states[1]["cached"]
    if order[0] < 15:
        assert laid.plan.layout == FLAT, laid.plan.lines()


def at_most(longest: int, seed: int) -> list[dict[str, Any]]:
    """Twelve samples, each micro-batch with one of the longest."""
    made = samples(12, "causal", seed=seed, longest=longest)
    for place in (0, 6):
        ids = torch.arange(5, 5 + longest)
        made[place] = {"input_ids": ids, "labels": ids.clone()}
    return made


# ---- padding masks ---------------------------------------------------------------------------------------------------


DTYPES = (
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
)


@pytest.mark.parametrize(
    ("architecture", "dtype"), spread([("llama", "causal"), ("bert", "class")], DTYPES), ids=str
)
def test_a_padding_mask_may_have_any_dtype(
    architecture: tuple[str, str], dtype: torch.dtype, doubles_stay: None, tmp_path: Any
) -> None:
    kind, task = architecture

    def with_mask(rows: list[dict[str, Any]], dtype: torch.dtype = dtype) -> dict[str, Tensor]:
        batch = collate(rows)
        return {**batch, "attention_mask": batch["attention_mask"].to(dtype)}

    model, data = build(kind, task), samples(12, task, longest=20)
    plain = gradients_of(model, data, tmp_path, speed="off", data_collator=partial(with_mask, dtype=torch.int64))
    laid = gradients_of(model, data, tmp_path, speed="max", data_collator=with_mask)
    assert laid.plan.layout == (FLAT if task == "causal" else UNPADDED), laid.plan.lines()
    assert gradient_distance([*plain.gradients.values()], [*laid.gradients.values()]) < 1e-10


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_which_tokens_are_real_does_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert real_tokens(mask.to(dtype)).tolist() == mask.bool().tolist()


@pytest.mark.parametrize("values", [[0.0, -1e9], [1.0, 0.5], [2.0, 0.0], [float("nan"), 1.0], [-1.0, 1.0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_mask_of_other_numbers_is_no_padding(values: list[float], dtype: torch.dtype) -> None:
    with pytest.raises(NoSamples, match="values other than 0 and 1"):
        real_tokens(torch.tensor([values], dtype=dtype))


def test_batches_with_weights_for_a_mask_stay_as_they_were_made(doubles_stay: None, tmp_path: Any) -> None:
    """Any number but 0 is a token for transformers, so the model runs; what it means is not ours to know."""

    def weighted(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = collate(rows)
        return {**batch, "attention_mask": batch["attention_mask"] * 0.5}

    model, data = build("llama", "causal"), samples(12, "causal", longest=20)
    plain = gradients_of(model, data, tmp_path, speed="off", data_collator=weighted)
    laid = gradients_of(model, data, tmp_path, speed="max", data_collator=weighted)
    assert laid.plan.layout == COLLATED and laid.shapes == plain.shapes
    assert gradient_distance([*plain.gradients.values()], [*laid.gradients.values()]) < 1e-10


# ---- nothing is left behind ------------------------------------------------------------------------------------------


class Broken(Exception):
    pass


def broken(*_: Any) -> None:
    raise Broken


@pytest.mark.parametrize(("kind", "task"), [("llama", "causal"), ("bert", "class")])
def test_a_model_is_left_as_it_was_after_an_error(kind: str, task: str) -> None:
    model = build(kind, task)
    layout = make_layout(FLAT if task == "causal" else UNPADDED, model)
    assert not isinstance(layout, str)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(Broken), layout.active():
        assert model.config._attn_implementation != "sdpa"
        broken()
    with layout.active(), layout.active():
        pass
    assert model.config._attn_implementation == "sdpa"
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


def test_a_forward_somebody_gave_the_encoder_is_used_and_put_back() -> None:
    model, called = build("bert", "class"), []
    encoder = model.bert.encoder
    forward = encoder.forward

    @wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        called.append(args[0].shape[0])
        return forward(*args, **kwargs)

    encoder.forward = watched
    layout = make_layout(UNPADDED, model)
    assert not isinstance(layout, str)
    data = samples(4, "class", longest=20)
    laid = layout.lay(take_apart([collate(data)], is_pair=False), Limits(1 << 30, 0), shifts=False, fill=False)
    with layout.active():
        model(**layout.for_model(laid.batches[0]))
    assert called == [1] and encoder.forward is watched
