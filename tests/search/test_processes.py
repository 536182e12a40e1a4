"""Trials in processes of their own: fresh ones, resumed after kill -9, failing ones, and when there can be none."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loopwright.errors import LoopwrightError, SearchError
from loopwright.search.journal import Journal
from tests.search.toy import BEST, LEARNING_RATES, Counting, make_model, toy, updates

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("searching.py")
SECONDS = 120.0
"""The longest that any process may take, on a busy machine."""


def resident() -> int:
    """The memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def started(folder: Path, *words: str, script: Path = SCRIPT) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    process = subprocess.Popen([sys.executable, str(script), str(folder), *words], env=environment, cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(path: Path) -> str:
    end = time.monotonic() + SECONDS
    while not (path.is_file() and path.read_text(encoding="utf-8")):
        assert time.monotonic() < end, f"{path} was not written"
        time.sleep(0.02)
    return path.read_text(encoding="utf-8")


def processes_of(folder: Path) -> set[str]:
    lines = (folder / "updates.txt").read_text(encoding="utf-8").splitlines()
    return {line.split()[2] for line in lines}


@pytest.mark.parametrize(
    ("n_trials", "grown"), [(6, 4e6), pytest.param(50, 8e6, marks=pytest.mark.grid)], ids=["few", "many"]
)
def test_every_trial_has_a_process_and_the_memory_of_the_search_is_flat(
    n_trials: int, grown: float, tmp_path: Path
) -> None:
    sizes: list[int] = []

    def objective(metrics: dict[str, float]) -> float:
        sizes.append(resident())
        return metrics["eval_loss"]

    best = toy(tmp_path / "run", [Counting(tmp_path)]).search(n_trials=n_trials, compute_objective=objective)
    assert len(processes_of(tmp_path)) == n_trials and str(os.getpid()) not in processes_of(tmp_path)
    assert len(sizes) == 3 * n_trials and sizes[-1] - sizes[3] < grown
    assert best.checkpoint == str(tmp_path / "run" / f"run-{best.run_id}" / "checkpoint-6")


def test_a_process_gives_the_numbers_of_a_trial_in_this_one(tmp_path: Path) -> None:
    apart = toy(tmp_path / "a").search(n_trials=2)
    here = toy(tmp_path / "b").search(n_trials=2, in_process=True)
    assert apart[:3] == here[:3]


@pytest.mark.parametrize(
    ("backend", "number"),
    [
        ("optuna", signal.SIGKILL),
        ("random", signal.SIGTERM),
        pytest.param("optuna", signal.SIGTERM, marks=pytest.mark.grid),
        pytest.param("random", signal.SIGKILL, marks=pytest.mark.grid),
        pytest.param("optuna", signal.SIGINT, marks=pytest.mark.grid),
    ],
)
def test_a_killed_search_continues_where_it_was(backend: str, number: signal.Signals, tmp_path: Path) -> None:
    """Killed inside its third trial: that one is resumed, the first two are not repeated, the fourth follows."""
    pytest.importorskip("optuna" if backend == "optuna" else "loopwright")
    with started(tmp_path, backend, "run-2") as search:
        trial = int(wait_for(tmp_path / "waiting"))
        search.send_signal(number)
        (tmp_path / "go").touch()
        assert search.wait(SECONDS) == (75 if number == signal.SIGTERM else -number)
    assert not (tmp_path / "best.json").exists() and trial
    before = updates(tmp_path)
    with started(tmp_path, backend) as search:
        assert search.wait(SECONDS) == 0
    done = updates(tmp_path)
    assert done[: len(before)] == before  # a trial that outlives the search ends before it is resumed
    assert sorted(done) == [(f"run-{trial}", step) for trial in range(4) for step in range(1, 7)]  # each once
    run_id, objective, values, checkpoint = json.loads((tmp_path / "best.json").read_text(encoding="utf-8"))
    assert Path(checkpoint).is_dir() and (tmp_path / "run" / f"run-{run_id}") == Path(checkpoint).parent
    if backend == "random":
        undisturbed = toy(tmp_path / "undisturbed").search(LEARNING_RATES, n_trials=4, in_process=True)
        assert undisturbed[:3] == (run_id, objective, values)


def test_two_trials_at_a_time_find_the_same_as_one_after_the_other(tmp_path: Path) -> None:
    together = toy(tmp_path / "a", [Counting(tmp_path)]).search(n_trials=4, n_jobs=2)
    apart = toy(tmp_path / "b").search(n_trials=4, in_process=True)
    assert together[:3] == apart[:3]


def fails(trial: Any = None) -> Any:
    if trial is not None:
        raise ZeroDivisionError("of the model")
    return make_model()


def dies(trial: Any = None) -> Any:
    if trial is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return make_model()


def suggests(trial: Any = None) -> Any:
    """A model with a value that the search chooses while the trial runs."""
    model = make_model()
    if trial is not None:
        assert trial.suggest_categorical("kind", ["plain"]) == trial.params["kind"]
    return model


def test_the_error_of_a_trial_is_raised_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="of the model") as caught:
        toy(tmp_path, model_init=fails).search(n_trials=1)
    assert any("in the process of trial 0" in note and "def fails" not in note for note in caught.value.__notes__)
    assert Journal(tmp_path).entries[0].state == "failed"


