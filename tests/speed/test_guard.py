"""Only padding is removed, and inputs that no proof covers are detected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from loopwright.speed.layouts.samples import OddSamples, Samples
from loopwright.speed.proof.guard import Coverage, Seen, image_tokens_of, samples_of


def padded(lengths: list[int], *, side: str = "right", pad: int = 0, **more: Any) -> dict[str, Tensor]:
    width = max(lengths)
    ids, mask, labels = (torch.full((len(lengths), width), value) for value in (pad, 0, -100))
    for row, length in enumerate(lengths):
        place = slice(0, length) if side == "right" else slice(width - length, width)
        ids[row, place] = 5 + torch.arange(length)
        mask[row, place] = 1
        labels[row, place] = 5 + torch.arange(length)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **more}


def taken(*batches: dict[str, Any], whole: set[str] | None = None, images: tuple[int, ...] = ()) -> Samples:
    return samples_of(batches, is_pair=False, shifts=True, whole=whole or set(), image_tokens=images)


def test_padding_of_each_tensor_is_known() -> None:
    assert taken(padded([3, 7, 5], pad=9)).paddings == {"input_ids": 9, "attention_mask": 0, "labels": -100}
    assert taken(padded([4, 4])).paddings == {}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.sampled_from(["right", "left"]), st.data())
def test_one_other_value_in_the_padding_is_noticed(lengths: list[int], side: str, data: Any) -> None:
    batch = padded(lengths, side=side)
    outside = (batch["attention_mask"] == 0).nonzero().tolist()
    if len(outside) < 2:
        return
    row, place = data.draw(st.sampled_from(outside))
    name = data.draw(st.sampled_from(["input_ids", "labels"]))
    batch[name][row, place] = 7
    with pytest.raises(OddSamples, match=name):
        taken(batch)


def test_targets_in_the_padding_are_not_cut_away_even_if_all_are_alike() -> None:
    batch = padded([3, 5])
    batch["labels"][batch["attention_mask"] == 0] = 1
    with pytest.raises(OddSamples, match="targets in the padding"):
        taken(batch)


def test_a_second_text_that_is_as_wide_by_chance_is_left_whole() -> None:
    batch = padded([3, 6], second=torch.arange(12).view(2, 6) + 1)
    samples = taken(batch)
    assert "second" in samples.per_sample() and samples.trimmed()["second"].shape == (2, 6)


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (2, 3)])
def test_images_are_cut_up_only_when_each_sample_has_as_many(shape: tuple[int, ...]) -> None:
    batch = padded([4, 6], pixel_values=torch.zeros(shape))
    with pytest.raises(OddSamples, match="pixel_values"):
        taken(batch)
    with pytest.raises(OddSamples, match="pixel_values"):  # two images, both of the second sample
        other = dict(batch)
        other["input_ids"] = batch["input_ids"].clone()
        other["input_ids"][0, 0], other["input_ids"][1, :2] = 77, 77
        other["input_ids"][0, 0] = 5
        taken(other, images=(77,))
    batch["input_ids"][:, 0] = 77
    assert "pixel_values" in taken(batch, images=(77,)).per_sample()


def test_tokens_that_stand_for_images_are_found_in_a_configuration() -> None:
    config = type("Config", (), {})()
    config.image_token_id, config.video_token_index, config.pad_token_id, config.image_size = 7, 8, 0, 224
    assert image_tokens_of(config) == (7, 8) and image_tokens_of(None) == ()


def seen(*batches: dict[str, Any], row: int = 0) -> Seen:
    return Seen.of(taken(*batches), row=row)


CHANGES: dict[str, Any] = {
    "is new": lambda: padded([3, 6], weight=torch.ones(2)),
    "has a different form": lambda: {**padded([3, 6]), "attention_mask": padded([3, 6])["attention_mask"].bool()},
    "shared by all samples": lambda: padded([3, 6], use_cache=False),
    "is padded with 9": lambda: padded([3, 6], pad=9),
    "on the left": lambda: padded([3, 6], side="left"),
    "more than the 6": lambda: padded([3, 7]),
    "fewer than the 3": lambda: padded([2, 6]),
}


@pytest.mark.parametrize("news", CHANGES)
def test_what_no_proof_has_seen_is_news(news: str) -> None:
    coverage = Coverage()
    assert coverage.news_in(seen(padded([3, 6]))) is not None
    coverage.add(seen(padded([3, 6])))
    assert coverage.news_in(seen(padded([4, 6, 5]))) is None
    found = coverage.news_in(seen(CHANGES[news]()))
    assert found is not None and news in found
    coverage.add(seen(CHANGES[news]()))
    assert coverage.news_in(seen(CHANGES[news]())) is None and coverage.news_in(seen(padded([3, 6]))) is None


def test_samples_of_other_lengths_are_news_after_equal_ones() -> None:
    coverage = Coverage()
    even = seen(padded([4, 4]))
    even.cover({"source": 2}, {"source": 9}, {"source": 4})
    assert (even.shortest, even.longest, even.stretched) == ({"source": 2}, {"source": 8}, {"source": 9})
    coverage.add(even)
    assert coverage.news_in(seen(padded([4, 5]))) == "samples are padded on the right"
    even.sides = ["right"]
    assert coverage.news_in(seen(padded([4, 5]))) == "samples have different lengths"


def test_longer_rows_and_first_targets_are_news() -> None:
    silent = padded([3, 6])
    silent["labels"][:, 0] = -100
    coverage = Coverage()
    coverage.add(seen(silent, row=9))
    assert "counts in 'labels' is number 1" in (coverage.news_in(seen(padded([3, 6]), row=9)) or "")
    assert "a row has 10 tokens" in (coverage.news_in(seen(silent, row=10)) or "")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.bfloat16])
def test_the_first_tokens_that_masks_and_weights_count_are_news(dtype: torch.dtype) -> None:
    def masked(first: int, lengths: list[int]) -> dict[str, Any]:
        batch = padded(lengths)
        return {**batch, "loss_mask": ((torch.arange(max(lengths)) >= first) * batch["attention_mask"]).to(dtype)}

    coverage = Coverage()
    coverage.add(seen(masked(3, [5, 9])))
    assert coverage.news_in(seen(masked(3, [6, 8]))) is None and coverage.news_in(seen(masked(4, [6, 8]))) is None
    assert "counts in 'loss_mask' is number 3" in (coverage.news_in(seen(masked(2, [6, 8]))) or "")
    coverage.add(seen(masked(0, [6, 8])))
    assert coverage.news_in(seen(masked(2, [6, 8]))) is None


def test_samples_without_targets_are_news() -> None:
    coverage, some = Coverage(), padded([3, 6, 5])
    some["labels"][1] = -100
    coverage.add(seen(padded([3, 6])))
    assert coverage.news_in(seen(some)) == "a sample has no targets"
    coverage.add(seen(some))
    assert coverage.news_in(seen(some)) is None


def test_coverage_comes_back_from_a_checkpoint() -> None:
    import json

    coverage, other = Coverage(), Coverage()
    coverage.add(seen(padded([3, 6]), row=9))
    other.load(json.loads(json.dumps(coverage.as_list())))
    assert other.as_list() == coverage.as_list() and other.news_in(seen(padded([3, 6]), row=9)) is None


@pytest.mark.parametrize("news", CHANGES)
def test_lengths_are_known_to_be_all_that_is_new(news: str) -> None:
    coverage = Coverage()
    assert coverage.with_new_lengths(seen(padded([3, 6]))) is None
    coverage.add(seen(padded([3, 6])))
    assert (coverage.with_new_lengths(seen(CHANGES[news]())) is not None) == ("than the" in news)
    assert coverage.with_new_lengths(seen(padded([2, 6, 9]), row=100)) is None
    assert coverage.forms == [seen(padded([3, 6]))]
