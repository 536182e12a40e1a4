"""Ranks that differ are refused on all of them before the first update; initial weights are made equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .differences import ALLOWED, REFUSED
from .pool import Pool

ALWAYS = ("learning_rate", "schedule", "fsdp", "length", "width", "loss", "optimizer_class", "rate_at_begin",
          "weights_at_begin", "rate_later", "nothing", "local_rank", "output_dir", "diverged")  # fmt: skip
"""Rows of the grid that always run."""


def spread(rows: Any) -> list[Any]:
    return [each if each in ALWAYS else pytest.param(each, marks=pytest.mark.grid) for each in rows]


@pytest.mark.parametrize("row", spread(REFUSED))
def test_a_difference_is_refused_on_both_ranks(pool: Pool, tmp_path: Path, row: str) -> None:
    outcomes = pool.outcomes(2, "differing", folder=str(tmp_path), row=row, timeout=60)
    for each in outcomes:
        assert each.kind == "raised" and "RanksDisagree: the ranks disagree: " in each.value, each.value
        assert REFUSED[row][2] in each.value.replace("\n", " ")
    errors = [each.value.rsplit("RanksDisagree: ", 1)[1] for each in outcomes]
    assert errors[0] == errors[1]


@pytest.mark.parametrize("row", spread(ALLOWED))
def test_what_may_differ_trains(pool: Pool, tmp_path: Path, row: str) -> None:
    words = ALLOWED[row][2]
    for _, warnings in pool.run(2, "differing", folder=str(tmp_path), row=row, timeout=60):
        found = [text for text in warnings if "ranks" in text or "replicas" in text]
        assert len(found) == bool(words) and (not words or words in found[0]), warnings


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


LAYOUTS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"fsdp": True, "optim": "adamw_torch"}}
LAYOUTS["ddp-apart"] = {"ddp_broadcast_buffers": False}
LAYOUTS.update({f"{name}-unevaluated": {**LAYOUTS[name], "eval_strategy": "no"} for name in ("fsdp", "ddp-apart")})
"""Without evaluations nothing but the batch norm itself writes to its statistics."""
TWO = [name if name in ("ddp", "fsdp") else pytest.param(name, marks=pytest.mark.grid) for name in LAYOUTS]


@pytest.mark.parametrize("layout", TWO)
def test_models_built_without_a_seed_take_the_weights_of_rank_0(pool: Pool, tmp_path: Path, layout: str) -> None:
    (first, begun_0, after_0, warnings), (second, begun_1, after_1, _) = pool.run(
        2, "unseeded", folder=str(tmp_path), **LAYOUTS[layout]
    )
    assert not same(first, second)
    assert same(first, begun_0) and same(first, begun_1)
    parameters = [name for name in after_0 if not name.startswith("norm.running")]
    assert all(torch.equal(after_0[name], after_1[name]) for name in parameters)
    assert [text for text in warnings if "different weights; all use those of rank 0" in text]


@pytest.mark.parametrize("layout", TWO)
def test_an_evaluation_is_that_of_the_saved_model(pool: Pool, tmp_path: Path, layout: str) -> None:
    (mean_0, _, loss_0), (mean_1, kept, loss_1) = pool.run(
        2, "evaluated_with_own_statistics", folder=str(tmp_path), **LAYOUTS[layout]
    )
    assert not torch.equal(mean_0, mean_1) and kept  # each rank has its own statistics again
    (alone,) = pool.run(1, "alone_with_saved", folder=str(tmp_path))
    assert loss_0 == loss_1 == pytest.approx(alone, abs=1e-12)


KILLED = [("fsdp", 1), ("ddp", 1), ("ddp-apart-unevaluated", 1), *(
    pytest.param(*each, marks=pytest.mark.grid)
    for each in (("fsdp", 2), ("fsdp", 3), ("ddp-apart", 2), ("ddp", 3), ("fsdp-unevaluated", 1))
)]  # fmt: skip


@pytest.mark.parametrize(("layout", "seed"), KILLED)
def test_a_killed_run_with_batch_norm_resumes_to_the_bit(pool: Pool, tmp_path: Path, layout: str, seed: int) -> None:
    given = {"seed": seed, **LAYOUTS[layout]}
    whole = pool.run(2, "normalized", folder=str(tmp_path / "whole"), **given)
    for kill_at in (4, 7):
        pool.send(2, "normalized", folder=str(tmp_path / "run"), kill_at=kill_at, resume="auto", **given)
        assert [each.kind for each in pool.endings(2, timeout=60)] == ["ended", "ended"]
    resumed = pool.run(2, "normalized", folder=str(tmp_path / "run"), resume="auto", **given)
    for one, other in zip(whole, resumed, strict=True):
        assert same(one["weights"], other["weights"])
        assert one["logs"] == other["logs"]
        assert any("eval_loss" in row for row in one["logs"]) == ("eval_strategy" not in given)
    buffers = [each["weights"]["norm.running_mean"] for each in resumed]
    assert not torch.equal(buffers[0], buffers[1])
