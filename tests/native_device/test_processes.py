"""Two processes with the test device end where one ends, with DDP, FSDP2 and DTensor as torch has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.native_device import device
from tests.native_device.member import SITUATIONS

ROOT = Path(__file__).resolve().parents[2]
STRATEGIES = {"sharded": "FullySharded", "layers split": "TensorParallel"}
CLOSE = 1e-10  # tiny models in double precision; sums over processes add up in another order
pytestmark = pytest.mark.xdist_group("native_device")  # built and run once


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """What one process and what two processes found, by their number and the situation."""
    reason = device.missing()
    if reason:
        pytest.skip(reason)
    library = device.build(Path(request.config.cache.mkdir("native_device")))
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    script = ROOT / "tests" / "native_device" / "member.py"
    command = [sys.executable, str(script), str(library), str(tmp_path_factory.mktemp("processes"))]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    lines = [json.loads(line[6:]) for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    assert run.returncode == 0 and len(lines) == 2 * len(SITUATIONS), run.stderr[-3000:]
    return {(line["world"], line["situation"]): line for line in lines}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_two_processes_end_where_one_ends(situation: str, found: dict[Any, Any]) -> None:
    one, two = found[1, situation], found[2, situation]
    assert one["strategy"] == "SingleDevice" and two["strategy"] == STRATEGIES.get(situation, "DataParallel")
    assert two["losses"] == pytest.approx(one["losses"], abs=CLOSE) and len(one["losses"]) >= 6
    assert two["weights"] == pytest.approx(one["weights"], abs=CLOSE), "as they are saved"
