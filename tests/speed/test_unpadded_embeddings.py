"""Embeddings of an unpadded encoder: real tokens only where that changes no number, padded otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from loopwright.speed.layouts.candidates import Unpadded, make_layout  # noqa: E402
from loopwright.speed.layouts.rows import Limits, lay_unpadded  # noqa: E402
from loopwright.speed.layouts.samples import take_apart  # noqa: E402

LENGTHS = [7, 2, 5]
SIZE = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 16,
}  # fmt: skip


def classifier(kind: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.AutoConfig.for_model(kind, **{**SIZE, **off, **more})
    return transformers.AutoModelForSequenceClassification.from_config(config).double().train()


def padded(*, on_left: bool = False, types: bool = False) -> dict[str, Tensor]:
    width = max(LENGTHS)
    ids, mask = torch.randint(3, 40, (len(LENGTHS), width)), torch.zeros(len(LENGTHS), width, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        mask[row, width - length if on_left else 0 : width if on_left else length] = 1
    batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.tensor([0, 1, 0])}
    return {**batch, "token_type_ids": mask * (ids % 2)} if types else batch


def embedded_tokens(model: nn.Module, run: Any) -> int:
    """Tokens that the embeddings look up while something runs."""
    tokens: list[int] = []
    handle = model.get_input_embeddings().register_forward_pre_hook(lambda module, args: tokens.append(args[0].numel()))
    run()
    handle.remove()
    return tokens[-1]


def unpadded(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Unpadded, dict[str, Any]]:
    layout = make_layout("unpadded", model)
    assert isinstance(layout, Unpadded)
    (laid,) = lay_unpadded(take_apart([batch], is_pair=False), Limits(10_000, 0), fill=False).batches
    return layout, laid


def loss_and_gradients(model: nn.Module, batch: dict[str, Any], layout: Unpadded | None = None) -> list[Tensor]:
    model.zero_grad()
    if layout is None:
        loss = model(**batch).loss
        loss.backward()
    else:
        with layout.active():
            loss = model(**layout.for_model(batch)).loss
            loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("types", [False, True])
@pytest.mark.parametrize("kind", ["bert", "electra"])
def test_real_tokens_are_embedded_and_nothing_else_changes(kind: str, types: bool) -> None:
    model, batch = classifier(kind), padded(types=types)
    expected = loss_and_gradients(model, batch)
    layout, laid = unpadded(model, batch)
    for _ in range(2):  # the first batch also shows that the numbers are the same
        found: list[Tensor] = []
        tokens = embedded_tokens(model, lambda into=found: into.extend(loss_and_gradients(model, laid, layout)))
        assert tokens == sum(LENGTHS)
        for left, right in zip(expected, found, strict=True):
            torch.testing.assert_close(right, left, rtol=1e-9, atol=1e-12)
    assert embedded_tokens(model, lambda: loss_and_gradients(model, batch)) == len(LENGTHS) * max(LENGTHS)


@pytest.mark.parametrize("on_left", [False, True])
def test_positions_are_those_of_the_padded_batch(on_left: bool) -> None:
    model, batch = classifier("bert"), padded(on_left=on_left)
    embeddings, real = model.bert.embeddings, batch["attention_mask"] > 0
    expected = embeddings(batch["input_ids"])[real]
    layout, laid = unpadded(model, batch)
    with layout.active():
        layout.for_model(laid)
        assert torch.equal(embeddings(laid["input_ids"]), expected.unsqueeze(0))


def test_embeddings_that_count_positions_themselves_stay_padded() -> None:
    model, batch = classifier("roberta", max_position_embeddings=20, pad_token_id=0), padded()
    expected = loss_and_gradients(model, batch)
    layout, laid = unpadded(model, batch)
    found: list[Tensor] = []
    for _ in range(2):
        tokens = embedded_tokens(model, lambda: found.__setitem__(slice(None), loss_and_gradients(model, laid, layout)))
    assert tokens == len(LENGTHS) * max(LENGTHS)
    for left, right in zip(expected, found, strict=True):
        torch.testing.assert_close(right, left, rtol=1e-9, atol=1e-12)


def test_embeddings_that_look_at_their_neighbours_stay_padded() -> None:
    model, batch = classifier("bert"), padded()
    inner = model.bert.embeddings.forward

    def blurred(input_ids: Any = None, token_type_ids: Any = None, position_ids: Any = None) -> Tensor:
        hidden = inner(input_ids, token_type_ids, position_ids)
        return hidden + 0.1 * hidden.roll(1, dims=1)

    model.bert.embeddings.forward = blurred
    layout, _ = unpadded(model, batch)
    embeddings, places = layout._encoder._embeddings, batch["attention_mask"].flatten().nonzero()[:, 0]
    assert embeddings is not None
    with layout.active():
        layout._encoder.places = places
        assert model.bert.embeddings(batch["input_ids"]).shape[:2] == (len(LENGTHS), max(LENGTHS))
    assert embeddings._is_same is False
    assert model.bert.embeddings.forward is blurred, "what was set before is there again"


SEPARATOR = 2
"""A token that the first batches do not have."""


BertEmbeddings = transformers.models.bert.modeling_bert.BertEmbeddings
OF_LIBRARY = BertEmbeddings.forward


class Segments(BertEmbeddings):
    """Counts segments by their separators."""

    def forward(
        self, input_ids: Any = None, token_type_ids: Any = None, position_ids: Any = None, inputs_embeds: Any = None,
        past_key_values_length: int = 0,
    ) -> Tensor:  # fmt: skip
        return OF_LIBRARY(self, input_ids, (input_ids == SEPARATOR).cumsum(1).clamp(max=1), position_ids)


class Marked(nn.Embedding):
    """Adds the first token of a row to all others where the row has a separator."""

    def forward(self, input: Tensor) -> Tensor:
        found = super().forward(input)
        return found + found[:, :1] * (input == SEPARATOR).any(1)[:, None, None]


@pytest.mark.parametrize("how", ["class", "inner class", "function of the class"])
def test_embeddings_with_code_of_the_user_stay_padded(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the first batch shows that they look at other tokens."""
    model, batch = classifier("bert"), padded()
    if how == "class":
        model.bert.embeddings.__class__ = Segments
    elif how == "inner class":
        model.bert.embeddings.word_embeddings.__class__ = Marked
    else:
        monkeypatch.setattr(BertEmbeddings, "forward", Segments.forward)
    layout, laid = unpadded(model, batch)
    loss_and_gradients(model, laid, layout)
    batch["input_ids"][1, 1] = SEPARATOR
    _, laid = unpadded(model, batch)
    expected, found = loss_and_gradients(model, batch), loss_and_gradients(model, laid, layout)
    for left, right in zip(expected, found, strict=True):
        torch.testing.assert_close(right, left, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("inner", [False, True])
def test_embeddings_that_are_changed_later_are_looked_at_again(inner: bool) -> None:
    model, batch = classifier("bert"), padded()
    layout, laid = unpadded(model, batch)
    loss_and_gradients(model, laid, layout)
    changed = model.bert.embeddings.word_embeddings if inner else model.bert.embeddings
    before = changed.forward

    def blurred(*args: Any, **kwargs: Any) -> Tensor:
        hidden = before(*args, **kwargs)
        return torch.cat([hidden[:, :1], hidden[:, 1:] + 0.1 * hidden[:, :-1]], dim=1)

    changed.forward = blurred
    expected, found = loss_and_gradients(model, batch), loss_and_gradients(model, laid, layout)
    for left, right in zip(expected, found, strict=True):
        torch.testing.assert_close(right, left, rtol=1e-9, atol=1e-12)


def test_looking_draws_no_random_numbers() -> None:
    model, batch = classifier("bert", hidden_dropout_prob=0.5), padded()
    layout, laid = unpadded(model, batch)
    draws = []
    for _ in range(2):  # only the first batch is looked at
        torch.manual_seed(1)
        loss_and_gradients(model, laid, layout)
        draws.append(torch.get_rng_state())
    assert torch.equal(*draws)
    assert layout._encoder._embeddings is not None and layout._encoder._embeddings._is_same
