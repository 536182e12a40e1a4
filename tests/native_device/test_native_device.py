"""A device that is not part of torch gives the results of the CPU, to the last bit."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.native_device import device
from tests.native_device.contract import CASES

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 400
pytestmark = pytest.mark.xdist_group("native_device")  # built and run once


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the contract said, case by case; one process runs all of it."""
    reason = device.missing()
    if reason:
        pytest.skip(reason)
    library = device.build(Path(request.config.cache.mkdir("native_device")))
    script = ROOT / "tests" / "native_device" / "contract.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(library), str(tmp_path_factory.mktemp("contract"))]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    found = dict(json.loads(line[5:]) for line in run.stdout.splitlines() if line.startswith("CASE "))
    assert run.returncode == 0, run.stderr[-3000:]
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_device_gives_what_the_cpu_gives(outcome: dict[str, Any], name: str) -> None:
    assert name in outcome, "the contract ended before this case"
    assert outcome[name] is None, outcome[name]


ALLOWED = {
    "args/legacy.py", "args/groups/precision.py", "args/names.py",  # names of old arguments and values
    "pt/devices.py",  # whether a card has bf16 itself cannot be asked by trying
    "pt/accelerate/accelerator.py",  # the word for several GPUs in accelerate
    "pt/checkpoint/transformers_format.py",  # the key transformers' checkpoints use
    "pt/acceleration.py",  # CUDA graphs
    # the communication libraries torch itself knows by device
    "pt/distributed/process_group.py", "pt/distributed/shared_devices.py",
    "pt/strategies/single.py",  # clipping inside the fused optimizer, which was proved equal on CUDA only
}  # fmt: skip


def test_core_args_and_pt_name_no_device() -> None:
    """Code that asks for a device by name serves no other one; speed/ holds kernels, which are for one kind."""
    package = ROOT / "src" / "loopwright"
    named = set()
    for room in ("core", "args", "callbacks", "reporters", "pt"):
        for path in (package / room).rglob("*.py"):
            words = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
            if words & {"cuda", "mps", "xpu", "hip", "neuron", "tpu"} - {"mps"}:
                named.add(path.relative_to(package).as_posix())
    assert named <= ALLOWED