def test_a_process_that_is_killed_is_named(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match=r"the process of trial 0 was ended by SIGKILL \(out of memory\?\)"):
        toy(tmp_path, model_init=dies).search(n_trials=1)


def test_a_model_may_suggest_values_of_its_own(tmp_path: Path) -> None:
    assert toy(tmp_path, model_init=suggests).search(n_trials=1).objective < 1


def test_an_error_of_the_objective_ends_the_process_of_its_trial(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        toy(tmp_path, [Counting(tmp_path)]).search(n_trials=1, compute_objective=lambda metrics: 1 / 0)
    (trial,) = processes_of(tmp_path)
    assert not Path(f"/proc/{trial}").exists()


def test_what_cannot_be_pickled_trains_in_this_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "loopwright"):
        best = toy(tmp_path / "run", [Counting(tmp_path)], model_init=lambda trial: make_model(trial)).search(
            {"learning_rate": [BEST, 0.1]}, "grid"
        )
    assert best.hyperparameters["learning_rate"] == BEST and processes_of(tmp_path) == {str(os.getpid())}
    (message,) = [each for each in caplog.messages if "trials run in this process" in each]
    assert "model_init" in message and "pickle" in message
    with pytest.raises(LoopwrightError, match="strict"):
        toy(tmp_path / "strict", model_init=lambda trial: make_model(trial), strict=True).search()


UNGUARDED = """
import sys
from pathlib import Path
from tests.search.toy import Counting, make_model, toy

def model(trial=None):
    return make_model(trial)

folder = Path(sys.argv[1])
with open(folder / "started.txt", "a") as file:
    file.write(__name__ + " ")
{guard}toy(folder / "run", [Counting(folder)], model_init=model).hyper()
"""


@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "unguarded"])
def test_functions_of_a_script_are_imported_unless_that_would_search_again(is_guarded: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = UNGUARDED.format(guard='if __name__ == "__main__":\n    ' if is_guarded else "")
    script.write_text(text.replace(".hyper()", '.search(n_trials=1, frame=sys._getframe())'), encoding="utf-8")
    with started(tmp_path, script=script) as search:
        assert search.wait(SECONDS) == 0
        (trial,) = processes_of(tmp_path)
        names = (tmp_path / "started.txt").read_text(encoding="utf-8").split()
        assert names == (["__main__", "__mp_main__"] if is_guarded else ["__main__"])
        assert (trial != str(search.pid)) is is_guarded


def test_two_searches_do_not_share_a_folder(tmp_path: Path) -> None:
    with started(tmp_path, "random", "run-0"):
        wait_for(tmp_path / "waiting")
        with pytest.raises(LoopwrightError, match="in use"):
            toy(tmp_path / "run").search()
