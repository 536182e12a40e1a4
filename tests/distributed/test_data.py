"""Every sample once: how processes share out data of all kinds, and how evaluation puts results together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from .pool import Pool


def in_order(found: list[Any], world: int) -> list[int]:
    """What all processes were shown, their k-th batches side by side."""
    batches = [list(each["seen"]) for each in found]
    return [number for k in range(max(map(len, batches))) for own in batches if k < len(own) for number in own[k]]


@pytest.mark.parametrize(("n", "world"), [(12, 2), (13, 2), (13, 3), (9, 4)])
def test_the_kth_batch_of_rank_r_is_batch_k_times_world_plus_r(pool: Pool, tmp_path: Path, n: int, world: int) -> None:
    one = pool.run(1, "shown", folder=str(tmp_path / "one"), n=n, gradient_accumulation_steps=world)[0]
    many = pool.run(world, "shown", folder=str(tmp_path / "many"), n=n)
    whole = one["seen"]
    for rank, each in enumerate(many):
        own = whole[rank::world]
        assert each["seen"][: len(own)] == own
        assert len(each["seen"]) == math.ceil(len(whole) / world), "one that has none left keeps the others company"
    assert {each["samples"] for each in many} == {one["samples"]} == {n}
    assert {each["steps"] for each in many} == {one["steps"]}


def test_each_epoch_is_another_permutation_of_all_samples(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(2, "shown", folder=str(tmp_path), n=12, epochs=2)
    whole = in_order(found, 2)
    first, second = whole[:12], whole[12:]
    assert sorted(first) == sorted(second) == list(range(12)) and first != second


@pytest.mark.parametrize("kind", ["sampler", "loader", "class"])
def test_an_order_of_the_users_own_is_that_of_one_process(pool: Pool, tmp_path: Path, kind: str) -> None:
    one = pool.run(1, "shown", folder=str(tmp_path / "one"), n=12, kind=kind, epochs=2)
    found = pool.run(2, "shown", folder=str(tmp_path / "two"), n=12, kind=kind, epochs=2)
    assert in_order(found, 2) == in_order(one, 1)
    assert sorted(in_order(found, 2)[:12]) == list(range(12))


def test_a_list_of_batches_is_resumed_on_two_processes(pool: Pool, tmp_path: Path) -> None:
    given = {"n": 13, "kind": "list", "epochs": 2, "save_strategy": "steps", "save_steps": 1}
    whole = pool.run(2, "shown", folder=str(tmp_path / "whole"), **given)
    again = pool.run(2, "shown", folder=str(tmp_path / "again"), resume=str(tmp_path / "whole/checkpoint-4"), **given)
    assert [each["seen"] for each in again] == [each["seen"] for each in whole]


def test_a_loader_that_is_shared_out_already_is_left_alone(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(2, "shown", folder=str(tmp_path), n=12, kind="sharing")
    assert [number for batch in found[0]["seen"] for number in batch] == list(range(0, 12, 2))
    assert sorted(in_order(found, 2)) == list(range(12))


@pytest.mark.parametrize(("stream", "workers"), [("plain", 0), ("plain", 2), ("aware", 2)])
def test_a_stream_gives_each_sample_to_one_process(pool: Pool, tmp_path: Path, stream: str, workers: int) -> None:
    found = pool.run(2, "shown", folder=str(tmp_path), n=17, stream=stream, max_steps=5, dataloader_num_workers=workers)
    seen = in_order(found, 2)
    real = seen[:17] if stream == "plain" else seen
    assert set(real) == set(range(17))
    assert {each["samples"] for each in found} == {17}, "a stand-in counts for nothing"
    if stream == "plain":
        assert real == list(range(17)), "the order is that of one process"


def test_the_learning_rate_does_not_know_how_many_processes_there_are(pool: Pool, tmp_path: Path) -> None:
    given = {"n": 16, "lr_scheduler_type": "linear", "learning_rate": 0.1, "warmup_steps": 1}
    one = pool.run(1, "shown", folder=str(tmp_path / "one"), gradient_accumulation_steps=4, **given)[0]
    for world in (2, 4):
        found = pool.run(
            world, "shown", folder=str(tmp_path / str(world)), gradient_accumulation_steps=4 // world, **given
        )
        assert all(each["rates"] == one["rates"] for each in found)
    assert len(set(one["rates"])) > 1


@pytest.mark.parametrize(
    ("n", "world", "stream", "objects"),
    [
        pytest.param(*size, stream, objects, marks=() if (row + stream + objects) % 2 == 0 else pytest.mark.grid)
        for row, size in enumerate([(9, 2), (3, 2), (22, 3)])
        for stream in (False, True)
        for objects in (False, True)
    ],
)
def test_evaluation_is_exact_and_in_the_order_of_the_data(
    pool: Pool, tmp_path: Path, n: int, world: int, stream: bool, objects: bool
) -> None:
    one = pool.run(1, "evaluated", folder=str(tmp_path / "one"), n=n, stream=stream)[0]
    many = pool.run(
        world, "evaluated", folder=str(tmp_path / "many"), n=n, stream=stream, eval_use_gather_object=objects
    )
    for each in many:
        assert each["predictions"] == one["predictions"] == [float(k) for k in range(n)]
        assert each["labels"] == one["labels"]
        assert each["metrics"].keys() == one["metrics"].keys()
        assert each["metrics"]["eval_n"] == n
        assert each["metrics"]["eval_loss"] == pytest.approx(one["metrics"]["eval_loss"], abs=1e-12)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_weights_of_losses_are_those_of_one_process(pool: Pool, tmp_path: Path, batch: int) -> None:
    """Of one sample alone, nobody can see what its loss is the mean of."""
    (alone,) = pool.run(1, "evaluated_row_means", folder=str(tmp_path / "one"), batch=7)
    for found in pool.run(2, "evaluated_row_means", folder=str(tmp_path / "two"), batch=batch):
        assert found == pytest.approx(alone, rel=1e-9)


def test_sharded_models_evaluate_uneven_data(pool: Pool, tmp_path: Path) -> None:
    one = pool.run(1, "evaluated", folder=str(tmp_path / "one"), n=11)[0]
    found = pool.run(2, "evaluated", folder=str(tmp_path / "two"), n=11, fsdp=True, optim="adamw_torch")
    assert all(each["predictions"] == one["predictions"] for each in found)


def test_counts_stay_apart_when_told_so(pool: Pool, tmp_path: Path) -> None:
    given = {"n": 4, "per_device_train_batch_size": 1, "num_train_epochs": 1, "train_sampling_strategy": "sequential"}
    together = pool.run(2, "trained", folder=str(tmp_path / "a"), **given)[0]
    apart = pool.run(2, "trained", folder=str(tmp_path / "b"), average_tokens_across_devices=False, **given)[0]
    losses = [each["logs"][0]["loss"] for each in (together, apart)]
    assert abs(losses[0] - losses[1]) > 1e-6, "samples of other lengths weigh differently"


def test_the_main_process_goes_first(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(3, "first_process_first", folder=str(tmp_path / "x")) == [False, True, True]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wish_of_one_process_is_everybodys(pool: Pool, tmp_path: Path, rank: int) -> None:
    given = {"per_device_train_batch_size": 1, "save_strategy": "no"}
    found = pool.run(2, "told", folder=str(tmp_path), rank=rank, **given)
    assert found == [(2, ["checkpoint-2"])] * 2


@pytest.mark.parametrize("n", [pytest.param(12, marks=pytest.mark.grid), 13])
def test_rebalanced_micro_batches_give_the_run_of_one_process(pool: Pool, tmp_path: Path, n: int) -> None:
    options = {"n": n, "per_device_train_batch_size": 2, "num_train_epochs": 1}
    one = pool.run(1, "trained", folder=str(tmp_path / "one"), gradient_accumulation_steps=4, **options)[0]
    many = pool.run(
        2, "trained", folder=str(tmp_path / "many"), gradient_accumulation_steps=2,
        train_sampling_strategy="batch_rebalance", **options,
    )  # fmt: skip
    for each in many:
        assert (each["step"], each["samples"]) == (one["step"], one["samples"])
        assert all(float((each["weights"][name] - one["weights"][name]).abs().max()) < 1e-10 for name in one["weights"])


@pytest.mark.parametrize("more", [{}, pytest.param({"fsdp": True}, marks=pytest.mark.grid)], ids=["ddp", "fsdp"])
def test_named_values_of_a_loss_are_those_of_one_process(pool: Pool, tmp_path: Path, more: dict[str, Any]) -> None:
    options = {"per_device_train_batch_size": 2, "logging_steps": 2}
    one = pool.run(1, "named_values", folder=str(tmp_path / "one"), gradient_accumulation_steps=2, **options)[0]
    many = pool.run(2, "named_values", folder=str(tmp_path / "many"), **options, **more)
    for rows in many:
        assert [set(row) for row in rows] == [set(row) for row in one]
        # With sharded parameters a value is taken to have the denominator of the loss, which is not that of "mean".
        names = ("ce", "long", "loss") if more else ("ce", "mean", "long", "loss")
        for row, expected in zip(rows, one, strict=True):
            assert {name: row[name] for name in names if name in row} == pytest.approx(
                {name: expected[name] for name in names if name in expected}, rel=1e-6
            )


def test_a_mixture_is_the_run_of_one_process_with_the_loss_of_each_source(pool: Pool, tmp_path: Path) -> None:
    options = {"per_device_train_batch_size": 2, "logging_steps": 2}
    one = pool.run(1, "mixed", folder=str(tmp_path / "one"), gradient_accumulation_steps=2, **options)[0]
    many = pool.run(2, "mixed", folder=str(tmp_path / "many"), **options)
    assert {"loss_web", "loss_code"} <= {name for row in one["rows"] for name in row}
    for each in many:
        assert all(float((each["weights"][name] - one["weights"][name]).abs().max()) < 1e-9 for name in one["weights"])
        for row, expected in zip(each["rows"], one["rows"], strict=True):
            assert {name: row[name] for name in row if name.startswith("loss")} == pytest.approx(
                {name: expected[name] for name in expected if name.startswith("loss")}, rel=1e-6
            )


@pytest.mark.parametrize("more", [pytest.param({}, marks=pytest.mark.grid), {"fsdp": True}], ids=["ddp", "fsdp"])
def test_averaged_weights_are_those_of_one_process_also_after_resuming(
    pool: Pool, tmp_path: Path, more: dict[str, Any]
) -> None:
    options = {"per_device_train_batch_size": 2}
    one = pool.run(1, "averaged", folder=str(tmp_path / "one"), gradient_accumulation_steps=2, **options)[0]
    folder = str(tmp_path / "many")
    whole = pool.run(2, "averaged", folder=folder, **options, **more)
    again = pool.run(2, "averaged", folder=folder, resume=f"{folder}/checkpoint-2", **options, **more)
    for each, resumed in zip(whole, again, strict=True):
        assert each["losses"] == pytest.approx(one["losses"], rel=1e-9)
        for name, value in one["averages"].items():
            assert float((each["averages"][name] - value).abs().max()) < 1e-9
            assert torch.equal(resumed["averages"][name], each["averages"][name])


def test_joined_generation_is_that_of_one_process(pool: Pool, tmp_path: Path) -> None:
    """21 batches for two ranks: one has a batch more, and windows end at other places."""
    (alone,) = pool.run(1, "joined_generation", folder=str(tmp_path), n=21, level="off")
    for found in pool.run(2, "joined_generation", folder=str(tmp_path), n=21, level="max"):
        assert found[3] >= 1 and found[4] is None
        for ours, expected in zip(found[:3], alone[:3], strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-12)
