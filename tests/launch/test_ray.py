"""The same script on Ray Train workers, on a real Ray of this machine."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from importlib.util import find_spec

import pytest

from loopwright.errors import ArgumentsError
from loopwright.launch.machine import Machine
from loopwright.launch.on_ray import settings, workers

from .jobs import LAUNCH, SCRIPTS, job, launched
from .runs import TRAIN, assert_same_run, checkpoints, hurry, lines, undisturbed
from .test_command_line import asked

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")


@pytest.fixture
def ray_folder():
    """Where Ray keeps its sockets: their paths must be short."""
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


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
def test_a_script_runs_on_ray(how, code, ray_folder, tmp_path):
    options = ["--ray", "2", "--max-restarts", "0", "--ray-storage", str(tmp_path / "ray")]
    words = [*options, str(SCRIPTS / "adds_up.py"), *how]
    ended, text = launched(words, tmp_path, more={"RAY_TMPDIR": ray_folder}, seconds=240)
    assert ended == code, text
    assert "rank 0 of 2 sum 3" in text
    if code == 1:
        assert "rank 1 has had enough" in text


@needs_ray
@pytest.mark.grid
def test_a_trainer_on_ray_survives_a_killed_worker(ray_folder, tmp_path):
    """Ray starts the workers again; the run resumes from its last checkpoint and ends like the undisturbed one."""
    run = tmp_path / "run"
    reference = undisturbed(str(tmp_path / "undisturbed"))
    words = ["--ray", "2", "--ray-storage", str(tmp_path / "ray"), TRAIN, "--output", str(run), "--seconds", "0.3"]
    with job([*LAUNCH, *words], tmp_path, more={"RAY_TMPDIR": ray_folder}) as started:
        started.until(lambda: len(checkpoints(run)) >= 2, seconds=240)
        ranks = {int(path.stem.split("-")[1]): int(path.stem.split("-")[2]) for path in run.glob("updates-*.jsonl")}
        os.kill(ranks[1], signal.SIGKILL)
        hurry(run)
        assert started.wait(300) == 0, started.text()
    assert_same_run(run, reference, 64)
    assert len([line for line in lines(run) if line["step"] == 1]) == 1  # it did not begin again
