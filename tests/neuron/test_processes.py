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


def trained(launcher: list[str], folder: Path) -> list[Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(Path(__file__).with_name("member.py")), str(folder)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    found = [line[6:] for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, run.stderr[-3000:]
    return list(json.loads(found[0]))


def test_two_processes_with_zero_1_give_what_one_gives(tmp_path: Any) -> None:
    alone = trained([], tmp_path / "alone")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    shared = trained(launcher, tmp_path / "shared")
    assert alone[0] == "SingleDevice" and shared[0] == "FullySharded"
    assert shared[1:] == pytest.approx(alone[1:], abs=1e-6) and len(shared) == 6
