"""No process of a launch outlives it: whoever is killed, /proc lists none afterwards, and the next launch can begin.

The launch of a training and its successor are in one test, since each start takes seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from loopwright.launch import agent, guard

from .jobs import LAUNCH, SCRIPTS, job, variables
from .processes import alive, family, listening, wait_until_gone
from .runs import TRAIN, checkpoints, last_step

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are read from /proc")

HOLDS_ON = str(SCRIPTS / "holds_on.py")
TRAINING = ["-n", "2", TRAIN, "--output", "out", "--rows", "64000", "--save-steps", "1000", "--seconds", "0.05",
            "--workers", "1"]  # fmt: skip


def training(folder: Path):
    return job([*LAUNCH, *TRAINING], folder)


def is_training(started, folder: Path) -> bool:
    """Whether the ranks of this launch have finished updates, with their workers running."""
    workers = started.workers()
    files = [path for pid in workers for path in (folder / "out").glob(f"updates-*-{pid}.jsonl")]
    return len(workers) == 2 and len(files) == 2


def test_a_killed_launcher_takes_its_ranks_along_and_the_same_command_begins_at_once(tmp_path):
    """Ranks save before they exit. While they train, nothing listens on an address that others can reach."""
    with training(tmp_path) as first:
        first.until(lambda: is_training(first, tmp_path))
        known = family(first.process.pid)
        assert len(known) == 1 + 1 + 2 + 2  # launcher, guard, ranks, workers
        assert listening(known) == {"127.0.0.1"}
        first.signal(signal.SIGKILL)
        with training(tmp_path) as second:
            second.until(lambda: is_training(second, tmp_path))
            assert not alive(known)
            assert checkpoints(tmp_path / "out") and last_step(tmp_path / "out") > 0
            assert "has died; its ranks save and exit" in first.text()
            second_known = family(second.process.pid)
            second.signal(signal.SIGKILL)
        wait_until_gone(second_known)


def stubborn(folder: Path, *words: str):
    return job([*LAUNCH, "-n", "2", HOLDS_ON, *words], folder)


def is_ready(started) -> bool:
    return len(family(started.process.pid)) == 1 + 1 + 2 * 4


def test_whatever_ranks_have_started_ends_with_one_of_them(tmp_path):
    with stubborn(tmp_path, "plain") as started:
        started.until(lambda: is_ready(started))
        known = family(started.process.pid)
        os.kill(started.workers()[1], signal.SIGKILL)
        assert started.wait(60) == 1
        assert not alive(known)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.grid)])
def test_a_second_signal_ends_ranks_that_ignore_the_first(number, tmp_path):
    """SIGHUP is what a closed terminal sends; ranks do not ignore that one."""
    with stubborn(tmp_path) as started:
        started.until(lambda: is_ready(started))
        known = family(started.process.pid)
        started.signal(number)
        if number == signal.SIGINT:
            started.until(lambda: "Sending process" in started.text())
            started.signal(number)
        assert started.wait(60) == {signal.SIGINT: 130, signal.SIGHUP: 128 + signal.SIGHUP}[number]
        assert not alive(known)


def test_the_guard_kills_what_does_not_save_in_time(tmp_path):
    """Its time to save is an argument, so this needs no launcher and not half a minute."""
    code = (
        "import os, subprocess, sys, time\n"
        "from loopwright.launch.guard import Guard\n"
        "os.mkdir('folder')\n"
        "with Guard(os.path.abspath('folder'), 0.5) as guard:\n"
        f"    rank = subprocess.Popen([sys.executable, {HOLDS_ON!r}], start_new_session=True)\n"
        "    guard.watch([rank.pid])\n"
        "    time.sleep(600)\n"
    )
    with job([sys.executable, "-c", code], tmp_path) as started:
        started.until(lambda: len(family(started.process.pid)) == 1 + 1 + 4)
        known = family(started.process.pid)
        started.signal(signal.SIGKILL)
        wait_until_gone(known, 30)
        assert not (tmp_path / "folder").exists()


@contextmanager
def process_of(mark: str):
    """A process with the mark of a launcher."""
    process = subprocess.Popen(["sleep", "60"], env=variables({guard.MARK: mark}), start_new_session=True)
    try:
        deadline = time.monotonic() + 20
        while process.pid not in guard.members(mark):
            assert time.monotonic() < deadline
        yield process
    finally:
        process.kill()
        process.wait()


NOBODY = f"{2**22 + 1}.1"
"""A launcher whose process id is above all others."""


def test_a_launch_waits_for_the_ranks_of_a_killed_launcher_and_kills_them_then(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(agent, "TIME_TO_SAVE", 0.2)
    folder = tmp_path / "folder"
    folder.mkdir()
    with process_of(f"{NOBODY}:{folder}") as left:
        agent.wait_for_orphans()
        assert left.wait(120) == -signal.SIGKILL
        assert str(left.pid) in caplog.text and "whose launcher has died" in caplog.text
    assert not folder.exists()


def test_processes_of_a_launcher_that_lives_or_ended_by_itself_are_left_alone(tmp_path):
    own = guard.mark_of_this_process(str(tmp_path))
    with process_of(own) as rank, process_of(f"{NOBODY}:{tmp_path}/gone") as other:
        assert not {rank.pid, other.pid} & guard.orphans().keys()


@pytest.mark.grid
@pytest.mark.parametrize("who", ["launcher", "rank", "all"])
@pytest.mark.parametrize("attempt", range(3))
def test_whoever_is_killed_nothing_is_left(who, attempt, tmp_path):
    with training(tmp_path) as started:
        started.until(lambda: is_training(started, tmp_path))
        known, ranks = family(started.process.pid), started.workers()
        for pid in {"launcher": [started.process.pid], "rank": ranks[1:], "all": ranks}[who]:
            os.kill(pid, signal.SIGKILL)
        wait_until_gone({pid: since for pid, since in known.items() if pid != started.process.pid})


@pytest.mark.grid
def test_a_rank_under_torchrun_ends_with_it(tmp_path):
    """torchrun has no guard: the trainer of a rank notices that its parent has gone."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *TRAINING[2:]]
    with job(words, tmp_path) as started:
        started.until(lambda: is_training(started, tmp_path))
        known = family(started.process.pid)
        started.signal(signal.SIGKILL)
        wait_until_gone(known)
    assert checkpoints(tmp_path / "out")
