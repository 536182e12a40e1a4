"""Layouts on several processes: each lays out its own samples by one plan, and the run is that of one process."""

from __future__ import annotations

from typing import Any

import pytest

from .pool import Pool
from .test_contract import assert_same_run

OPTIONS = {"model": "llama", "per_device_train_batch_size": 4, "eval_strategy": "no", "logging_steps": 1}


def runs(pool: Pool, tmp_path: Any, world: int, n: int, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One process as the collator made its batches, and several with layouts."""
    given = {**OPTIONS, "n": n, **options}
    plain = {name: value for name, value in given.items() if name not in ("per_device_train_batch_tokens", "listener")}
    one = pool.run(1, "trained", folder=f"{tmp_path}/one", gradient_accumulation_steps=world, speed="off", **plain)[0]
    many = pool.run(world, "planned", folder=f"{tmp_path}/many", gradient_accumulation_steps=1, speed="max", **given)
    return one, many


@pytest.mark.parametrize(
    ("world", "n", "options"),
    [
        (2, 20, {}),
        (2, 20, {"label_smoothing_factor": 0.1}),
        (2, 13, {"per_device_train_batch_size": 2}),  # in the last update one process has fewer samples
        (3, 13, {"per_device_train_batch_size": 2}),  # and here two have none
        (2, 20, {"model": "llama-tied", "per_device_train_batch_tokens": 24}),
    ],
)
def test_layouts_on_several_processes_change_nothing(
    pool: Pool, tmp_path: Any, world: int, n: int, options: dict[str, Any]
) -> None:
    one, many = runs(pool, tmp_path, world, n, **options)
    plans, rows = [each.pop("plan") for each in many], [each.pop("rows") for each in many]
    assert all(each.pop("has_speed") for each in many)
    assert all(plan == plans[0] for plan in plans) and plans[0]["layout"] == "flat"
    assert all(count == 1 for each in rows for update in each for count in update)
    for each in many:
        assert_same_run(each, one, 1e-6)  # the model's norms compute in single precision


def test_what_one_process_has_decided_is_taken_up_after_resuming(pool: Pool, tmp_path: Any) -> None:
    given = {**OPTIONS, "n": 20, "speed": "max", "gradient_accumulation_steps": 1, "save_strategy": "steps"}
    whole = pool.run(2, "planned", folder=f"{tmp_path}/run", save_steps=2, **given)
    given["resume"] = f"{tmp_path}/run/checkpoint-2"
    again = pool.run(2, "planned", folder=f"{tmp_path}/run", save_steps=2, **given)
    for first, second in zip(whole, again, strict=True):
        assert second["plan"] == first["plan"] and first["plan"]["layout"] == "flat"
        assert all((second["weights"][name] == value).all() for name, value in first["weights"].items())
    given["gradient_accumulation_steps"] = 2
    alone = pool.run(1, "planned", folder=f"{tmp_path}/run", save_steps=2, **given)[0]
    assert alone["plan"]["layout"] == "flat"
    for name, value in whole[0]["weights"].items():
        assert (alone["weights"][name] - value).abs().max() < 1e-6


def test_a_reason_of_one_process_is_everybodys(pool: Pool, tmp_path: Any) -> None:
    """A callback that listens to micro-batches on one process only: nobody lays anything out, and nobody waits."""
    one, many = runs(pool, tmp_path, 2, 20, listener=1)
    for each in many:
        assert not each.pop("has_speed")
        each.pop("plan"), each.pop("rows")
        assert_same_run(each, one, 1e-6)
