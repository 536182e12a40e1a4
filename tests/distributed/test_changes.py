"""What callbacks change while several processes train counts as it does on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .pool import Pool
from .test_contract import assert_same_run

KINDS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"fsdp": True}}


CHANGES = ("freeze", "unfreeze", "exchange", "optimizer", "accumulation")
OF_DDP = ("freeze", "optimizer")
"""Changes that always run with DDP; with FSDP all do."""


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        pytest.param(kind, change, marks=() if kind == "fsdp" or change in OF_DDP else pytest.mark.grid)
        for kind in KINDS
        for change in CHANGES
    ],
)
def test_a_change_counts_as_on_one_process(pool: Pool, tmp_path: Path, kind: str, change: str) -> None:
    one = pool.run(1, "changed", folder=str(tmp_path / "one"), change=change, gradient_accumulation_steps=4)[0]
    for each in pool.run(2, "changed", folder=str(tmp_path / "two"), change=change, gradient_accumulation_steps=2,
                         **KINDS[kind]):  # fmt: skip
        assert_same_run(each, one)


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_after_an_evaluation_counts_too(pool: Pool, tmp_path: Path, kind: str) -> None:
    """An evaluation leaves whole parameters in a model that is in shards."""
    given = {"change": "exchange", "event": "on_evaluate", "eval_strategy": "steps", "eval_steps": 2}
    one = pool.run(1, "changed", folder=str(tmp_path / "one"), gradient_accumulation_steps=4, **given)[0]
    for each in pool.run(2, "changed", folder=str(tmp_path / "two"), gradient_accumulation_steps=2, **given,
                         **KINDS[kind]):  # fmt: skip
        assert_same_run(each, one)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_and_its_wrapper_are_trained_in_training_mode(pool: Pool, tmp_path: Path, kind: str) -> None:
    for each in pool.run(2, "changed", folder=str(tmp_path), change="mode", **KINDS[kind]):
        assert each["modes"] and all(each["modes"])


def test_a_layer_added_under_ddp_is_shared_from_the_next_update_on(pool: Pool, tmp_path: Path) -> None:
    """It takes no part in the loss here, and is named as any unused parameter is."""
    outcomes = pool.outcomes(2, "changed", folder=str(tmp_path), change="layer")
    assert all(each.kind == "raised" and "extra.weight" in each.value for each in outcomes)


def test_a_layer_added_to_a_model_in_shards_is_refused(pool: Pool, tmp_path: Path) -> None:
    outcomes = pool.outcomes(2, "changed", folder=str(tmp_path), change="layer", fsdp=True)
    assert all(each.kind == "raised" and "after the model was sharded" in each.value for each in outcomes)


def test_what_an_update_makes_trainable_itself_is_refused_under_ddp(pool: Pool, tmp_path: Path) -> None:
    outcomes = pool.outcomes(2, "changed", folder=str(tmp_path), change="unfreeze", event="on_substep_end",
                             gradient_accumulation_steps=2)  # fmt: skip
    assert all(each.kind == "raised" and "in the middle of a step: embed.weight" in each.value for each in outcomes)


def test_another_accumulation_on_one_process_only_is_refused(pool: Pool, tmp_path: Path) -> None:
    outcomes = pool.outcomes(2, "changed", folder=str(tmp_path), change="accumulation", rank=1)
    assert all(each.kind == "raised" and "change it on all of them" in each.value for each in outcomes)
