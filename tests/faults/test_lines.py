"""A signal at a line of the library, in a real process: it ends as promised, and started again nothing differs."""

from __future__ import annotations

import inspect
import json
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loopwright.core.shutdown.signals import SignalWatch

from .checks import Reference, differences, leftovers, said
from .conftest import Forks
from .lines import STEPS, VARIANTS

pytestmark = pytest.mark.xdist_group("faults-lines")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SPREAD = 4
"""Points that are always tried with each signal in each variant: one of each part of the run."""


@dataclass(frozen=True, order=True)
class Point:
    """The n-th time that a run executes a line, and when that is."""

    moment: int
    file: str
    line: int
    time: int


@dataclass(frozen=True)
class Course:
    """The first and the last execution of every line of a run, in order, and between which signals are watched."""

    points: list[Point]
    begins: int
    ends: int

    def spread(self, seed: int) -> list[Point]:
        """One point of each part of the run."""
        size = len(self.points) // SPREAD
        chosen = random.Random(seed)
        return [chosen.choice(self.points[part * size : (part + 1) * size]) for part in range(SPREAD)]

    def promised(self, point: Point, number: signal.Signals, step: int) -> tuple[int, ...]:
        """The statuses a run may end with: outside of the watch, a signal has the effect it has without a run."""
        if number == signal.SIGINT:
            return (130,)
        done = (0,) if step == STEPS else ()
        usual = () if self.begins < point.moment < self.ends else (-number,)
        return (75, *done, *usual)


@pytest.fixture(scope="module")
def lines() -> Iterator[Forks]:
    server = Forks("tests.faults.lines")
    yield server
    server.close()


@pytest.fixture(scope="module")
def whole(lines: Forks, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(lines, tmp_path_factory.mktemp("references"))


@pytest.fixture(scope="module")
def courses(lines: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Course]:
    folder = tmp_path_factory.mktemp("courses")
    return {variant: course(lines, folder / str(number), variant) for number, variant in enumerate(VARIANTS)}


def course(lines: Forks, folder: Path, variant: str) -> Course:
    assert lines.run("listed", folder, variant=variant) == 0, said(folder)
    seen = json.loads(Path(f"{folder}.lines").read_text())
    points = {Point(first, file, line, 1) for file, line, _, first, _ in seen}
    points |= {Point(last, file, line, times) for file, line, times, _, last in seen}
    return Course(
        sorted(points),
        begins=max(moment for *_, moment in of_function(seen, SignalWatch.__enter__)),
        ends=min(moment for *_, moment, _ in of_function(seen, SignalWatch.__exit__)),
    )


def of_function(seen: list[Any], function: Any) -> list[Any]:
    """What was seen of the lines of a function of the watch."""
    source, first = inspect.getsourcelines(function)
    return [each for each in seen if each[0] == "core/shutdown/signals.py" and first <= each[1] < first + len(source)]


def what_differs(
    lines: Forks, case: Path, whole: Path, variant: str, along: Course, point: Point, number: signal.Signals
) -> list[str]:
    """Send the signal at the point and start the same command again; returns what went wrong."""
    place = {"file": point.file, "line": point.line, "time": point.time}
    status = lines.run("signalled", case, variant=variant, number=int(number), **place)
    struck = Path(f"{case}.struck")
    if not struck.exists():  # how often some lines are executed depends on the speed of a save in the background
        return [] if status == 0 else [f"ended with {status} without a signal: {said(case)[-2000:]}"]
    wrong = []
    if status not in along.promised(point, number, int(struck.read_text())):
        wrong.append(f"ended with {status}: {said(case)[-1000:]}")
    if "Traceback" in said(case):
        wrong.append(f"a traceback: {said(case)[-2000:]}")
    if status == 0:
        wrong += differences(case, whole)
    again = lines.run("train", case, variant=variant)
    if again != 0:
        return [*wrong, f"started again, it ended with {again}: {said(case)[-2000:]}"]
    return wrong + differences(case, whole) + leftovers(case)


def signal_at(
    lines: Forks, folder: Path, whole: Path, variant: str, along: Course, points: list[Point], number: signal.Signals
) -> None:
    wrong: dict[str, list[str]] = {}
    struck = 0
    for index, point in enumerate(points):
        case = folder / f"case-{index}"
        found = what_differs(lines, case, whole, variant, along, point, number)
        struck += Path(f"{case}.struck").exists()
        if found:
            wrong[str(point)] = found
        shutil.rmtree(case, ignore_errors=True)
    print(f"{number.name}, {variant}: {struck} signals at {len(points)} points, {len(wrong)} wrong")
    assert not wrong, f"{len(wrong)} of {len(points)}: {wrong}"
    assert struck >= 0.9 * len(points)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_at_some_lines(
    number: signal.Signals, variant: str, lines: Any, whole: Any, courses: Any, tmp_path: Path
) -> None:
    along = courses[variant]
    assert len(along.points) > 3000
    points = along.spread(seed=number * 10 + len(variant))
    signal_at(lines, tmp_path, whole(variant=variant), variant, along, points, number)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_at_every_line(
    number: signal.Signals, variant: str, lines: Any, whole: Any, courses: Any, tmp_path: Path
) -> None:
    along = courses[variant]
    signal_at(lines, tmp_path, whole(variant=variant), variant, along, along.points, number)
