"""Sources and targets in rows without padding: the same updates as padded pairs, for models with a bias by distance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loopwright.speed.attention import pairs
from loopwright.speed.attention.varlen import MOST_DOCUMENTS, TILE, by_distance
from loopwright.speed.layouts.candidates import Layout, make_layout
from loopwright.speed.layouts.rows import Limits, lay_pairs
from loopwright.speed.layouts.samples import take_apart
from loopwright.speed.planner.decision import GROUPED, PAIRED
from tests.speed.architectures import build, collate, samples
from tests.speed.training import gradients_of, off_and_max, train

pytest.importorskip("transformers")
DATA = samples(36, "pair", longest=24)


def t5(**more: Any) -> Any:
    return build("t5", "pair", layers=2, **more)


def with_decoder_inputs(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """As transformers' collator for pairs makes batches if it is given the model."""
    batch = collate(rows)
    batch["decoder_input_ids"] = t5().prepare_decoder_input_ids_from_labels(batch["labels"])
    return batch


def left_padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = collate(rows)
    for name in ("input_ids", "attention_mask"):
        lengths = [len(row["input_ids"]) for row in rows]
        batch[name] = torch.stack([row.roll(len(row) - n) for row, n in zip(batch[name], lengths, strict=True)])
    return batch


def without_some_targets(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = collate(rows)
    batch["labels"][:, 0] = -100
    return batch


@pytest.mark.parametrize("collator", [collate, with_decoder_inputs, left_padded, without_some_targets])
def test_updates_are_those_of_padded_pairs(collator: Any, tmp_path: Path) -> None:
    fast = off_and_max(t5, DATA, tmp_path, data_collator=collator)
    assert fast.plan.layout == PAIRED, fast.plan.lines()
    assert all(shape[0] == 1 for update in fast.shapes for shape in update)


def test_rows_with_fillers_give_the_same_gradients() -> None:
    model, batch = t5(), collate(DATA[:9])
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(**batch).loss, parameters)
    layout = make_layout(PAIRED, model)
    assert isinstance(layout, Layout)
    laid = layout.lay(take_apart([batch], is_pair=True), Limits(1 << 20, 0), shifts=False, fill=True)
    (row,) = laid.batches
    assert row["input_ids"].shape[1] % 64 == row["labels"].shape[1] % 64 == 0
    with layout.active():
        found = torch.autograd.grad(model(**layout.for_model(row)).loss, parameters)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_the_model_is_left_as_it_was() -> None:
    model = t5()
    parts = [module for module in model.modules() if hasattr(module, "has_relative_attention_bias")]
    before = [module.has_relative_attention_bias for module in parts]
    layout = make_layout(PAIRED, model)
    assert isinstance(layout, Layout)
    with layout.active():
        assert model.config._attn_implementation == pairs.NAME
        assert all(module.has_relative_attention_bias for module in parts)
    assert [module.has_relative_attention_bias for module in parts] == before
    assert not any("compute_bias" in module.__dict__ or "forward" in module.__dict__ for module in model.modules())
    assert model.config._attn_implementation == "sdpa"


def test_a_resumed_run_with_dropout_ends_with_the_same_weights(tmp_path: Path) -> None:
    options = {"max_steps": 4, "speed": "max", "learning_rate": 0.05, "save_strategy": "steps", "save_steps": 2}
    options["lr_scheduler_type"] = "constant"
    whole = train(t5(dropout_rate=0.1), DATA, tmp_path / "a", **options)
    train(t5(dropout_rate=0.1), DATA, tmp_path / "b", **{**options, "max_steps": 2})
    resumed = train(t5(dropout_rate=0.1), DATA, tmp_path / "b", resume=True, **options)
    assert whole.plan.layout == resumed.plan.layout == PAIRED
    pairs_of_weights = zip(whole.trainer.model.parameters(), resumed.trainer.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs_of_weights)


