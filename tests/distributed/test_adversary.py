"""Adversarial cases on two processes: an update equals that of a hand-written loop, for any split across ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adversary.reference import difference
from tests.adversary.running import Observed, Split, doubles_stay, judge
from tests.adversary.zoo import CASES

from .pool import Pool

pytest.importorskip("transformers")
WORLD = 2
NAMES = (
    "mean over sequences", "images that come later", "a sum", "r-drop of classes", "sample weights that come later",
    "targets outside the mask, later", "loss_function as a mean over sequences", "class weights", "llama4 chunks",
    "position by row", "places left out, counted along the row", "a model's own mean over sequences",
    "segmentation that ignores 255", "micro-batches without labels that teach something", "unfreezing in a callback",
    "no shift, which shows later", "eval() in a callback", "a weight of the loss changed in a callback",
    "a second text with no mask, longer from update 1 on", "fgm in compute_loss",
)  # fmt: skip
ALWAYS = ("mean over sequences", "images that come later", "a sum", "r-drop of classes")


@pytest.fixture
def _doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    doubles_stay(monkeypatch.setattr)


def ways() -> list[Any]:
    every = [(name, speed, split) for name in NAMES for speed in ("off", "max") for split in (Split(1, 4), Split(2, 2))]
    always = {(name, "max", Split(1, 4)) for name in ALWAYS}
    marked = [() if way in always else pytest.mark.grid for way in every]
    return [
        pytest.param(*way, marks=marks, id="-".join(map(str, way))) for way, marks in zip(every, marked, strict=True)
    ]


@pytest.mark.usefixtures("_doubles")
@pytest.mark.parametrize(("name", "speed", "split"), ways())
def test_an_update_of_two_processes_is_what_it_is_by_hand(
    name: str, speed: str, split: Split, pool: Pool, tmp_path: Path
) -> None:
    case, (accumulation, size) = CASES[name], split
    found = pool.run(
        WORLD, "adversarial", folder=str(tmp_path), name=name, speed=speed, accumulation=accumulation, size=size
    )
    for rank, each in enumerate(found):
        wrong = judge(case, Observed(None, **each), Split(WORLD * accumulation, size))
        assert wrong is None, f"rank {rank}: {wrong}"
        assert difference(found[0]["gradients"], each["gradients"], 1e-12) is None


@pytest.mark.usefixtures("_doubles")
@pytest.mark.parametrize("name", ["distillation from the initial model", "a penalty from the fourth update on"])
def test_a_penalty_that_begins_later_is_reported_on_two_ranks(name: str, pool: Pool, tmp_path: Path) -> None:
    found = pool.run(WORLD, "adversarial", folder=str(tmp_path), name=name, speed="max", accumulation=1, size=4)
    assert Observed(None, **found[0]).says("neither the mean nor the sum"), found[0]["told"]
    for each in found:
        assert judge(CASES[name], Observed(None, **each), Split(WORLD, 4)) is None
