"""A signal to a search at each moment of a trial: how it ends, what is left, and what the same command does then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.search.signalled import MOMENTS, TRIALS
from tests.search.toy import space, toy, updates

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("signalled.py")
SECONDS = 180.0
KILL, TERM, INT, HUP, USR1 = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
MARK = "LOOPWRIGHT_SEARCH"
"""Variable that marks all processes of a search."""

USUAL = (False, "random")
ALWAYS = {("values", KILL), ("model", TERM), ("evaluation", HUP), ("objective", INT)}
GRID = [
    (moment, number, is_here, backend)
    for moment in MOMENTS for number in (KILL, TERM, INT, HUP, USR1) for is_here in (False, True)
    for backend in ("random", "optuna")
]  # fmt: skip


def name_of(moment: str, number: signal.Signals, is_here: bool, backend: str) -> str:
    return f"{moment}-{number.name}-{'here' if is_here else 'apart'}-{backend}"


CASES = [
    pytest.param(*case, id=name_of(*case), marks=[] if case[:2] in ALWAYS and case[2:] == USUAL else pytest.mark.grid)
    for case in GRID
]


def started(folder: Path, backend: str, moment: str, is_here: bool) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), MARK: str(folder)}
    words = [sys.executable, str(SCRIPT), str(folder), backend, moment, *(["here"] if is_here else [])]
    with open(folder / "out.txt", "ab") as out:
        # A shell of the tests may ignore some of these signals, which a process inherits.
        return subprocess.Popen(
            words, env=environment, cwd=folder, stdout=out, stderr=subprocess.STDOUT,
            preexec_fn=lambda: [signal.signal(each, signal.SIG_DFL) for each in (INT, HUP)] and None,
        )  # fmt: skip


def wait_until(condition: Any, what: str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def living(folder: Path) -> list[int]:
    """The processes of the search that have not ended."""
    found, wanted = [], f"{MARK}={folder}".encode()
    for place in Path("/proc").iterdir():
        try:
            if place.name.isdigit() and wanted in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    trainer = toy(tmp_path_factory.mktemp("undisturbed") / "run")
    return tuple(trainer.search(space, "random", TRIALS, in_process=True)[:3])


@pytest.mark.parametrize(("moment", "number", "is_here", "backend"), CASES)
def test_a_signal_at_a_moment_of_a_trial(
    moment: str, number: signal.Signals, is_here: bool, backend: str, undisturbed: Any, tmp_path: Path
) -> None:
    if backend == "optuna":
        pytest.importorskip("optuna")
    search = started(tmp_path, backend, moment, is_here)
    try:
        wait_until(lambda: (tmp_path / "waiting").exists() or search.poll() is not None, "it does not wait")
        search.send_signal(number)
        if number == KILL:
            search.wait(SECONDS)
        (tmp_path / "go").touch()
        status = search.wait(SECONDS)
    finally:
        search.kill()
        search.wait()
    said = (tmp_path / "out.txt").read_text()
    if number == INT:
        assert status in (130, -INT), said
    else:
        assert status == (-KILL if number == KILL else 75), said
        assert "Traceback" not in said
    assert not (tmp_path / "best.json").exists()
    # At once: a trial that still saves is waited for.
    again = started(tmp_path, backend, moment, is_here)
    try:
        assert again.wait(SECONDS) == 0, (tmp_path / "out.txt").read_text()
    finally:
        again.kill()
        again.wait()
    wait_until(lambda: not living(tmp_path), "a process is left")
    check_complete(tmp_path, is_repeated=number == KILL and is_here)
    if backend == "random":
        found = json.loads((tmp_path / "best.json").read_text())
        assert tuple(found[:3]) == tuple(json.loads(json.dumps(undisturbed)))


@pytest.mark.parametrize("moment", ["update", pytest.param("evaluation", marks=pytest.mark.grid)])
def test_a_signal_to_all_processes_of_a_search(moment: str, undisturbed: Any, tmp_path: Path) -> None:
    """As a service manager sends it: the trial gets it twice, once from the search, and still saves its last update."""
    search = started(tmp_path, "random", moment, is_here=False)
    try:
        wait_until(lambda: (tmp_path / "waiting").exists() or search.poll() is not None, "it does not wait")
        for each in [*(set(living(tmp_path)) - {search.pid}), search.pid]:
            os.kill(each, TERM)
        (tmp_path / "go").touch()
        assert search.wait(SECONDS) == 75, (tmp_path / "out.txt").read_text()
    finally:
        search.kill()
        search.wait()
    again = started(tmp_path, "random", moment, is_here=False)
    assert again.wait(SECONDS) == 0, (tmp_path / "out.txt").read_text()
    check_complete(tmp_path, is_repeated=False)
    assert json.loads((tmp_path / "best.json").read_text())[:3] == json.loads(json.dumps(undisturbed))


def check_complete(folder: Path, *, is_repeated: bool) -> None:
    """Every trial has all its updates and every row once; none is made twice, unless its process was killed."""
    made = Counter(updates(folder))
    trials = {trial for trial, _ in made}  # Optuna does not use the number of a trial again that had no values yet
    assert len(trials) == TRIALS and set(made) == {(trial, step) for trial in trials for step in range(1, 7)}
    if not is_repeated:
        assert set(made.values()) == {1}
    for trial in trials:
        place = folder / "run" / trial
        rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        kinds = Counter((row["step"], "loss" in row, "eval_loss" in row) for row in rows)
        assert set(kinds.values()) == {1}, kinds
        assert not list(place.glob("*lock*")) and (place / "checkpoint-6").is_dir()
    assert not list((folder / "run").glob("*lock*"))
