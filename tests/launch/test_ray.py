"""The same script on Ray Train workers, on a real Ray of this machine."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from loopwright.errors import ArgumentsError
from loopwright.launch.machine import Machine
from loopwright.launch.on_ray import settings, workers

from .jobs import SCRIPTS, launched
from .test_words import asked

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")


@pytest.mark.parametrize(("text", "found"), [("1", 1), ("4", 4), ("1:4", (1, 4)), ("3:3", (3, 3))])
def test_workers_are_a_number_or_bounds(text, found):
    assert workers(text) == found


@pytest.mark.parametrize("text", ["0", "x", "4:2", "0:3", ":", "1:"])
def test_bad_numbers_are_refused(text):
    with pytest.raises(ArgumentsError, match="--ray"):
        workers(text)


def test_what_ray_is_asked_for():
    gpus = settings(asked("--ray", "1:4", "--threads", "3", "--name", "n", "train.py"), Machine(2, 8, "cuda"))
    assert gpus["workers"] == (1, 4) and gpus["use_gpu"] and gpus["backend"] == "nccl"
    assert gpus["resources"] == {"CPU": 3, "GPU": 1} and gpus["name"] == "n"
    plain = settings(asked("--ray", "2", "--max-restarts", "0", "train.py"), Machine(0, 8))
    assert plain["backend"] == "gloo" and plain["resources"] == {"CPU": 1} and plain["restarts"] == 0


@needs_ray
@pytest.mark.parametrize(
    ("how", "code"),
    [
        (["fine"], 0),
        pytest.param(["code", "75"], 75, marks=pytest.mark.grid),
        pytest.param(["error"], 1, marks=pytest.mark.grid),
    ],
)
def test_a_script_runs_on_ray(how, code, tmp_path):
    more = {"RAY_TMPDIR": f"/tmp/r{os.getpid()}"}  # short: sockets live below it
    options = ["--ray", "2", "--max-restarts", "0", "--ray-storage", str(tmp_path / "ray")]
    words = [*options, str(SCRIPTS / "adds_up.py"), *how]
    ended, text = launched(words, tmp_path, more=more, seconds=150)
    assert ended == code, text
    assert "rank 0 of 2 sum 3" in text
    if code == 1:
        assert "rank 1 has had enough" in text
