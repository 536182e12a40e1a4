"""Any layout loads into any other: saved on some processes, resumed on others, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loopwright.core.checkpoint.manifest import damage, read_manifest
from loopwright.pt.checkpoint.tensors import read_tensors

from .pool import Pool
from .test_contract import assert_same_run, zero

PLAN = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp-2": (2, {}),
    "ddp-3": (3, {}),
    "ddp-4": (4, {}),
    "fsdp-1": (1, {"fsdp": True}),
    "fsdp-2": (2, {"fsdp": True}),
    "fsdp-3": (3, {"fsdp": True}),
    "fsdp-4": (4, {"fsdp": True}),
    "fsdp-2-whole": (2, {"fsdp": True, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}),
    "tp-2": (2, {"parallelism_config": {"tp_size": 2, "tp_plan": PLAN}}),
    "tp-2-fsdp-2": (4, {"fsdp": True, "parallelism_config": {"tp_size": 2, "tp_plan": PLAN}}),
    "hsdp-4": (4, {"parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2}}),
}
COMMON = {"n": 20, "per_device_train_batch_size": 1, "num_train_epochs": 1, "save_strategy": "steps", "save_steps": 1}
TOTAL = 12
"""Samples of an update: what 1, 2, 3 and 4 processes can share out evenly, leaving a ragged tail."""


def run(pool: Pool, layout: str, folder: Path, **options: Any) -> Any:
    world, given = LAYOUTS[layout]
    parts = world // given.get("parallelism_config", {}).get("tp_size", 1)
    return pool.run(
        world,
        "trained",
        folder=str(folder),
        gradient_accumulation_steps=TOTAL // parts,
        **{**COMMON, **given, **options},
    )


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: Any) -> Any:
    """The run that is never interrupted."""
    return run(pool, "single", tmp_path_factory.mktemp("whole"))[0]


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: Any) -> Any:
    """A checkpoint of the first of two updates, in each layout."""
    folders: dict[str, Path] = {}

    def folder_of(layout: str) -> Path:
        if layout not in folders:
            folders[layout] = tmp_path_factory.mktemp(layout)
            run(pool, layout, folders[layout])
        return folders[layout] / "checkpoint-1"

    return folder_of


def pairs() -> list[Any]:
    """Every pair of layouts; a spread in which each comes once before and once after runs always."""
    names = list(LAYOUTS)
    spread = {(name, names[(k + 5) % len(names)]) for k, name in enumerate(names)}
    every = [(before, after) for before in names for after in names]
    return [pair if pair in spread else pytest.param(*pair, marks=pytest.mark.grid) for pair in every]


@pytest.mark.parametrize(("before", "after"), pairs())
def test_any_layout_goes_on_in_any_other(
    pool: Pool, tmp_path: Path, saved: Any, whole: Any, before: str, after: str
) -> None:
    checkpoint = saved(before)
    manifest = read_manifest(checkpoint)
    assert manifest is not None and damage(checkpoint, manifest) is None
    for each in run(pool, after, tmp_path, resume=str(checkpoint)):
        assert_same_run(each, whole)


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_goes_on_from_its_own_checkpoints_and_its_weights_load_anywhere(
    pool: Pool, tmp_path: Path, stage: int
) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    given = {"model": "blocks-single", "deepspeed": zero(stage)}
    pool.close()
    whole = run(pool, "ddp-2", tmp_path / "zero", timeout=180, **given)[0]
    pool.close()
    again = run(pool, "ddp-2", tmp_path / "two", timeout=180, resume=str(tmp_path / "zero" / "checkpoint-1"), **given)
    assert_same_run(again[0], whole, 1e-5)
    pool.close()
    last = read_tensors(tmp_path / "zero" / "checkpoint-2" / "model.safetensors")
    assert max(float((last[name] - value).abs().max()) for name, value in whole["weights"].items()) < 1e-6
