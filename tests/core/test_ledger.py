"""The time ledger: its parts add up to the wall time, over kills, resumes and rollbacks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from loopwright.core.measure.ledger import LOST, MOST_MARKS, PARTS, Account, Ledger
from loopwright.core.measure.ledger_file import FILE, LedgerFile, Recorded, read_ledger
from loopwright.report.folder import open_run

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


ACTS = st.one_of(
    st.tuples(st.just("work"), st.floats(0, 50)),
    st.tuples(st.sampled_from(["evaluation", "saving", "compiling", "proving"]), st.floats(0, 50)),
    st.tuples(st.just("wait"), st.floats(0, 50)),
    st.tuples(st.just("checkpoint"), st.just(0.0)),
    st.tuples(st.just("rollback"), st.just(0.0)),
    st.tuples(st.just("kill"), st.floats(0, 500)),
)


@given(st.lists(ACTS, max_size=40))
def test_the_parts_add_up_whatever_happens(acts: list[tuple[str, float]]) -> None:
    clock, waited, step, saved = Clock(), 0.0, 0, 0
    began = clock.now

    def start(earlier: Account | None, away: float) -> Ledger:
        ledger = Ledger(clock=clock, now=clock)
        clock.now += 3.0  # getting ready
        ledger.begin(earlier, step=saved, away=away, waited=lambda: waited)
        return ledger

    ledger = start(None, 0.0)
    for act, seconds in acts:
        if act in ("work", "wait"):
            clock.now += seconds
            step += act == "work"
            waited += seconds if act == "wait" else 0.0
        elif act == "checkpoint":
            ledger.save(step)
            saved = step
        elif act == "rollback":
            ledger.roll_back(saved)
            step = saved
        elif act == "kill":
            recorded = ledger.settle()
            clock.now += seconds
            ledger, step = start(recorded, seconds), saved
        else:
            with ledger.during(act):
                clock.now += seconds
    account = ledger.settle()
    assert account.total == pytest.approx(clock.now - began)
    assert all(value >= -1e-6 for value in account.seconds.values())


def test_each_second_belongs_to_one_part() -> None:
    clock, waited = Clock(), 0.0
    ledger = Ledger(clock=clock, now=clock)
    clock.now += 5
    ledger.begin(None, step=0, away=0.0, waited=lambda: waited)
    clock.now += 10
    waited += 4
    with ledger.during("evaluation"):
        clock.now += 3
        with ledger.during("compiling"):
            clock.now += 2
    ledger.save(10)
    clock.now += 7
    ledger.move("compiling", 2)
    found = ledger.settle().seconds
    assert {name: value for name, value in found.items() if value} == {
        "preparing": 5, "updates": 11, "data_wait": 4, "evaluation": 3, "compiling": 4
    }  # fmt: skip


def test_work_after_the_checkpoint_is_lost_and_a_pause_is_a_restart() -> None:
    account = Account(dict.fromkeys(PARTS, 0.0))
    account.seconds["updates"] = 100.0
    account.save(10)
    account.seconds["updates"], account.seconds["evaluation"] = 160.0, 5.0
    clock = Clock()
    ledger = Ledger(clock=clock, now=clock)
    clock.now += 2
    ledger.begin(account, step=10, away=30.0, waited=lambda: 0.0)
    found = ledger.settle().seconds
    assert (found["updates"], found["evaluation"], found[LOST], found["restarts"]) == (100.0, 0.0, 65.0, 32.0)
    assert ledger.account.starts[-1]["kind"] == "resume"


def test_only_the_ledger_of_the_same_run_or_launch_is_continued(tmp_path: Path) -> None:
    def total(recorded: Recorded, *, is_resumed: bool, launch: str | None = None) -> float:
        file = LedgerFile(Ledger(), run="mine", launch=launch, began=recorded.updated + 50)
        file.begin(recorded, step=0, is_resumed=is_resumed, waited=lambda: 0.0)
        return round(file.ledger.settle().total)

    def recorded(**values: Any) -> Recorded:
        account = Account()
        account.seconds["updates"] = 100.0
        return Recorded(account, updated=1e9, **values)

    assert total(recorded(run="mine"), is_resumed=True) == 150
    assert total(recorded(run="mine", status="finished"), is_resumed=True) == 100, "it did not wait for a restart"
    assert total(recorded(run="other"), is_resumed=True) == 0
    assert total(recorded(run="other", launch="L"), is_resumed=False, launch="L") == 150, "killed before its first save"
    assert total(recorded(run="other", launch="K"), is_resumed=False, launch="L") == 0


def test_the_file_stays_small_and_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = LedgerFile(Ledger(), folder=tmp_path)
    for step in range(2 * MOST_MARKS):
        file.ledger.save(step)
    file.write(step=1, max_steps=2)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    found = read_ledger(tmp_path)
    assert found is not None and len(found.account.saved) == MOST_MARKS and file.age < 60


def test_a_folder_that_cannot_be_written_is_reported_once(tmp_path: Path, caplog: Any) -> None:
    file = LedgerFile(Ledger(), folder=tmp_path / "missing")
    for _ in range(3):
        file.write(step=1, max_steps=2)
    assert [record.message.count("training continues without it") for record in caplog.records] == [1]


def started(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.core.ledger_child", str(folder)], cwd=ROOT)


def wait_for_step(folder: Path, step: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            rows = (folder / "metrics.jsonl").read_text().splitlines()
            if rows and json.loads(rows[-1])["step"] >= step:
                return
        except (OSError, ValueError, KeyError):
            pass
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def test_three_starts_with_two_kills_add_up_to_the_wall_time(tmp_path: Path) -> None:
    """Real processes: killed twice, then run to the end; measured from outside."""
    folder = tmp_path / "run"
    for step in (24, 44):  # checkpoints every 10 steps
        child = started(folder)
        wait_for_step(folder, step)
        assert open_run(folder).read().status == "running"
        child.send_signal(signal.SIGKILL)
        child.wait(60)
        assert open_run(folder).read().status == "killed"
    child = started(folder)
    assert child.wait(120) == 0
    found = read_ledger(folder)
    assert found is not None and found.status == "finished"
    first = found.account.starts[0]["time"]
    seconds = found.account.seconds
    wall = found.updated - first + seconds["preparing"]
    assert found.account.total == pytest.approx(wall, rel=0.01)
    assert [each["kind"] for each in found.account.starts] == ["start", "resume", "resume"]
    assert all(seconds[part] > 0 for part in ("updates", "data_wait", "evaluation", "saving", "restarts", LOST))
    assert sum(seconds[part] for part in ("updates", "data_wait")) >= 60 * 0.01, "60 updates of at least 10 ms"
