"""Processes that a user's code forks while a run trains: ended alone they end, and signals to all leave them alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120.0
SCRIPT = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from loopwright.core.events import TrainerCallback
from tests.search.toy import toy

folder, way = Path(sys.argv[1]), sys.argv[2]
forked = multiprocessing.get_context("fork")

def work(ready, results):
    ready.set()
    while way == "alone" or not (folder / "go").exists():
        time.sleep(0.02)
    results.put(7)

class Forks(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step != 3 or (folder / "seen").exists():
            return
        ready, results = forked.Event(), forked.Queue()
        child = forked.Process(target=work, args=(ready, results), daemon=True)
        child.start()
        ready.wait()
        if way == "alone":
            child.terminate()
            child.join(60)
            (folder / "seen").write_text(str(child.exitcode))
            child.kill()
        else:
            (folder / "waiting").write_text(str(child.pid))
            found = results.get(timeout=60)
            child.join(60)
            (folder / "seen").write_text(f"{found} {child.exitcode}")

trainer = toy(folder / "run", [Forks()], async_save=False)
trainer.train(resume_from_checkpoint="auto")
print("ended after", trainer.state.global_step)
"""


def started(folder: Path, way: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    words = [sys.executable, "-u", "-c", SCRIPT, str(folder), way]
    with open(folder / "out.txt", "ab") as out:
        return subprocess.Popen(words, env=environment, cwd=folder, stdout=out, stderr=out, start_new_session=True)


def said_in(folder: Path) -> str:
    return (folder / "out.txt").read_text()


def wait_until(condition: Callable[[], bool], run: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end and run.poll() is None
        time.sleep(0.02)


def test_a_forked_process_ends_when_it_is_terminated(tmp_path: Path) -> None:
    run = started(tmp_path, "alone")
    run.wait(SECONDS)
    said = said_in(tmp_path)
    assert run.returncode == 0 and "ended after 6" in said, said
    assert (tmp_path / "seen").read_text() == str(-signal.SIGTERM)
    assert "SIGTERM" not in said


def test_a_signal_to_all_processes_lets_a_forked_one_finish_its_work(tmp_path: Path) -> None:
    run = started(tmp_path, "together")
    try:
        wait_until((tmp_path / "waiting").exists, run)
        run.send_signal(signal.SIGTERM)
        wait_until(lambda: "SIGTERM received" in said_in(tmp_path), run)
        os.kill(int((tmp_path / "waiting").read_text()), signal.SIGTERM)
        (tmp_path / "go").touch()
        run.wait(SECONDS)
    finally:
        run.kill()
        run.wait()
    said = said_in(tmp_path)
    assert run.returncode == 75, said
    assert (tmp_path / "seen").read_text() == "7 0" and said.count("SIGTERM received") == 1
    again = started(tmp_path, "together")
    assert again.wait(SECONDS) == 0 and "ended after 6" in said_in(tmp_path)
