"""Taking batches apart and laying samples out: every token once, nothing invented, nothing over budget."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from loopwright.speed.attention.document_mask import as_mask, borders_in, borders_of, is_documents, longest_in
from loopwright.speed.layouts.cutting import cut_by_length, padded_size, split_evenly, split_into_rows
from loopwright.speed.layouts.rows import (
    BORDERS,
    LONGEST,
    PLACES,
    Limits,
    filling,
    lay_flat,
    lay_grouped,
    lay_unpadded,
)
from loopwright.speed.layouts.samples import NoSamples, Samples, few_of, take_apart

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=24)


def batches_of(lengths: list[int], size: int, *, left: bool = False, pad: int = 0) -> list[dict[str, torch.Tensor]]:
    """Collated batches in which every token has an id of its own."""
    made, first = [], 1
    for start in range(0, len(lengths), size):
        part = lengths[start : start + size]
        width = max(part)
        ids = torch.full((len(part), width), pad)
        mask = torch.zeros(len(part), width, dtype=torch.long)
        for row, length in enumerate(part):
            place = slice(width - length, width) if left else slice(0, length)
            ids[row, place] = torch.arange(first, first + length)
            mask[row, place] = 1
            first += length
        made.append({"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)})
    return made


def tokens_of(batches: list[dict[str, Any]]) -> list[int]:
    return sorted(int(token) for batch in batches for token in batch["labels"].flatten() if token != -100)


def apart(lengths: list[int], size: int, **how: Any) -> Samples:
    return take_apart(batches_of(lengths, size, **how), is_pair=False)


@given(LENGTHS, st.integers(1, 8), st.booleans())
def test_samples_are_what_was_collated(lengths: list[int], size: int, left: bool) -> None:
    samples = apart(lengths, size, left=left, pad=7_000)
    assert samples.axes["source"].lengths.tolist() == lengths
    first = 1
    for row, length in enumerate(lengths):
        axis = samples.axes["source"]
        ids = samples.tensors["input_ids"][row]
        assert ids[axis.starts[row] : axis.ends[row]].tolist() == list(range(first, first + length))
        rest = torch.cat([ids[: axis.starts[row]], ids[axis.ends[row] :]])
        assert set(rest.tolist()) <= {0, 7_000}, "padding is what the collator used"
        first += length


@given(LENGTHS, st.integers(1, 8), st.booleans(), st.integers(0, 50), st.integers(1, 200))
def test_grouping_keeps_every_token_once(lengths: list[int], size: int, left: bool, overhead: int, budget: int) -> None:
    laid = lay_grouped(apart(lengths, size, left=left), Limits(budget, overhead))
    assert tokens_of(laid.batches) == list(range(1, sum(lengths) + 1))
    assert laid.computed_tokens == sum(batch["input_ids"].numel() for batch in laid.batches)
    for batch in laid.batches:
        assert batch["input_ids"].numel() <= budget or len(batch["input_ids"]) == 1
        assert batch["attention_mask"].any(0).all(), "no column is padding only"
        firsts = [int(row[row != 0][0]) for row in batch["labels"].clamp_min(0)]
        assert firsts == sorted(firsts), "the order of samples is kept within a group"


@given(LENGTHS, st.integers(1, 8), st.booleans(), st.integers(1, 200), st.booleans(), st.booleans())
def test_rows_hold_every_token_once(
    lengths: list[int], size: int, left: bool, budget: int, shifts: bool, fill: bool
) -> None:
    laid = lay_flat(apart(lengths, size, left=left), Limits(budget, 0), shifts=shifts, fill=fill)
    ids = [int(token) for batch in laid.batches for token in batch["input_ids"][0] if token]
    assert ids == list(range(1, sum(lengths) + 1)), "in order, each once"
    starts = set((np.cumsum([0, *lengths[:-1]]) + 1).tolist())
    labels = tokens_of(laid.batches)
    assert labels == [token for token in ids if not (shifts and token in starts)]
    for batch in laid.batches:
        borders = batch[BORDERS].tolist()
        assert borders[0] == 0 and borders[-1] == batch["input_ids"].shape[1]
        documents = [end - begin for begin, end in zip(borders, borders[1:], strict=False) if end > begin]
        assert max(documents) <= batch[LONGEST]
        real = int((batch["input_ids"] != 0).sum())
        places = [place for length in documents for place in range(length)][:real]
        assert batch["position_ids"][0].tolist() == places + [0] * (borders[-1] - real), "no more than samples have"


@given(LENGTHS, st.integers(1, 8), st.integers(1, 200))
def test_an_unpadded_batch_knows_its_real_tokens(lengths: list[int], size: int, budget: int) -> None:
    laid = lay_unpadded(apart(lengths, size), Limits(budget, 0), fill=False)
    real = [int(token) for batch in laid.batches for token in batch["input_ids"].flatten()[batch[PLACES]]]
    assert real == list(range(1, sum(lengths) + 1))
    assert laid.computed_tokens == sum(lengths)


@given(LENGTHS, st.integers(0, 60), st.integers(1, 120), st.integers(0, 90))
def test_no_other_cut_of_the_sorted_samples_is_cheaper(
    lengths: list[int], overhead: int, budget: int, floor: int
) -> None:
    lengths = sorted(lengths)[:9]
    table = np.array(lengths)[:, None]

    def cost(groups: list[np.ndarray]) -> float:
        sizes = [padded_size(table, group) for group in groups]
        too_large = any(size > budget and len(group) > 1 for size, group in zip(sizes, groups, strict=True))
        return float("inf") if too_large else sum(max(size, floor) + overhead for size in sizes)

    found = cost(cut_by_length(table, overhead=overhead, budget=budget, floor=floor))
    for cuts in range(2 ** (len(lengths) - 1)):
        ends = [i + 1 for i in range(len(lengths) - 1) if cuts >> i & 1]
        other = cost(np.split(np.arange(len(lengths)), ends))
        assert found <= other


@given(LENGTHS, st.integers(1, 300), st.sampled_from([split_into_rows, split_evenly]))
def test_rows_are_neighbours_and_within_budget(lengths: list[int], budget: int, split: Any) -> None:
    rows = split(np.array(lengths), budget=budget)
    assert np.concatenate(rows).tolist() == list(range(len(lengths)))
    for row in rows:
        assert np.array(lengths)[row].sum() <= budget or len(row) == 1


def test_pairs_are_grouped_by_both_lengths() -> None:
    source = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    target = torch.tensor([[5, -100], [5, 6], [5, -100]])
    batch = {"input_ids": source * 9, "attention_mask": source, "labels": target}
    samples = take_apart([batch], is_pair=True)
    assert samples.axes["source"].lengths.tolist() == [3, 1, 4] and samples.axes["target"].lengths.tolist() == [1, 2, 1]
    laid = lay_grouped(samples, Limits(budget=100, overhead=0))
    assert sorted(tuple(each["labels"].shape) for each in laid.batches) == [(1, 1), (1, 1), (1, 2)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}, "gaps"),
        ({"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])}, "no tokens"),
        ({"attention_mask": torch.tensor([[0, 1, 0], [1, 1, 1]])}, "both sides"),
        ({"attention_mask": torch.ones(2, 1, 3, 3)}, "no attention_mask of shape"),
        ({"extra": torch.ones(3)}, "one row per sample"),
        ({"extra": torch.ones(2, 1, 3)}, "dimension other than the second"),
        ({"extra": ["text", "text"]}, "is a list"),
        ({"extra": torch.ones(())}, "one row per sample"),
    ],
)
def test_what_cannot_be_taken_apart_says_why(change: dict[str, Any], reason: str) -> None:
    batch = {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(2, 3).long(), **change}
    with pytest.raises(NoSamples, match=reason):
        take_apart([batch], is_pair=False)


@pytest.mark.parametrize("batches", [[torch.ones(2)], [{"x": 1}], [{"pixels": torch.ones(2, 3, 4, 4)}]])
def test_batches_without_tokens_stay_as_they_are(batches: list[Any]) -> None:
    with pytest.raises(NoSamples):
        take_apart(batches, is_pair=False)


def test_without_a_mask_tokens_after_the_last_target_are_padding_for_causal_models_only() -> None:
    batch = {"input_ids": torch.ones(1, 6).long(), "labels": torch.tensor([[-100, 4, -100, 5, -100, -100]])}
    assert take_apart([batch], is_pair=False, counts_trailing=False).axes["source"].lengths.tolist() == [4]
    assert take_apart([batch], is_pair=False).axes["source"].lengths.tolist() == [6]


@given(st.lists(st.integers(1, 900), min_size=2, max_size=12))
def test_a_few_samples_are_short_and_of_different_lengths(lengths: list[int]) -> None:
    few = few_of(apart(lengths, len(lengths)), 4, 256)
    found = few.axes["source"].lengths
    assert 2 <= len(few) <= 4 and found.max() <= 256 and found[0] == found.max()
    if len(set(lengths)) > 1 and max(lengths) > 2 * min(lengths):
        assert len(set(found.tolist())) > 1
    mask = few.tensors["attention_mask"]
    assert (few.tensors["labels"][mask == 0] == -100).all()


def test_documents_survive_as_a_mask() -> None:
    borders = borders_of(np.array([3, 2]))
    mask = as_mask(borders, 3)
    assert is_documents(mask) and longest_in(mask) == 3 and borders_in(mask).tolist() == [0, 3, 5]
    assert mask.untyped_storage().nbytes() == borders.untyped_storage().nbytes(), "it takes no memory"
    assert not is_documents(torch.ones(2, 3)) and not is_documents(None)


@given(st.integers(1, 100_000))
def test_filling_costs_little(tokens: int) -> None:
    assert -tokens % filling(tokens) <= max(64, tokens / 31)


@given(LENGTHS, st.integers(1, 5), st.booleans(), st.integers(0, 30))
def test_rows_of_a_few_lengths_hold_every_token_once(lengths: list[int], size: int, flat: bool, wider: int) -> None:
    samples = apart(lengths, size)
    limits = Limits(10_000, 0, few_shapes=True, width=max(lengths) + wider)
    lay = partial(lay_flat, shifts=False) if flat else lay_unpadded
    (batch,) = lay(samples, limits, fill=True).batches
    total, borders = sum(lengths), batch[BORDERS]
    row = batch["input_ids"][0] if flat else batch[PLACES]
    assert len(row) == -(-total // filling(total, 8)) * filling(total, 8) and len(row) <= total + max(64, total / 7)
    assert torch.diff(borders)[: len(lengths)].tolist() == lengths and borders[-1] == len(row)
    assert len(borders) % 64 == 1 and batch[LONGEST] >= int(torch.diff(borders).max())
    if flat:
        assert (batch["labels"][0, total:] == -100).all()
        return
    ids, mask = batch["input_ids"], batch["attention_mask"]
    width = max(lengths) + (0 if samples.tensors["attention_mask"].all() else wider)  # as far as padding is known
    assert ids.shape == mask.shape == batch["labels"].shape == (len(lengths), width)
    assert torch.equal(ids.flatten()[row[:total]], samples.tensors["input_ids"][samples.tensors["attention_mask"] > 0])
    assert (row[total:] == ids.numel()).all(), "behind the last place of the batch"
    assert (batch["labels"][mask == 0] == -100).all()
    if samples.tensors["attention_mask"].shape[1] > min(lengths):  # the collator has padded
        assert len(ids[mask == 0].unique()) <= 1
