"""One epoch on 1, 2, 4 and again 1 process: every sample is used once, and the result is that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .pool import Pool
from .test_contract import assert_same_run

PHASES = [(1, 2), (2, 3), (4, 4), (1, 0)]
"""Processes, and the update whose end they do not live to save (0: they live)."""


def samples_by_update(folder: Path) -> dict[int, list[int]]:
    """The samples of each update, in the life that finished it: a later life does an unsaved one again."""
    found: dict[int, tuple[int, list[int]]] = {}
    for path in sorted(folder.glob("run-*.txt")):
        phase = int(path.stem.split("-")[1])
        for line in path.read_text().splitlines():
            update, sample = map(int, line.split())
            last, ids = found.get(update, (phase, []))
            if phase > last:
                last, ids = phase, []
            if phase == last:
                found[update] = (last, [*ids, sample])
    return {update: ids for update, (_, ids) in found.items()}


@pytest.mark.parametrize("how", ["fail", pytest.param("kill", marks=pytest.mark.grid)])
@pytest.mark.parametrize("given", [{}, {"fsdp": True}], ids=["ddp", "fsdp"])
def test_an_epoch_on_changing_processes_is_the_epoch_of_one(pool: Pool, tmp_path: Path, how: str, given: Any) -> None:
    whole = pool.run(1, "elastic", folder=str(tmp_path / "whole"), phase=0, stop_at=0)[0]
    folder = tmp_path / "run"
    for phase, (world, stop_at) in enumerate(PHASES[:-1]):
        pool.send(world, "elastic", folder=str(folder), phase=phase, stop_at=stop_at, how=how, **given)
        endings = pool.endings(world, timeout=90)
        assert all(each.kind in ("raised", "ended") for each in endings), endings
    (last,) = pool.run(1, "elastic", folder=str(folder), phase=3, stop_at=0, **given)
    assert_same_run(last, whole)
    shown = samples_by_update(tmp_path)
    assert sorted(sample for ids in shown.values() for sample in ids) == list(range(20)), "every sample once"
    assert {len(ids) for ids in shown.values()} == {4}, "updates stay as large as they were"
    assert (folder / "checkpoint-5").is_dir()
