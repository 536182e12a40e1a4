"""Eight processes write checkpoints into one folder: nothing is lost, nothing is left over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loopwright.core.checkpoint.folder import is_staging
from loopwright.core.checkpoint.manager import CheckpointManager
from loopwright.core.checkpoint.manifest import damage, read_manifest
from loopwright.notices import Notices

from .pool import Pool

SAVING = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 1, "logging_strategy": "no"}


def assert_all_valid(folder: Path, steps: int) -> None:
    complete = CheckpointManager(folder, notices=Notices()).complete()
    assert sorted(complete) == list(range(1, steps + 1))
    for place in complete.values():
        manifest = read_manifest(Path(place))
        assert manifest is not None and damage(Path(place), manifest) is None
    assert not [path for path in folder.iterdir() if is_staging(path) or "shared" in path.name]


@pytest.mark.parametrize(
    ("times", "given"),
    [(12, {}), *(pytest.param(50, given, marks=pytest.mark.grid) for given in ({}, {"fsdp": True}))],
    ids=["ddp", "ddp, fifty times", "fsdp, fifty times"],
)
def test_eight_processes_save_again_and_again_on_one_folder(pool: Pool, tmp_path: Path, times: int, given: Any) -> None:
    pool.run(8, "trained", folder=str(tmp_path), max_steps=times, timeout=240, **SAVING, **given)
    assert_all_valid(tmp_path, times)


@pytest.mark.parametrize("given", [{}, {"fsdp": True}], ids=["ddp", "fsdp"])
def test_machines_that_share_a_folder_write_it_once(pool: Pool, tmp_path: Path, given: Any) -> None:
    """Two machines of two processes each, with save_on_each_node on one disk: their first processes would collide."""
    machines = [{"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"}, {"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"}]
    pool.run(
        4, "trained", folder=str(tmp_path), max_steps=3, save_on_each_node=True, by_rank=machines, **SAVING, **given
    )
    assert_all_valid(tmp_path, 3)


@pytest.mark.parametrize("given", [{}, {"fsdp": True}], ids=["ddp", "fsdp"])
def test_machines_with_disks_of_their_own_each_hold_whole_checkpoints(pool: Pool, tmp_path: Path, given: Any) -> None:
    machines = [{"LOCAL_RANK": str(rank % 2), "MACHINE": str(rank // 2)} for rank in range(4)]
    common = {"n": 12, "max_steps": 3, "save_on_each_node": True, **SAVING, **given}
    whole = pool.run(4, "on_machines", folder=str(tmp_path), by_rank=machines, **common)
    for machine in ("0", "1"):
        assert_all_valid(tmp_path / machine, 3)
        found = pool.run(1, "trained", folder=str(tmp_path / f"again-{machine}"), n=12, max_steps=3,
                         per_device_train_batch_size=1, gradient_accumulation_steps=4, logging_strategy="no",
                         resume=str(tmp_path / machine / "checkpoint-2"))[0]  # fmt: skip
        difference = max(float((found["weights"][k] - v).abs().max()) for k, v in whole[0]["weights"].items())
        assert difference < 1e-10
