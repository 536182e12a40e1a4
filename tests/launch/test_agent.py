"""`loopwright launch` with real processes: it ends with the documented codes and says which rank failed."""

from __future__ import annotations

import signal

import pytest

from .jobs import LAUNCH, SCRIPTS, job, launched

ADDS_UP, ENDS = (str(SCRIPTS / name) for name in ("adds_up.py", "ends.py"))


def test_all_processes_meet_and_each_has_its_log_files(tmp_path):
    code, text = launched(["-n", "2", "--threads", "1", ADDS_UP, "fine", "--lr", "1"], tmp_path)
    assert code == 0
    assert "rank 0 of 2 sum 3" in text and "rank 1 of 2" not in text  # the screen shows the first
    logs = sorted(tmp_path.glob("loopwright-logs/*/attempt_0/*/stdout.log"))
    assert [f"rank {rank} of 2 sum 3" in path.read_text() for rank, path in enumerate(logs)] == [True] * 2
    errors = sorted(tmp_path.glob("loopwright-logs/*/attempt_0/*/stderr.log"))
    assert all("threads 1 words ['fine', '--lr', '1']" in path.read_text() for path in errors)


def test_the_first_to_fail_is_named_with_its_last_words(tmp_path):
    code, text = launched(["-n", "2", ENDS, "error"], tmp_path)
    assert code == 1
    assert "rank 1 failed first" in text and "ValueError: rank 1 has had enough" in text and "stderr.log" in text


@pytest.mark.parametrize(
    ("given", "code"),
    [(75, 75), (2, 2), pytest.param(1, 1, marks=pytest.mark.grid), pytest.param(9, 1, marks=pytest.mark.grid)],
)
def test_codes_of_the_script_are_passed_on(given, code, tmp_path):
    """75 is not restarted: every process has saved and stopped."""
    restarts = ["--max-restarts", "2"] if given == 75 else []
    ended, text = launched(["-n", "2", *restarts, ENDS, "code", str(given)], tmp_path)
    assert ended == code, text
    assert text.count("rank 0 of 2") == 1
    assert ("saved and stopped" in text) == (given == 75)


def test_a_process_that_is_aborted_after_saving_has_saved(tmp_path):
    code, text = launched(["-n", "2", "--max-restarts", "2", ENDS, "abort"], tmp_path)
    assert code == 75, text
    assert text.count("rank 0 of 2") == 1


def test_a_killed_process_brings_the_job_back_told_to_resume(tmp_path):
    code, text = launched(["-n", "2", "--max-restarts", "1", ENDS, "first"], tmp_path)
    assert code == 0, text
    assert "attempt 0 resume None" in text and "attempt 1 resume auto" in text


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGUSR1, marks=pytest.mark.grid)]
)
def test_a_signal_to_the_launcher_reaches_the_processes(number, tmp_path):
    """SIGINT and SIGUSR1 end this script, which only knows SIGTERM; a Trainer saves at SIGUSR1 too."""
    with job([*LAUNCH, "-n", "2", ENDS, "wait"], tmp_path) as started:
        started.until(lambda: "ready" in started.text())
        started.signal(number)
        expected = {signal.SIGTERM: 75, signal.SIGINT: 130, signal.SIGUSR1: 128 + signal.SIGUSR1}
        assert started.wait(300) == expected[number], started.text()
        assert not started.workers()
