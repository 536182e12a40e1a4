"""Any layout loads into any other: saved on some processes, resumed on others, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loopwright.core.checkpoint.manifest import damage, read_manifest

from .pool import Pool
from .test_contract import assert_same_run

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp-2": (2, {}),
    "ddp-3": (3, {}),
    "ddp-4": (4, {}),
}
COMMON = {"n": 20, "per_device_train_batch_size": 1, "num_train_epochs": 1, "save_strategy": "steps", "save_steps": 1}
TOTAL = 12
"""Samples of an update: what 1, 2, 3 and 4 processes can share out evenly, leaving a ragged tail."""


def run(pool: Pool, layout: str, folder: Path, **options: Any) -> Any:
    world, given = LAYOUTS[layout]
    return pool.run(
        world,
        "trained",
        folder=str(folder),
        gradient_accumulation_steps=TOTAL // world,
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


@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
def test_any_layout_goes_on_in_any_other(
    pool: Pool, tmp_path: Path, saved: Any, whole: Any, before: str, after: str
) -> None:
    checkpoint = saved(before)
    manifest = read_manifest(checkpoint)
    assert manifest is not None and damage(checkpoint, manifest) is None
    for each in run(pool, after, tmp_path, resume=str(checkpoint)):
        assert_same_run(each, whole)
