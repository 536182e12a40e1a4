"""Several processes on lazy XLA end where one process on the CPU ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loopwright
from loopwright.xla.processes import spans_all
from tests.xla.member import SITUATIONS
from tests.xla.runs import losses, trainer

ROOT = Path(__file__).resolve().parents[2]
CLOSE = 1e-6
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def run_member(folder: Path, *launcher: str) -> dict[str, dict[str, Any]]:
    """What the first process found, by situation."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, *launcher, str(ROOT / "tests" / "xla" / "member.py"), str(folder)]
    settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=240, check=False)
    found = [json.loads(line[6:]) for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(found) == len(SITUATIONS), run.stderr[-3000:]
    return {each["situation"]: each for each in found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return run_member(folder / "alone")


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, Any]:
    return run_member(folder / "two", *TWO)


@pytest.mark.parametrize("situation", [name for name in SITUATIONS if name != "unused"])
def test_two_processes_end_where_one_ends(situation: str, folder: Path, alone: Any, two: Any) -> None:
    one, both = alone[situation], two[situation]
    assert (one["strategy"], both["strategy"]) == ("XlaDevice", "XlaProcesses")
    assert both["device"] == "xla" and both["alike"] and both["spans"] is False
    assert both["losses"] == pytest.approx(one["losses"], abs=CLOSE) and len(one["losses"]) >= 4
    assert both["again"] == pytest.approx(one["again"], abs=CLOSE), "after going on from a checkpoint"
    for mine, theirs in zip(both["weights"], one["weights"], strict=True):
        assert np.abs(np.array(mine) - np.array(theirs)).max() < CLOSE
    predicted, expected = np.array(both["predictions"]), np.array(one["predictions"])
    there = (predicted != -100) & (expected != -100)  # a batch of fewer rows may be less wide
    assert np.abs(predicted - expected)[there].max() < 5 * CLOSE and there.any()
    saved = [sorted(path.name for path in (folder / who / situation).glob("checkpoint-*")) for who in ("alone", "two")]
    assert saved[0] == saved[1] and len(saved[0]) >= 2


def test_a_parameter_one_process_does_not_use_is_shared_all_the_same(two: Any) -> None:
    assert two["unused"]["alike"]


def test_a_checkpoint_of_two_processes_goes_on_as_one(folder: Path, two: Any, tmp_path: Path) -> None:
    one = trainer("own", tmp_path, use_cpu=True, eval_strategy="epoch")
    one.train(resume_from_checkpoint=str(folder / "two" / "own" / "checkpoint-2"))
    assert losses(one) == pytest.approx(two["own"]["losses"], abs=CLOSE)


def test_sums_of_the_runtime_are_part_of_the_step(tmp_path: Path) -> None:
    """A world of one whose runtime adds up all the same: the collective is in the graph, and changes nothing."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1",
                   "XLA_ALWAYS_ALLREDUCE": "1"}  # fmt: skip
    command = [sys.executable, str(ROOT / "tests" / "xla" / "loopback.py"), str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert "GOOD" in run.stdout, run.stderr[-3000:]


def test_a_runtime_knows_all_processes_or_this_one() -> None:
    assert spans_all(8, 8) and not spans_all(1, 8) and spans_all(1, 1)
    with pytest.raises(loopwright.LoopwrightError, match="has 4 devices, but the launcher started 8 processes"):
        spans_all(4, 8)


def test_nothing_else_is_spread_over_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(loopwright.ArgumentsError, match="uses fsdp and processes"):
        trainer("own", tmp_path, fsdp="full_shard")
    with pytest.raises(loopwright.ArgumentsError, match="ddp_backend='gloo' does not support lazy XLA devices"):
        trainer("own", tmp_path, ddp_backend="gloo")
