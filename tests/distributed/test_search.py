"""A search on two ranks: each trial has a process group of its own, and a pruned one leaves no rank waiting."""

from __future__ import annotations

from pathlib import Path

import pytest

from .pool import Pool

pytest.importorskip("optuna", reason="Optuna is not installed")


@pytest.mark.parametrize(
    "in_process", [pytest.param(False, marks=pytest.mark.grid, id="apart"), pytest.param(True, id="here")]
)
def test_a_pruned_trial_leaves_no_rank_waiting(in_process: bool, pool: Pool, tmp_path: Path) -> None:
    """The first trial is pruned at its first evaluation, the second is not."""
    first, second = pool.run(2, "searched", folder=str(tmp_path), in_process=in_process, timeout=300)
    assert second["best"] is None and first["best"] == "1"
    assert first["states"] == [["PRUNED", 2], ["COMPLETE", 4]]
    assert first["checkpoint"] == str(tmp_path / "run-1" / "checkpoint-4") and Path(first["checkpoint"]).is_dir()
