"""Every strategy, on any number of processes, ends with the weights and the numbers of one process."""

from __future__ import annotations

import math
from typing import Any

import pytest

from .pool import Pool

TOLERANCE = 1e-10


def differences(ours: dict[str, Any], one: dict[str, Any]) -> float:
    assert ours["weights"].keys() == one["weights"].keys()
    return max(float((ours["weights"][name] - one["weights"][name]).abs().max()) for name in one["weights"])


def assert_same_run(ours: dict[str, Any], one: dict[str, Any]) -> None:
    assert (ours["step"], ours["samples"]) == (one["step"], one["samples"])
    assert differences(ours, one) <= TOLERANCE
    assert len(ours["logs"]) == len(one["logs"])
    for row, expected in zip(ours["logs"], one["logs"], strict=True):
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            assert math.isclose(row[name], value, rel_tol=1e-10, abs_tol=1e-12), (name, row, expected)


# n, batch, accumulation of the single process that the others share out, world
SPREAD = [
    (13, 2, 4, 2),
    (13, 2, 6, 3),
    (20, 1, 4, 4),
    (5, 2, 4, 4),  # fewer batches than processes
    (13, 3, 6, 2),
]
GRID = [
    (n, batch, accumulation, world)
    for world in (2, 3, 4)
    for n in (1, 2, 7, 12, 13, 20)
    for batch in (1, 2, 5)
    for accumulation in (world, 2 * world)
]


def compare(pool: Pool, tmp_path: Any, case: tuple[int, int, int, int], **options: Any) -> None:
    n, batch, accumulation, world = case
    shared = {"n": n, "per_device_train_batch_size": batch, "eval_strategy": "no", **options}
    single = {
        name: value for name, value in shared.items() if name not in ("fsdp", "fsdp_config", "parallelism_config")
    }
    one = pool.run(1, "trained", folder=str(tmp_path / "one"), gradient_accumulation_steps=accumulation, **single)[0]
    many = pool.run(
        world, "trained", folder=str(tmp_path / "many"), gradient_accumulation_steps=accumulation // world, **shared
    )
    for each in many:
        assert_same_run(each, one)
    assert one["strategy"] == "SingleDevice" != many[0]["strategy"]


@pytest.mark.parametrize("case", SPREAD)
def test_ddp_ends_with_the_weights_of_one_process(pool: Pool, tmp_path: Any, case: Any) -> None:
    compare(pool, tmp_path, case)


@pytest.mark.parametrize("loss", ["pair", "divided"])
def test_ddp_is_exact_for_every_kind_of_loss(pool: Pool, tmp_path: Any, loss: str) -> None:
    compare(pool, tmp_path, (13, 2, 6, 3), loss=loss)


@pytest.mark.grid
@pytest.mark.parametrize("loss", ["model", "pair", "divided"])
@pytest.mark.parametrize("case", GRID)
def test_ddp_over_the_whole_grid(pool: Pool, tmp_path: Any, case: Any, loss: str) -> None:
    compare(pool, tmp_path, case, loss=loss, num_train_epochs=1)
