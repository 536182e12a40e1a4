"""Updates unlike the one a plan was made for, or made first: what is trained must be what it is with speed="off"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loopwright.speed.planner.decision import FLAT, GROUPED
from tests.speed.architectures import WithFeatures, build, collate, on_the_left, samples
from tests.speed.training import InOrder, Run, train

transformers = pytest.importorskip("transformers")


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


def as_made(run: Run) -> list[bool]:
    """For each update whether its micro-batches have the collator's rows; a laid out one has one row."""
    return [update[0][0] > 1 for update in run.shapes]


@pytest.mark.parametrize("holed", [(0,), (1, 2), (4,)])
def test_a_mask_with_a_hole_costs_its_own_update_only(holed: tuple[int, ...], tmp_path: Path) -> None:
    def change(batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
        batch["attention_mask"][0, 1] = int(number not in holed)
        return batch

    run = same_losses(lambda: build("llama", "causal"), samples(60, "causal"), tmp_path, change)
    assert run.plan.layout == FLAT, run.plan.lines()
    odd = {number // 2 for number in holed}
    assert as_made(run) == [update in odd for update in range(4)]


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
    assert run.plan.layout == FLAT and as_made(run) == [False, True, True, True]


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
        build("llama", "causal"), samples(90, "causal"), tmp_path, speed="max", max_steps=6,
        torch_compile=True, torch_compile_backend="aot_eager", learning_rate=0.05, per_device_train_batch_size=7,
    )  # fmt: skip
    assert run.plan.layout == FLAT
    # Five parts of a block, around its attention: for the first length, then for all. What was tried is not compiled.
    assert run.trainer._loopwright.compiled.figures()["compilations"] <= 12
    assert run.trainer.speed_report().numbers["recompiles"] <= 2
