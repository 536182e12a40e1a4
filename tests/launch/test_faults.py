"""Trouble in real runs under the launcher and under torchrun itself: late ranks, errors, signals, kills."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from .jobs import LAUNCH, descendants, job
from .runs import TRAIN, assert_same_run, checkpoints, hurry, last_step, lines, run_here, undisturbed

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ROWS = 64


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return undisturbed(str(tmp_path_factory.mktemp("undisturbed")))


def logs(folder: Path, rank: int, attempt: int = 0) -> str:
    return "".join(path.read_text() for path in folder.glob(f"loopwright-logs/*/attempt_{attempt}/{rank}/*.log"))


def test_a_late_rank_is_named_with_its_phase_and_stack_before_the_timeout(tmp_path):
    """Rank 1 does not come out of its data; rank 0 says so while it still waits."""
    words = ["-n", "2", TRAIN, "--output", str(tmp_path / "run"), "--sleep", "1:3", "--timeout", "30"]
    with job([*LAUNCH, *words], tmp_path) as started:
        started.until(lambda: "late: rank 1" in started.text(), seconds=240)
        text = started.text()
        assert "is at step 2, in callbacks" in text and "stuck_in_the_data" in text and "time.sleep(600)" in text
        assert "Timed out" not in text  # nothing has given up yet


@pytest.mark.grid  # always on: the same in tests/distributed/test_faults.py, without the launcher
def test_an_error_on_one_rank_stops_all_with_that_error(tmp_path):
    words = ["-n", "2", TRAIN, "--output", str(tmp_path / "run"), "--error", "1:3", "--timeout", "300"]
    with job([*LAUNCH, *words], tmp_path) as started:
        started.until(lambda: "cannot go on" in logs(tmp_path, 1), seconds=240)
        failed = time.monotonic()
        assert started.wait(300) == 1
        assert time.monotonic() - failed < 60  # and not the 300 seconds of the timeout
        # Which process is gone first is a matter of luck; each of them says why.
        assert "failed first" in started.text() and "rank 1 cannot go on at step 3" in started.text()


@pytest.mark.parametrize(
    ("target", "workers"),
    [("everyone", 1), *(pytest.param(each, 0, marks=pytest.mark.grid) for each in ("rank 0", "launcher"))],
)
def test_a_signal_at_any_place_saves_one_checkpoint_and_the_same_command_goes_on(target, workers, tmp_path, reference):
    """Every process leaves at the same step, with 75; started again, the run ends where the undisturbed one does."""
    run = tmp_path / "run"
    words = [*LAUNCH, "-n", "2", TRAIN, "--output", str(run), "--save-steps", "1000", "--workers", str(workers),
             "--seconds", "0.3"]  # fmt: skip
    step = stopped_by_a_signal(words, target, tmp_path)
    hurry(run)
    with job(words, tmp_path) as started:
        assert started.wait(300) == 0, started.text()
        assert f"resuming the interrupted run from checkpoint-{step}" in started.text()
    assert_same_run(run, reference, ROWS)


def test_a_job_with_a_name_goes_on_with_other_arguments(tmp_path, reference, caplog):
    """Its name is reason enough, also with another number of processes; here the second start is this process."""
    run = tmp_path / "run"
    options = ["--output", str(run), "--save-steps", "1000"]
    words = [*LAUNCH, "-n", "2", "--rdzv-id", "the-job", TRAIN, *options, "--seconds", "0.3"]
    step = stopped_by_a_signal(words, "rank 1", tmp_path)
    run_here(*options, TORCHELASTIC_RUN_ID="the-job")
    assert f"resuming from {run}/checkpoint-{step}" in caplog.text
    assert_same_run(run, reference, ROWS)


def stopped_by_a_signal(words: list[str], target: str, folder: Path) -> int:
    """Start a run of two ranks and stop it by SIGTERM after two steps; returns the step it has saved."""
    run = folder / "run"
    with job(words, folder) as started:
        started.until(lambda: last_step(run) >= 2)
        ranks = {int(path.stem.split("-")[1]): int(path.stem.split("-")[2]) for path in run.glob("updates-*.jsonl")}
        # A scheduler that ends a job signals all of its processes, and the launcher passes on what it got.
        everyone = [started.process.pid, *descendants(started.process.pid)]
        chosen = {"launcher": everyone[:1], "everyone": everyone}.get(target) or [ranks[int(target[-1])]]
        for pid in chosen:
            os.kill(pid, signal.SIGTERM)
        assert started.wait(300) == 75, started.text()
        assert "every worker saved and stopped; the same command resumes from there" in started.text()
    (step,) = checkpoints(run)
    assert {max(line["step"] for line in lines(run, rank)) for rank in (0, 1)} == {step}
    return step


@pytest.mark.parametrize("command", ["launch", pytest.param("torchrun", marks=pytest.mark.grid)])
def test_a_killed_rank_brings_the_job_back_from_the_last_checkpoint(command, tmp_path, reference):
    run = tmp_path / "run"
    options = ["--max-restarts", "1", "--nproc-per-node", "2"]
    words = [*(LAUNCH if command == "launch" else TORCHRUN), *options, TRAIN, "--output", str(run)]
    with job([*words, "--seconds", "0.3"], tmp_path) as started:
        started.until(lambda: len(checkpoints(run)) >= 3)
        killed = {int(path.stem.split("-")[1]): int(path.stem.split("-")[2]) for path in run.glob("updates-*.jsonl")}
        os.kill(killed[1], signal.SIGKILL)
        hurry(run)
        assert started.wait(300) == 0, started.text()
        assert "restarted by the launcher, resuming from" in started.text()
    assert_same_run(run, reference, ROWS)
    assert len({line["time"] for line in lines(run) if line["step"] == 1}) == 1  # it did not begin again


def test_a_new_run_and_its_restart_do_not_take_an_older_one_for_their_own(tmp_path):
    """Only restarts of the same job go on by themselves; here the first is killed before it has a checkpoint."""
    run = tmp_path / "run"
    run_here("--output", str(run), "--rows", "8", TORCHELASTIC_RUN_ID="older", LOOPWRIGHT_LAUNCH="older")
    words = [*LAUNCH, "-n", "1", "--max-restarts", "1", TRAIN, "--output", str(run), "--rows", "32", "--die", "0:1"]
    with job(words, tmp_path) as started:
        assert started.wait(300) == 0, started.text()
        assert "holds 1 checkpoint of an earlier run" in started.text() and "resuming from" not in started.text()
    assert (run / "died-0-1").exists()
    assert [line["step"] for line in lines(run)] == [1, 1, 2, 3, 4]


def test_taking_over_stops_the_other_launch(tmp_path):
    run = tmp_path / "run"
    words = [TRAIN, "--output", str(run)]
    slow = ["--rows", "64000", "--seconds", "0.3", "--save-steps", "1000"]
    with job([*LAUNCH, "-n", "1", *words, *slow], tmp_path, name="first") as first:
        first.until(lambda: last_step(run) >= 1)
        with job([*LAUNCH, "-n", "1", "--take-over", *words, "--rows", "16"], tmp_path, name="second") as second:
            assert second.wait(120) == 0, second.text()
        assert first.wait(120) == 1
        assert "was taken over by process" in first.text()
