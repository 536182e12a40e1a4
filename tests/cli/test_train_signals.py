"""Signals to `loopwright train` at any line of it, and a second command in the folder of the first."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("transformers")

import loopwright
from loopwright.callbacks.metrics_file import read_metrics
from tests.cli.trained import CONFIG, STEPS, prepare
from tests.faults.checks import leftovers, said
from tests.faults.conftest import Forks
from tests.faults.random_kills import locks

pytestmark = pytest.mark.xdist_group("cli-signals")

SOURCES = Path(loopwright.__file__).parent
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
PARTS = ("config/loading.py", "tasks/data/readers.py", "tasks/model/table_model.py", "config/run_control.py",
         "core/resuming/beginning.py", "pt/optim/creation.py", "core/loop.py", "report/page.py")  # fmt: skip
"""Files of the parts of a run, in order: configuration, data, model, trainer, folder, optimizer, updates, report."""
COMPARED = ("step", "loss", "eval_loss", "learning_rate", "grad_norm", "train_loss", "epoch")


class Point(NamedTuple):
    """The n-th time that a line is executed, and when that is."""

    moment: int
    file: str
    line: int
    time: int


class Course(NamedTuple):
    """The first and the last execution of every line, and when signals are not watched."""

    points: list[Point]
    unwatched: list[tuple[float, float]]

    def promised(self, point: Point, number: int) -> tuple[int, ...]:
        """The exit codes: a run that ends at that moment may be complete."""
        if number == signal.SIGINT:
            return (130, 75, 0)
        usual = (-number,) if any(first <= point.moment <= last for first, last in self.unwatched) else ()
        return (75, 0, *usual)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    server = Forks("tests.cli.trained")
    yield server
    server.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("trained")
    prepare(found)
    return found


@pytest.fixture(scope="module")
def course(forks: Forks, folder: Path) -> Course:
    """Also the run that nobody interrupts: it is in the folder `listed`."""
    assert forks.run("listed", folder / "listed", timeout=200) == 0, said(folder / "listed")
    seen = json.loads((folder / "listed.lines").read_text())
    points = {Point(first, file, line, 1) for file, line, _, first, _ in seen}
    points |= {Point(last, file, line, times) for file, line, times, _, last in seen}

    def moments(file: str, text: str) -> list[int]:
        numbers = [i for i, each in enumerate((SOURCES / file).read_text().splitlines(), 1) if text in each]
        return [moment for name, line, _, *both in seen if name == file and line in numbers for moment in both]

    early, watch = "cli/early_signals.py", "core/shutdown/signals.py"
    unwatched = [
        (0.0, max(moments(early, "signal.signal(each, stop)")) + 1),
        (min(moments(early, "restore_handlers(earlier)")), max(moments(watch, "signal.signal(number, self")) + 1),
        (min(moments(watch, "restore_handlers(self._earlier)")), float("inf")),
    ]
    return Course(sorted(points), unwatched)


def rows(folder: Path) -> list[dict[str, Any]]:
    found = [{name: row[name] for name in COMPARED if name in row} for row in read_metrics(folder)]
    return sorted(found, key=lambda row: (row["step"], "loss" not in row, "train_loss" in row))


def differences(case: Path, whole: Path) -> list[str]:
    found = [f"left over: {name}" for name in [*leftovers(case), *locks(case)]]
    if rows(case) != rows(whole):
        found.append(f"metrics.jsonl: {rows(case)} is not {rows(whole)}")
    weights = f"checkpoint-{STEPS}/model.safetensors"
    return [*found, *(["weights"] if (case / weights).read_bytes() != (whole / weights).read_bytes() else [])]


def what_differs(forks: Forks, case: Path, course: Course, point: Point, number: int) -> list[str]:
    """Send the signal at the point and run the same command again; returns what went wrong."""
    place = {"file": point.file, "line": point.line, "time": point.time}
    status = forks.run("signalled", case, timeout=200, number=int(number), **place)
    wrong = []
    if not Path(f"{case}.struck").exists():  # how often a line is executed may depend on the speed of a save
        return [] if status == 0 else [f"ended with {status} without a signal: {said(case)[-2000:]}"]
    if status not in course.promised(point, number):
        wrong.append(f"ended with {status}: {said(case)[-1000:]}")
    if "Traceback" in said(case):
        wrong.append(f"a traceback: {said(case)[-2000:]}")
    again = forks.run("train", case, timeout=200)
    if again != 0:
        return [*wrong, f"the same command ended with {again}: {said(case)[-2000:]}"]
    return wrong + differences(case, case.parent / "listed")


def signal_at(forks: Forks, folder: Path, course: Course, chosen: list[tuple[Point, signal.Signals]]) -> None:
    wrong, struck = {}, 0
    for point, number in chosen:
        case = folder / f"{number.name}-{point.moment}"
        found = what_differs(forks, case, course, point, number)
        struck += Path(f"{case}.struck").exists()
        if found:
            wrong[f"{number.name} {point}"] = found
        shutil.rmtree(case, ignore_errors=True)
    print(f"{struck} signals at {len(chosen)} points, {len(wrong)} wrong")
    assert not wrong, f"{len(wrong)} of {len(chosen)}: {wrong}"


def test_a_signal_in_each_part(forks: Forks, folder: Path, course: Course) -> None:
    firsts = [next(point for point in course.points if point.file == file) for file in PARTS]
    chosen = [(point, SIGNALS[index % len(SIGNALS)]) for index, point in enumerate(firsts)]
    signal_at(forks, folder, course, chosen)


def test_a_signal_before_training_says_so(forks: Forks, folder: Path, course: Course) -> None:
    point, case = next(point for point in course.points if point.file == "tasks/data/readers.py"), folder / "before"
    where = {"file": point.file, "line": point.line, "time": point.time}
    assert forks.run("signalled", case, timeout=200, number=int(signal.SIGUSR1), **where) == 75
    lines = said(case).splitlines()
    assert "SIGUSR1 received: stopped before training; the same command can be run again" in lines
    assert json.loads(lines[-1]) == {"status": "interrupted", "step": 0, "checkpoint": None, "code": 75}
    assert not case.exists()


@pytest.mark.grid
@pytest.mark.slow
def test_a_signal_at_many_lines(forks: Forks, folder: Path, course: Course) -> None:
    drawn = random.Random(int(os.environ.get("SEED", "0")))
    chosen = [(drawn.choice(course.points), drawn.choice(SIGNALS)) for _ in range(300)]
    signal_at(forks, folder, course, chosen)


def contents(run: Path) -> dict[str, bytes]:
    """The files of a run; its report and its time ledger are written while it waits."""
    paths = [path for path in run.rglob("*") if path.is_file() and not path.name.startswith(("report", "time_ledger"))]
    return {str(path.relative_to(run)): path.read_bytes() for path in paths}


def test_a_second_command_in_the_folder_is_refused_and_the_first_is_not_disturbed(
    forks: Forks, folder: Path, course: Course
) -> None:
    run, ends = folder / "owned", []
    first = threading.Thread(target=lambda: ends.append(forks.run("waiting", run, timeout=400)))
    first.start()
    try:
        end = time.monotonic() + 300
        while not Path(f"{run}.waiting").exists():
            assert time.monotonic() < end and first.is_alive(), said(run)
            time.sleep(0.02)
        before = contents(run)
        words = [sys.executable, "-m", "loopwright", "train", CONFIG, "output_dir=owned", "--json"]
        second = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
        after = contents(run)
    finally:
        Path(f"{run}.go").touch()
        first.join()
    assert second.returncode == 2, second.stderr
    answer = json.loads(second.stdout)
    assert answer["kind"] == "OwnerError" and answer["code"] == 2 and "in use" in answer["error"]
    assert "Traceback" not in second.stderr and before == after
    assert ends == [0] and differences(run, folder / "listed") == []
