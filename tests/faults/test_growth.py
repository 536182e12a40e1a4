"""Memory, the work of a save and the number of files do not grow with the length of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 1500
"""Memory for one row of the log history, its text in checkpoints included."""


def measured(folder: Path, kind: str, updates: int, timeout: float) -> list[dict[str, Any]]:
    """What a long run says of itself after a hundredth, a tenth and all of its updates."""
    command = [sys.executable, "-m", "tests.faults.growth_child", str(folder), kind, str(updates)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def is_flat(rows: list[dict[str, Any]], updates: int) -> None:
    first, tenth, last = rows
    assert [row["step"] for row in rows] == [updates // 100, updates // 10, updates]
    assert tenth["files"] == last["files"], rows  # from the third save on, the two newest checkpoints are kept
    grown = (last["rss"] - tenth["rss"]) * 1e6 / (updates - updates // 10)
    assert grown < MOST_BYTES, f"{grown:.0f} bytes an update: {rows}"
    is_as_much_work(tenth, last)
    print(rows)


def is_as_much_work(tenth: dict[str, Any], last: dict[str, Any]) -> None:
    """Of ten times as many rows: the same number of calls, and as much JSON, but for numbers with more digits."""
    assert last["calls"] < 1.02 * tenth["calls"] + 50, (tenth, last)
    assert 0 < last["characters"] < 1.1 * tenth["characters"], (tenth, last)


def test_a_run_of_4000_updates(tmp_path: Path) -> None:
    rows = measured(tmp_path, "numpy", 4000, timeout=60)
    first, tenth, last = rows
    assert tenth["files"] == last["files"] and last["rss"] - tenth["rss"] < 25, rows
    is_as_much_work(tenth, last)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_run_of_100000_updates(kind: str, tmp_path: Path) -> None:
    is_flat(measured(tmp_path, kind, 100_000, timeout=3000), 100_000)