def test_longer_samples_than_those_of_the_first_update_are_covered(tmp_path: Path) -> None:
    data = sorted(DATA, key=lambda sample: len(sample["input_ids"]) + len(sample["labels"]))
    from tests.speed.training import InOrder

    run = train(t5(), data, tmp_path, kind=InOrder, speed="max", max_steps=3, learning_rate=0.05)
    verification = run.trainer._loopwright.run.speed._verification
    assert run.plan.layout == PAIRED
    assert verification.left == 0
    assert verification.updates == 3


def wrong_documents(*args: Any, **kwargs: Any) -> Any:
    """Cross-attention in which every target sees the first source too."""
    query, key, value, queries, keys, ask = args
    if keys is not queries:
        keys = keys.clone()
        keys[1] = keys[2]
    return right(*args[:4], keys, ask, **kwargs)


def wrong_bias(*args: Any, bias: Any = None) -> Any:
    return right(*args, bias=None if bias is None else bias.roll(1, 1))


def no_gradient_of_bias(*args: Any, bias: Any = None) -> Any:
    return right(*args, bias=None if bias is None else bias.detach())


right = pairs.each_document


@pytest.mark.parametrize("planted", [wrong_documents, wrong_bias, no_gradient_of_bias])
def test_wrong_attention_is_refused(planted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "each_document", planted)
    run = gradients_of(t5(), DATA, tmp_path, speed="max")
    assert run.plan.layout == GROUPED
    refusal = next(choice for choice in run.plan.choices if choice.name == PAIRED)
    assert not refusal.is_on and refusal.reason


def test_targets_shifted_across_documents_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from loopwright.speed.layouts import candidates

    plain = candidates.lay_pairs

    def shifted(*args: Any, **kwargs: Any) -> Any:
        laid = plain(*args, **kwargs)
        for batch in laid.batches:
            batch["decoder_input_ids"][:, 1:] = batch["labels"][:, :-1].clamp(min=0)
        return laid

    monkeypatch.setattr(candidates, "lay_pairs", shifted)
    assert gradients_of(t5(), DATA, tmp_path, speed="max").plan.layout == GROUPED


def test_a_bias_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    model = t5()
    first = model.encoder.block[0].layer[0].SelfAttention
    own = type(first).compute_bias
    first.compute_bias = lambda *args, **kwargs: 2 * own(first, *args, **kwargs)
    run = gradients_of(model, DATA, tmp_path, speed="max")
    assert run.plan.layout == GROUPED
    reason = next(choice.reason for choice in run.plan.choices if choice.name == PAIRED)
    assert "not one for every distance" in reason


@pytest.mark.parametrize(("kind", "task"), [("m2m_100", "pair"), ("llama", "causal")])
def test_models_whose_positions_cannot_be_chosen_are_left_alone(kind: str, task: str) -> None:
    assert "not known where the model computes positions" in str(make_layout(PAIRED, build(kind, task)))


def test_rows_of_sources_and_of_targets_never_have_the_same_length() -> None:
    """Cross-attention is recognized by its two lengths."""
    model = build("bart", "pair", layers=2)
    data = [{"input_ids": torch.arange(5, 5 + n), "labels": torch.arange(6, 6 + n)} for n in (3, 4, 9)]
    batch, layout = collate(data), make_layout(PAIRED, model)
    assert isinstance(layout, Layout)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(**batch).loss, parameters)
    for fill in (False, True):
        laid = layout.lay(take_apart([batch], is_pair=True), Limits(1 << 20, 0), shifts=False, fill=fill)
        (row,) = laid.batches
        assert row["input_ids"].shape[1] != row["labels"].shape[1]
        with layout.active():
            found = torch.autograd.grad(model(**layout.for_model(row)).loss, parameters)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_labels_are_kept_if_the_model_writes_to_those_it_is_given(tmp_path: Path) -> None:
    def writing() -> Any:
        model = t5()

        def shifted(labels: Tensor) -> Tensor:
            return model._shift_right(labels.masked_fill_(labels == -100, 0))  # type: ignore[no-any-return]

        model.prepare_decoder_input_ids_from_labels = shifted
        return model

    options = {"data_collator": without_some_targets, "gradient_accumulation_steps": 1}
    assert off_and_max(writing, DATA, tmp_path, **options).plan.layout == PAIRED


