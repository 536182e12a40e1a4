"""A signal in `evaluate()` or `predict()` after training: it has its usual effect; the same command ends the same."""

from __future__ import annotations

import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from loopwright.callbacks.metrics_file import kind_of, read_metrics

from .checks import differences, leftovers, newest_intact, said, trace
from .random_kills import locks

pytestmark = pytest.mark.xdist_group("faults-grid")

USUAL = {signal.SIGTERM: -15, signal.SIGINT: 130, signal.SIGKILL: -9, signal.SIGHUP: -1, signal.SIGUSR1: -10}


MOMENTS = ("evaluation", "between", "prediction")
ALWAYS = ((signal.SIGTERM, "evaluation"), (signal.SIGKILL, "between"), (signal.SIGINT, "prediction"))
CASES = [
    pytest.param(*case, id=f"{case[0].name}-{case[1]}", marks=[] if case in ALWAYS else pytest.mark.grid)
    for case in product(USUAL, MOMENTS)
]


@pytest.fixture(scope="module")
def whole(forks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert forks.run("train_and_predict", folder) == 0, said(folder)
    return folder


@pytest.mark.parametrize(("number", "moment"), CASES)
def test_a_signal_after_training(number: signal.Signals, moment: str, forks: Any, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert forks.run("train_and_predict", folder, moment=moment, number=int(number)) == USUAL[number], said(folder)
    assert newest_intact(folder) == 10 and not leftovers(folder) and not locks(folder)
    assert forks.run("train_and_predict", folder) == 0, said(folder)
    assert trace(folder, "begin") == [0, 10]  # the second process has trained nothing
    assert Path(f"{folder}.after").read_text() == Path(f"{whole}.after").read_text()
    kinds = [(row["step"], kind_of(row)) for row in read_metrics(folder)]
    assert len(set(kinds)) == len(kinds) and {(10, "eval"), (10, "test")} <= set(kinds)
    assert differences(folder, whole) == []
