"""Batches unlike usual ones, or unlike those a plan was made from: what is trained is what it is with speed="off"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright import Trainer
from loopwright.speed.planner.decision import COLLATED, FLAT, GROUPED, UNMASKED, UNPADDED
from tests.speed.architectures import WithFeatures, build, collate, on_the_left, samples
from tests.speed.training import InOrder, Run, off_and_max, train
from tests.spreads import spread

transformers = pytest.importorskip("transformers")
DATA = samples(36, "causal")


class Counting:
    """A collator that knows how many batches it has made."""

    def __init__(self, change: Any) -> None:
        self.change, self.made = change, 0

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.change(collate(rows), self.made)
        self.made += 1
        return batch


def same_losses(make: Any, data: Any, folder: Path, change: Any, **options: Any) -> Run:
    options = {"kind": InOrder, "max_steps": 4, "learning_rate": 0.05, **options}
    plain = train(make(), data, folder / "off", speed="off", data_collator=Counting(change), **options)
    fast = train(make(), data, folder / "max", speed="max", data_collator=Counting(change), **options)
    assert fast.losses == pytest.approx(plain.losses, rel=1e-5)
    return fast


def kept_collated(run: Run) -> list[bool]:
    """For each update whether its micro-batches have the collator's rows; a laid out one has one row."""
    return [update[0][0] > 1 for update in run.shapes]


