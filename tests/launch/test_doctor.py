"""`loopwright doctor` on real processes: alone, and as one of many under the launcher."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from loopwright.cli.commands.doctor import backends, connection_rows
from loopwright.launch.checkup import bus_share, missing, pairs

from .jobs import launched, variables


def test_it_starts_its_own_processes_and_measures(tmp_path):
    command = [sys.executable, "-m", "loopwright", "doctor", "-n", "2", "--megabytes", "2", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=variables(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    found = report["connection"]
    assert report["backends"]["gloo"] == "available" and "torch" in report["environment"]
    assert found["world"] == 2 and found["sum"] == 3 and found["backend"] == "gloo" and len(set(found["hosts"])) == 2
    assert set(found["pairs_mb_s"]) == {"0-1"} and min(found["pairs_mb_s"].values()) > 0
    assert found["bus_mb_s"] == pytest.approx(found["bandwidth_mb_s"])
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_under_the_launcher_it_is_one_of_many(tmp_path):
    code, text = launched(["-n", "2", "-m", "loopwright", "doctor", "--megabytes", "1"], tmp_path)
    assert code == 0, text
    assert "2 through gloo" in text and "ranks 0-1" in text and "all-reduce" in text


def test_a_rank_that_does_not_come_is_named(tmp_path):
    """One process of two is started: after the time it names the other."""
    more = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    from .jobs import free_port

    more["MASTER_PORT"] = str(free_port())
    command = [sys.executable, "-m", "loopwright", "doctor", "--timeout", "2"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**variables(), **more}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "1 of 2 ranks did not join within 2 s: 1 " in done.stderr and "rank 0 on" in done.stderr


@pytest.mark.parametrize(("world", "count"), [(1, 0), (2, 1), (3, 3), (8, 28), (9, 9), (64, 64)])
def test_pairs_are_all_or_neighbours(world, count):
    found = pairs(world)
    assert len(found) == len({frozenset(pair) for pair in found}) == count
    assert {rank for pair in found for rank in pair} == (set(range(world)) if world > 1 else set())


def test_an_all_reduce_moves_two_shares_of_the_others():
    assert [bus_share(n) for n in (1, 2, 4)] == [0, 1, 1.5]


def test_texts():
    assert "2 of 3 ranks" in missing({1: "b"}, 3, 5) and "rank 1 on b" in missing({1: "b"}, 3, 5)
    assert set(backends()) == {"gloo", "nccl", "mpi", "ucc", "xccl"}
    figures = {
        "world": 2,
        "backend": "gloo",
        "device": "cpu",
        "hosts": ["a", "b"],
        "sum": 3.0,
        "latency_us": 10.0,
        "bandwidth_mb_s": 5.0,
        "bus_mb_s": 5.0,
        "megabytes": 1.0,
        "pairs_mb_s": {"0-1": 4.0, "0-2": 2.0},
    }
    rows = dict(connection_rows(figures))
    assert rows["  rank 1"] == "b" and "slowest" in rows["  ranks 0-2"] and "slowest" not in rows["  ranks 0-1"]
