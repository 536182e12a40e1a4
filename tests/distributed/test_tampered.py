"""The state of a rank in a checkpoint (ranks/00001.json) with other values than those saved.

All ranks stop, and the error of the rank that reads it names the file; or the run is the one that was saved.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.tampering import cases, tampered

from .pool import Pool

OPTIONS = {"n": 12, "model": "noisy", "seed": 1, "save_strategy": "steps", "save_steps": 2, "max_steps": 4,
           "per_device_train_batch_size": 1, "async_save": False, "ddp_broadcast_buffers": False}  # fmt: skip
NAME = "ranks/00001.json"
FREE = re.compile(r"parts\.(loss|speed|spikes)|parts\.buffers\.[\w.]+ missing")
"""See `SavedRun.free`."""
ALONE = {"looks": 99, "kind": None, "shift": None, "stamp": "of another loss", "rivals": []}
"""Valid properties of a loss with which one rank would test it when the others do not."""


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run of two ranks with a checkpoint of step 2, and what it became."""
    folder = tmp_path_factory.mktemp("ranks") / "run"
    whole = pool.run(2, "trained", folder=str(folder), **OPTIONS)
    shutil.rmtree(folder / "checkpoint-4")
    return folder, whole


def problem(pool: Pool, saved: tuple[Path, Any], place: Path, content: bytes) -> str | None:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(saved[0], place)
    tampered(place / "checkpoint-2", NAME, content)
    ends = pool.outcomes(2, "trained", folder=str(place), resume=str(place / "checkpoint-2"), timeout=120, **OPTIONS)
    if [each.kind for each in ends] == ["returned", "returned"]:
        same = all(
            torch.equal(value, one["weights"][name])
            for one, other in zip(saved[1], (each.value for each in ends), strict=True)
            for name, value in other["weights"].items()
        )
        return None if same else "trained on silently, with other numbers"
    if ends[1].kind == "raised" and "CheckpointError" in ends[1].value and "00001.json" in ends[1].value:
        return None if ends[0].kind != "returned" else "rank 0 trained alone"
    return f"{ends[0].kind}, {ends[1].kind}: {ends[1].value}"


def wrong(pool: Pool, saved: Any, place: Path, *, first: int, step: int) -> dict[str, str]:
    found = {}
    for case, content in list(cases(saved[0] / "checkpoint-2", NAME))[first::step]:
        what = problem(pool, saved, place, content)
        if what is not None and (" silently" not in what or not FREE.search(case)):
            found[case] = what
    return found


def test_some_changes_of_the_state_of_a_rank(pool: Pool, saved: Any, tmp_path: Path) -> None:
    assert wrong(pool, saved, tmp_path / "run", first=4, step=250) == {}


@pytest.mark.parametrize("name", ALONE)
def test_a_rank_that_has_read_another_state_is_refused(pool: Pool, saved: Any, tmp_path: Path, name: str) -> None:
    """Otherwise the ranks would call different collectives, and torch would abort the processes."""
    shutil.copytree(saved[0], tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoint-2"
    document = json.loads((checkpoint / NAME).read_text())
    document["parts"]["loss"][name] = ALONE[name]
    tampered(checkpoint, NAME, json.dumps(document).encode())
    ends = pool.outcomes(2, "trained", folder=str(checkpoint.parent), resume=str(checkpoint), timeout=120, **OPTIONS)
    for end in ends:
        assert end.kind == "raised" and "CheckpointError: checkpoint-2" in end.value
        assert "the ranks have read different states of the run: loss." in end.value


@pytest.mark.grid
@pytest.mark.slow
def test_all_changes_of_the_state_of_a_rank(pool: Pool, saved: Any, tmp_path: Path) -> None:
    assert wrong(pool, saved, tmp_path / "run", first=0, step=1) == {}
