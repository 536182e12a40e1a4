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


def assert_same_run(ours: dict[str, Any], one: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    assert (ours["step"], ours["samples"]) == (one["step"], one["samples"])
    assert differences(ours, one) <= tolerance
    assert len(ours["logs"]) == len(one["logs"])
    for row, expected in zip(ours["logs"], one["logs"], strict=True):
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            assert math.isclose(row[name], value, rel_tol=tolerance, abs_tol=1e-12), (name, row, expected)


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


def compare(
    pool: Pool,
    tmp_path: Any,
    case: tuple[int, int, int, int],
    parts: int = 0,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> None:
    """Run a case on one process, and on several that share its data out into so many parts."""
    n, batch, accumulation, world = case
    shared = {"n": n, "per_device_train_batch_size": batch, "eval_strategy": "no", **options}
    single = {
        name: value
        for name, value in shared.items()
        if name not in ("fsdp", "fsdp_config", "parallelism_config", "deepspeed")
    }
    one = pool.run(1, "trained", folder=str(tmp_path / "one"), gradient_accumulation_steps=accumulation, **single)[0]
    many = pool.run(
        world,
        "trained",
        folder=str(tmp_path / "many"),
        gradient_accumulation_steps=accumulation // (parts or world),
        **shared,
    )
    for each in many:
        assert_same_run(each, one, tolerance)
    assert one["strategy"] == "SingleDevice" != many[0]["strategy"]


@pytest.mark.parametrize("case", SPREAD)
def test_ddp_ends_with_the_weights_of_one_process(pool: Pool, tmp_path: Any, case: Any) -> None:
    compare(pool, tmp_path, case)


@pytest.mark.parametrize("loss", ["pair", "divided", "mixed"])
def test_ddp_is_exact_for_every_kind_of_loss(pool: Pool, tmp_path: Any, loss: str) -> None:
    compare(pool, tmp_path, (13, 2, 6, 3), loss=loss)


@pytest.mark.grid
@pytest.mark.parametrize("loss", ["model", "pair", "divided"])
@pytest.mark.parametrize("case", GRID)
def test_ddp_over_the_whole_grid(pool: Pool, tmp_path: Any, case: Any, loss: str) -> None:
    compare(pool, tmp_path, case, loss=loss, num_train_epochs=1)


FSDP = {"fsdp": True}


@pytest.mark.parametrize(
    "case", [SPREAD[1], SPREAD[3], *(pytest.param(SPREAD[k], marks=pytest.mark.grid) for k in (0, 2))]
)
def test_fsdp_ends_with_the_weights_of_one_process(pool: Pool, tmp_path: Any, case: Any) -> None:
    compare(pool, tmp_path, case, **FSDP)


@pytest.mark.parametrize("loss", ["pair", "divided"])
def test_fsdp_is_exact_for_every_kind_of_loss(pool: Pool, tmp_path: Any, loss: str) -> None:
    compare(pool, tmp_path, (13, 2, 6, 3), loss=loss, **FSDP)


def test_a_loss_of_two_parts_is_exact_where_a_rank_has_fewer_micro_batches(pool: Pool, tmp_path: Any) -> None:
    compare(pool, tmp_path, SPREAD[0], loss="mixed", **FSDP)


@pytest.mark.parametrize("model", ["shared-block", "tied-blocks"])
def test_fsdp_trains_what_several_blocks_share(pool: Pool, tmp_path: Any, model: str) -> None:
    compare(pool, tmp_path, SPREAD[0], model=model, **FSDP)


PLAN = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}


@pytest.mark.parametrize("case", [pytest.param((13, 2, 4, 2), marks=pytest.mark.grid), (5, 2, 2, 2)])
def test_tensor_parallel_ends_with_the_weights_of_one_process(pool: Pool, tmp_path: Any, case: Any) -> None:
    compare(pool, tmp_path, case, parts=1, parallelism_config={"tp_size": 2, "tp_plan": PLAN})


def test_tensor_parallel_with_fsdp_ends_with_the_weights_of_one_process(pool: Pool, tmp_path: Any) -> None:
    compare(pool, tmp_path, (13, 2, 4, 4), parts=2, fsdp=True, parallelism_config={"tp_size": 2, "tp_plan": PLAN})


@pytest.mark.parametrize("model", [pytest.param("llama", marks=pytest.mark.grid), "llama-tied", "qwen3"])
def test_models_that_carry_a_plan_need_no_other(pool: Pool, tmp_path: Any, model: str) -> None:
    compare(pool, tmp_path, (7, 2, 2, 2), parts=1, model=model, parallelism_config={"tp_size": 2})


def zero(stage: int) -> dict[str, Any]:
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    return {**dict.fromkeys(sizes, "auto"), "zero_optimization": {"stage": stage}, "steps_per_print": 1000}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_ends_with_the_weights_of_one_process(pool: Pool, tmp_path: Any, stage: int) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    pool.close()  # DeepSpeed remembers groups that are closed by now
    # DeepSpeed keeps its own copies in single precision.
    compare(pool, tmp_path, (13, 2, 4, 2), tolerance=1e-5, model="blocks-single", deepspeed=zero(stage))
