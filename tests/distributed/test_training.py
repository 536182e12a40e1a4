"""Everything else a run does, on several processes: evaluating, noise, workers, streams, bad numbers, generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from .pool import Pool
from .test_contract import assert_same_run, differences

BOTH = pytest.mark.parametrize("given", [{}, {"fsdp": True}], ids=["ddp", "fsdp"])
SMALL = {"per_device_train_batch_size": 1}


@BOTH
def test_evaluations_and_the_best_model_are_those_of_one_process(pool: Pool, tmp_path: Path, given: Any) -> None:
    one = pool.run(1, "with_evaluation", folder=str(tmp_path / "one"), gradient_accumulation_steps=2, **SMALL)[0]
    many = pool.run(2, "with_evaluation", folder=str(tmp_path / "many"), **SMALL, **given)
    assert any("eval_loss" in row for row in one["logs"])
    for each in many:
        assert_same_run(each, one)


def test_gradients_travel_once_per_update(pool: Pool, tmp_path: Path) -> None:
    for kept, steps, *_ in pool.run(2, "synchronized", folder=str(tmp_path), gradient_accumulation_steps=3, **SMALL):
        assert (kept, steps) == (2 * 2, 2), "two of three micro-batches keep their gradients"


def test_ddp_is_told_its_options(pool: Pool, tmp_path: Path) -> None:
    options = {"ddp_bucket_cap_mb": 3, "ddp_broadcast_buffers": False, "ddp_static_graph": True,
               "ddp_find_unused_parameters": False}  # fmt: skip
    for kept, _, told, bucket in pool.run(
        2, "synchronized", folder=str(tmp_path), gradient_accumulation_steps=3, **SMALL, **options
    ):
        assert told == {"find_unused_parameters": False, "broadcast_buffers": False, "static_graph": True}
        assert bucket == 3 * 2**20
        assert kept == 2, "a static graph is recorded in the first update, while gradients travel"


def test_a_static_graph_ends_with_the_weights_of_one_process(pool: Pool, tmp_path: Path) -> None:
    given = {"n": 11, "num_train_epochs": 2, **SMALL}
    one = pool.run(1, "trained", folder=str(tmp_path / "one"), gradient_accumulation_steps=4, **given)[0]
    found = pool.run(
        2, "trained", folder=str(tmp_path / "two"), gradient_accumulation_steps=2, ddp_static_graph=True, **given
    )
    for each in found:
        assert_same_run(each, one)


def test_random_streams_and_buffers_of_each_process_come_back(pool: Pool, tmp_path: Path) -> None:
    given = {"model": "noisy", "n": 12, "save_strategy": "steps", "save_steps": 2, **SMALL}
    whole = pool.run(2, "trained", folder=str(tmp_path / "whole"), **given)
    again = pool.run(
        2, "trained", folder=str(tmp_path / "again"), resume=str(tmp_path / "whole" / "checkpoint-4"), **given
    )
    for each, expected in zip(again, whole, strict=True):
        assert differences(each, expected) == 0.0
    records = [json.loads(path.read_text()) for path in sorted((tmp_path / "whole/checkpoint-4/ranks").iterdir())]
    assert len(records) == 2 and records[0]["rng"]["torch"] != records[1]["rng"]["torch"]


def test_checkpoints_with_noise_go_on_with_other_processes(pool: Pool, tmp_path: Path) -> None:
    given = {"model": "noisy", "n": 12, "save_strategy": "steps", "save_steps": 2, **SMALL}
    pool.run(2, "trained", folder=str(tmp_path / "two"), **given)
    checkpoint = str(tmp_path / "two" / "checkpoint-2")
    for world in (1, 3):
        found = pool.run(world, "trained", folder=str(tmp_path / str(world)), resume=checkpoint, **given)
        assert {each["samples"] for each in found} == {24}, "two epochs, each sample once"


def test_ranks_that_join_at_a_checkpoint_of_transformers_have_their_own_random_states(
    pool: Pool, tmp_path: Path
) -> None:
    given = {"n": 12, "save_strategy": "steps", "save_steps": 2, **SMALL, "checkpoint_format": "transformers"}
    pool.run(1, "trained", folder=str(tmp_path / "one"), **given)
    checkpoint = tmp_path / "one" / "checkpoint-2"
    for name in ("progress.json", "manifest.json"):  # transformers has no such files
        (checkpoint / name).unlink()
    given["resume"] = str(checkpoint)
    one = pool.run(1, "states_at_start", folder=str(tmp_path / "again"), **given)
    two = pool.run(2, "states_at_start", folder=str(tmp_path / "two"), **given)
    assert two[0] == one[0] != two[1]


@pytest.mark.parametrize("is_edited", [True, False], ids=["of transformers", "with our progress"])
def test_a_checkpoint_with_files_of_transformers_resumes_with_shards(
    pool: Pool, tmp_path: Path, is_edited: bool
) -> None:
    given = {"n": 12, "save_strategy": "steps", "save_steps": 2, **SMALL, "checkpoint_format": "transformers"}
    whole = pool.run(1, "trained", folder=str(tmp_path / "one"), gradient_accumulation_steps=2, **given)[0]
    checkpoint = tmp_path / "one" / "checkpoint-2"
    for name in ("progress.json", "manifest.json") if is_edited else ():
        (checkpoint / name).unlink()
    given |= {"resume": str(checkpoint), "fsdp": True, "checkpoint_format": "native"}
    for each in pool.run(2, "trained", folder=str(tmp_path / "two"), **given):
        assert differences(each, whole) < 1e-10


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wish_of_a_callback_that_one_process_has_is_everybodys(pool: Pool, tmp_path: Path, rank: int) -> None:
    pool.run(2, "wished", folder=str(tmp_path), rank=rank, save_strategy="no", per_device_train_batch_size=2)
    assert [each.name for each in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_random_draws_of_samples_do_not_know_who_loads_them(pool: Pool, tmp_path: Path) -> None:
    one = pool.run(1, "drawn", folder=str(tmp_path / "one"), gradient_accumulation_steps=2)[0]
    for each in pool.run(2, "drawn", folder=str(tmp_path / "two")):
        assert_same_run(each, one)


@pytest.mark.parametrize("worlds", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_a_stream_goes_on_where_it_was_on_any_number_of_processes(pool: Pool, tmp_path: Path, worlds: Any) -> None:
    first, second = worlds
    given = {"folder": str(tmp_path), "gradient_accumulation_steps": 2 // first}
    before = pool.run(first, "streamed", stop_at=3, **given)
    after = pool.run(second, "streamed", stop_at=0, **given)
    # The third update was not saved before the first life ended, so the second does it again.
    done = [batch for seen in before for batch in seen[: 4 // first]]
    rest = [batch for seen in after for batch in seen]
    assert sorted(number for batch in [*done, *rest] for number in batch) == list(range(24))


@BOTH
def test_an_update_that_is_not_finite_on_one_process_is_left_out_on_all(pool: Pool, tmp_path: Path, given: Any) -> None:
    common = {"model": "poisoned", "n": 12, "on_nonfinite": "skip", "num_train_epochs": 1, **SMALL}
    one = pool.run(1, "trained", folder=str(tmp_path / "one"), gradient_accumulation_steps=2, **common)[0]
    many = pool.run(2, "trained", folder=str(tmp_path / "many"), **common, **given)
    for each in many:
        assert differences(each, one) <= 1e-10
        assert all(torch.isfinite(value).all() for value in each["weights"].values())


def test_a_run_that_stops_at_bad_numbers_writes_one_incident(pool: Pool, tmp_path: Path) -> None:
    common = {"model": "poisoned", "n": 12, "on_nonfinite": "raise", "num_train_epochs": 1, **SMALL}
    outcomes = pool.outcomes(2, "trained", folder=str(tmp_path), **common)
    assert all(each.kind == "raised" and "NonFiniteError" in each.value for each in outcomes)
    assert len(list(tmp_path.glob("incident-step-*"))) == 1


@BOTH
def test_generation_is_the_same_on_several_processes(pool: Pool, tmp_path: Path, given: Any) -> None:
    (ids, loss), *_ = pool.run(1, "generated", folder=str(tmp_path / "one"))
    more = {"optim": "adamw_torch"} if given else {}
    for found, other in pool.run(2, "generated", folder=str(tmp_path / "two"), **given, **more):
        assert found == ids and other == pytest.approx(loss, rel=1e-9)