@pytest.mark.parametrize("fill", [False, True])
def test_rows_have_no_more_documents_than_kernels_support(fill: bool) -> None:
    """Later updates may have more and shorter samples than those that were compared."""
    ids = torch.full((9000, 1), 5)
    pair = take_apart([{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}], is_pair=True)
    laid = lay_pairs(pair, Limits(1 << 20, 0), shift=lambda labels: labels, fill=fill)
    assert sum(batch["labels"].ne(-100).sum() for batch in laid.batches) == 9000
    assert np.array_equal(np.concatenate(laid.members), np.arange(9000))
    assert len(laid.batches) == 3
    for batch in laid.batches:
        keys, queries = pairs.as_given(batch["_borders"], batch["_target_borders"]).flatten().chunk(2)
        assert max(keys.numel(), queries.numel()) - 1 <= MOST_DOCUMENTS


def test_wrong_positions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from loopwright.speed.layouts import candidates, rows

    plain = rows.Side
    monkeypatch.setattr(candidates, "Side", lambda borders, longest, places: plain(borders, longest, 0 * places))
    run = gradients_of(build("bart", "pair"), DATA, tmp_path, speed="max")
    assert run.plan.layout == GROUPED


def test_evaluation_keeps_its_layouts(tmp_path: Path) -> None:
    run = train(t5(), DATA, tmp_path, speed="max", given={"eval_dataset": DATA[:12]})
    assert run.plan.layout == PAIRED
    assert run.trainer.evaluate()["eval_loss"] > 0
    used = [choice["name"] for choice in run.trainer.speed_report().as_dict()["choices"] if choice["on"]]
    assert [name for name in used if PAIRED in name] == [PAIRED]


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_a_bias_are_sums_over_the_diagonals_of_scores(causal: bool) -> None:
    """Tiles of one document of 130 tokens, whose scores have these gradients."""
    blocks = 3
    scores = torch.randn(2, 130, 130, dtype=torch.float64)
    whole = torch.zeros(2, blocks * TILE, blocks * TILE, dtype=torch.float64)
    whole[:, :130, :130] = scores.tril() if causal else scores
    offsets = range(1 - blocks, 1 if causal else blocks)
    tiles = torch.stack([_sum_of_tiles(whole, offset, blocks) for offset in offsets], dim=1)
    found = by_distance(tiles.expand(1, -1, -1, -1, -1), 2 * blocks * TILE - 1)
    expected = torch.zeros_like(found)
    for distance in range(-129, 130):
        expected[:, distance + blocks * TILE - 1] = whole.diagonal(distance, 1, 2).sum(-1)
    torch.testing.assert_close(found, expected)


def _sum_of_tiles(whole: Tensor, offset: int, blocks: int) -> Tensor:
    tiled = whole.unflatten(1, (blocks, TILE)).unflatten(3, (blocks, TILE)).permute(0, 1, 3, 2, 4)
    rows = np.arange(max(0, -offset), min(blocks, blocks - offset))
    return tiled[:, rows, rows + offset].sum(1)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_predictions_are_the_same_with_inputs_of_the_decoder(kind: str, tmp_path: Path) -> None:
    found = []
    for speed in ("off", "max"):
        model = build(kind, "pair", layers=2)

        def collator(rows: list[dict[str, Any]], model: Any = model) -> dict[str, Tensor]:
            batch = collate(rows)
            return {**batch, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"])}

        run = train(model, DATA, tmp_path / speed, speed=speed, learning_rate=0.0, data_collator=collator)
        found.append(run.trainer.predict(DATA[:15]))
        assert run.plan.layout == (PAIRED if speed == "max" else "collated")
    plain, fast = found
    assert fast.metrics["test_loss"] == pytest.approx(plain.metrics["test_loss"], rel=1e-9)
    assert (fast.label_ids == plain.label_ids).all()
    logits = [each.predictions[0] if isinstance(each.predictions, tuple) else each.predictions for each in found]
    real = plain.label_ids != -100
    np.testing.assert_allclose(logits[1][real], logits[0][real], rtol=1e-5, atol=1e-6)
