"""zero_1, the default: several processes share the optimizer state and end where one ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def trained(folder: Path) -> list[list[Any]]:
    """What one process found, and what two found."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("member.py")), str(folder)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    found = [json.loads(line[6:]) for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    assert run.returncode == 0 and len(found) == 2, run.stderr[-3000:]
    return found


def test_two_processes_with_zero_1_give_what_one_gives(tmp_path: Any) -> None:
    alone, shared = trained(tmp_path)
    assert alone[0] == "SingleDevice" and shared[0] == "FullySharded"
    assert shared[1:] == pytest.approx(alone[1:], abs=1e-6) and len(shared) == 6
