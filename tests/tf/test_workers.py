"""Two worker processes on this machine train as one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from . import worker
from .tools import MARKS

pytestmark = MARKS

ROOT = Path(__file__).resolve().parents[2]


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def start(folder: Path, rank: int, workers: list[str], size: int, **more: str) -> Any:
    cluster = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    environment = {**os.environ, "SIZE": str(size), "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": f"{ROOT}/src:{ROOT}",
                   "TF_CPP_MIN_LOG_LEVEL": "3", "TF_CONFIG": json.dumps(cluster), **more}  # fmt: skip
    log = open(folder.parent / f"{folder.name}-{rank}.log", "wb")
    return subprocess.Popen(
        [sys.executable, "-m", "tests.tf.worker", str(folder), f"{folder}-{rank}.json"],
        env=environment, stdout=log, stderr=log, cwd=ROOT,
    )  # fmt: skip


def ended(processes: list[Any], folder: Path) -> tuple[list[int], list[str]]:
    """Exit codes and the last words of processes."""
    try:
        codes = [each.wait(timeout=240) for each in processes]
    finally:
        for each in processes:
            each.kill()
    return codes, [path.read_text(errors="replace")[-3000:] for path in sorted(folder.parent.glob("*.log"))]


def finish(processes: list[Any], folder: Path) -> list[dict[str, Any]]:
    codes, logs = ended(processes, folder)
    assert codes == [0] * len(codes), "\n".join(logs)
    return [json.loads(path.read_text()) for path in sorted(folder.parent.glob(f"{folder.name}-*.json"))]


def test_two_workers_equal_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one process is this one."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    both = [start(tmp_path / "two" / "run", rank, workers, 2) for rank in range(2)]
    monkeypatch.setenv("SIZE", "4")
    worker.main(str(tmp_path / "one" / "run"), str(tmp_path / "one.json"))
    one = json.loads((tmp_path / "one.json").read_text())
    first, second = finish(both, tmp_path / "two" / "run")
    assert (first["world"], second["world"], first["replicas"]) == ([0, 2], [1, 2], 2)
    for each in (first, second):
        assert each["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert each["norm"] == pytest.approx(one["norm"], rel=1e-4)
        assert each["weights"] == pytest.approx(one["weights"], rel=1e-4)
        assert each["eval"][0] == pytest.approx(one["eval"][0], rel=1e-4) and each["eval"][0][1] == 7
        assert each["predictions"][0] == pytest.approx(one["predictions"][0], rel=1e-3, abs=1e-5)
        assert len(each["predictions"]) == 5
    checkpoints = sorted(path.name for path in (tmp_path / "two" / "run").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-5"]


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({"RATE": "0.02"}, "learning_rate is 0.01 on rank 0 and 0.02 on rank 1"),
        pytest.param({"ROWS": "13"}, "len(train_dataset) is 14 on rank 0 and 13 on rank 1", marks=pytest.mark.grid),
    ],
)
def test_workers_that_differ_are_refused_on_both(tmp_path: Path, different: dict[str, str], words: str) -> None:
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    folder = tmp_path / "run"
    both = [start(folder, rank, workers, 2, **(different if rank else {})) for rank in range(2)]
    codes, logs = ended(both, folder)
    assert all(codes) and all("the ranks disagree" in log and words in log for log in logs), logs