@pytest.mark.parametrize("holed", [(0,), (1, 2), pytest.param((4,), marks=pytest.mark.grid)])
def test_a_mask_with_a_hole_costs_its_own_update_only(holed: tuple[int, ...], tmp_path: Path) -> None:
    def change(batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
        batch["attention_mask"][0, 1] = int(number not in holed)
        return batch

    run = same_losses(lambda: build("llama", "causal"), samples(60, "causal"), tmp_path, change)
    assert run.plan.layout == FLAT, run.plan.lines()
    odd = {number // 2 for number in holed}
    assert kept_collated(run) == [update in odd for update in range(4)]


def test_later_batches_may_have_no_mask(tmp_path: Path) -> None:
    def change(batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
        return {name: value for name, value in batch.items() if number < 2 or name != "attention_mask"}

    run = same_losses(lambda: build("bert", "class"), samples(60, "class"), tmp_path, change)
    assert run.plan.layout == UNPADDED, run.plan.lines()


def test_masks_that_always_have_holes_are_given_up_after_a_while(tmp_path: Path, monkeypatch: Any) -> None:
    from loopwright.speed.planner import planner as planning

    monkeypatch.setattr(planning, "LOOKS", 3)

    def change(batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
        batch["attention_mask"][0, 1] = 0
        return batch

    run = same_losses(lambda: build("llama", "causal"), samples(60, "causal"), tmp_path, change)
    assert any("an attention_mask has gaps" in line for line in run.plan.lines()), run.plan.lines()


def test_first_tokens_predicted_from_padding_are_counted_as_the_collator_has_them(tmp_path: Path) -> None:
    def change(batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
        if number < 2:  # what the plan is made from has no such targets
            batch["labels"][:, 0] = -100
        return on_the_left(batch)

    run = same_losses(lambda: build("llama", "causal"), samples(60, "causal"), tmp_path, change)
    assert run.plan.layout == FLAT and kept_collated(run) == [False, True, True, True]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_rows_that_a_collator_has_flattened_have_attention_within_documents(kind: str, tmp_path: Path) -> None:
    flatten = transformers.DataCollatorWithFlattening()
    options: dict[str, Any] = {"data_collator": lambda rows: dict(flatten(rows)), "max_steps": 3, "learning_rate": 0.05}
    plain, fast = (
        train(build(kind, "causal"), samples(36, "causal"), tmp_path / speed, speed=speed, **options)
        for speed in ("off", "max")
    )
    assert fast.losses == pytest.approx(plain.losses, rel=1e-5)
    assert fast.plan.layout == FLAT and "rows already hold several samples" in fast.plan.lines()[0], fast.plan.lines()


def test_whole_numbers_as_many_as_tokens_are_known_from_other_updates(tmp_path: Path) -> None:
    lengths = [13 if i < 12 else 12 for i in range(48)]
    data = [
        {"input_ids": 3 + (7 * i + torch.arange(n if i % 3 else 6)) % 50, "labels": torch.tensor(i % 3)}
        for i, n in enumerate(lengths)
    ]

    def change(batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
        rows = len(batch["labels"])
        return {**batch, "features": (torch.arange(12) * (1 + torch.arange(rows))[:, None] + number) % 5}

    run = same_losses(WithFeatures, data, tmp_path, change, remove_unused_columns=False)
    assert run.plan.layout == GROUPED
    assert run.trainer._loopwright.run.speed.state_dict()["whole"] == ["features", "labels"]


def test_compiled_blocks_do_not_compile_again_for_every_number_of_samples(tmp_path: Path) -> None:
    run = train(
        build("llama", "causal", layers=2), samples(90, "causal"), tmp_path, speed="max", max_steps=6,
        torch_compile=True, torch_compile_backend="aot_eager", learning_rate=0.05, per_device_train_batch_size=7,
    )  # fmt: skip
    assert run.plan.layout == FLAT
    # Five parts of a block, around its attention: for the first length, then for all. What was tried is not compiled.
    assert run.trainer._loopwright.compiled.figures()["compilations"] <= 12
    assert run.trainer.speed_report().numbers["recompiles"] <= 2


class Positions:
    """A collator whose positions are the usual ones for the first update, and later others."""

    def __init__(self, later: Tensor) -> None:
        self.later, self.calls = later, 0

    def __call__(self, batch: list[dict[str, Any]]) -> dict[str, Any]:
        self.calls += 1
        made = collate(batch)
        places = (torch.arange(64) if self.calls <= 2 else self.later)[: made["input_ids"].shape[1]]
        return {**made, "position_ids": places.expand_as(made["input_ids"])}


class SameLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


MOVED = torch.arange(64).clamp(max=55) + 7
JUMPING = torch.where(torch.arange(64) < 4, torch.arange(64), (torch.arange(64) + 5).clamp(max=60))


@pytest.mark.parametrize(("case", "later"), spread([(Trainer, FLAT), (SameLoss, UNMASKED)], [MOVED, JUMPING]))
def test_positions_of_the_collator_are_kept_also_when_they_change(
    case: tuple[type[Trainer], str], later: Tensor, tmp_path: Path
) -> None:
    kind, layout = case
    runs = [
        train(
            build("gpt2", "causal"), DATA, tmp_path, data_collator=Positions(later), speed=speed, max_steps=3, kind=kind
        )
        for speed in ("off", "max")
    ]
    assert runs[1].plan.layout == layout
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)


class ChangingSides:
    """Padding on the right in the first update, later on the left."""

    calls = 0

    def __call__(self, batch: list[dict[str, Any]]) -> dict[str, Any]:
        self.calls += 1
        return collate(batch) if self.calls <= 2 else on_the_left(collate(batch))


def test_padding_that_changes_sides_is_masked(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kind": SameLoss, "max_steps": 3}
    data = [{**sample, "labels": sample["labels"].index_fill(0, torch.tensor(0), -100)} for sample in DATA]
    runs = [
        train(build("llama", "causal"), data, tmp_path, data_collator=ChangingSides(), speed=speed, **options)
        for speed in ("off", "max")
    ]
    assert runs[1].plan.layout == UNMASKED
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)


class Flattening:
    """Rows without padding and mask: of one sample at first, later of several."""

    calls = 0

    def __call__(self, batch: list[dict[str, Any]]) -> dict[str, Any]:
        self.calls += 1
        made = transformers.DataCollatorWithFlattening()(batch[:1] if self.calls <= 2 else batch)
        made["labels"][:, -1] = -100  # a last token that need not be computed
        return dict(made)


def test_rows_that_hold_several_documents_already_stay_apart(tmp_path: Path) -> None:
    runs = [
        train(build("llama", "causal"), DATA, tmp_path, data_collator=Flattening(), speed=speed, max_steps=3)
        for speed in ("off", "max")
    ]
    assert runs[1].plan.layout == FLAT
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)


class MeanOfAll(nn.Module):
    """Takes padding for text."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings, self.head = nn.Embedding(64, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.head(self.embeddings(input_ids).mean(1)), labels)}


@pytest.mark.parametrize("length", [12, 300])
def test_padding_that_is_minded_is_found_when_all_samples_are_equally_long(length: int, tmp_path: Path) -> None:
    data = [{"input_ids": [3 + (7 * i + j) % 50 for j in range(length)], "labels": i % 3} for i in range(36)]

    def to_width(batch: list[dict[str, Any]]) -> dict[str, Any]:
        ids = F.pad(torch.tensor([sample["input_ids"] for sample in batch]), (0, 40))
        return {
            "input_ids": ids,
            "attention_mask": (ids > 0).long(),
            "labels": torch.tensor([s["labels"] for s in batch]),
        }

    assert off_and_max(MeanOfAll, data, tmp_path, data_collator=to_width).plan.layout == COLLATED


def test_as_many_classes_as_tokens_are_still_classes(tmp_path: Path) -> None:
    data = samples(36, "class")
    width = max(len(sample["input_ids"]) for sample in data)

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = build("bert", "class").config
        config.num_labels, config.problem_type = width, "multi_label_classification"
        return transformers.BertForSequenceClassification(config)

    def to_width(batch: list[dict[str, Any]]) -> dict[str, Any]:
        made = collate(batch)
        wide = {name: F.pad(value, (0, width - value.shape[1])) for name, value in made.items() if name != "labels"}
        return {**wide, "labels": (torch.arange(width) % 3 == made["labels"][:, None] % 3).float()}

    assert off_and_max(make, data, tmp_path, data_collator=to_width).plan.layout == UNPADDED


def test_as_many_features_as_tokens_are_still_features(tmp_path: Path) -> None:
    lengths = [13 if i < 12 else 12 for i in range(36)]  # the first update is another one than the rest
    data = [
        {"input_ids": 3 + (7 * i + torch.arange(n if i % 3 else 6)) % 50, "labels": torch.tensor(i % 3), "place": i}
        for i, n in enumerate(lengths)
    ]

    def with_features(batch: list[dict[str, Any]]) -> dict[str, Any]:
        made = collate([{name: sample[name] for name in ("input_ids", "labels")} for sample in batch])
        return {
            **made,
            "features": torch.tensor([[sample["place"] * j % 7 / 7 for j in range(12)] for sample in batch]),
        }

    options: dict[str, Any] = {"kind": InOrder, "data_collator": with_features, "remove_unused_columns": False,
                               "max_steps": 3, "learning_rate": 0.05}  # fmt: skip
    plain = train(WithFeatures(), data, tmp_path, speed="off", **options)
    fast = train(WithFeatures(), data, tmp_path, speed="auto", per_device_train_batch_tokens=40, **options)
    assert fast.plan.layout == GROUPED and fast.losses == pytest.approx(plain.losses, rel=1e-5)
