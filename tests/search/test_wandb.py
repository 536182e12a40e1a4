"""Sweeps of W&B without a server: the values of a sweep, offline runs of the real package, and continuing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loopwright.errors import ArgumentsError
from loopwright.search.backends.wandb_backend import space_of, sweep_of
from loopwright.search.space import DEFAULT, Choice, Interval, read_space
from tests.search.toy import BEST, Counting, toy, updates


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name, value in {"MODE": "offline", "SILENT": "true", "ERROR_REPORTING": "false", "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)


def sweep(trial: Any) -> dict[str, Any]:
    assert trial is None
    return {
        "method": "grid",
        "metric": {"name": "objective", "goal": "maximize"},
        "parameters": {"learning_rate": {"values": [0.1, BEST, 0.4]}, "seed": {"value": 3}},
    }


def test_trials_of_a_sweep_are_offline_runs(offline: None, tmp_path: Path) -> None:
    trainer = toy(tmp_path / "run", [Counting(tmp_path)])
    best = trainer.search(sweep, "wandb", n_trials=20, project="p", name="s", in_process=True)
    assert best.hyperparameters == {"learning_rate": BEST, "seed": 3} and Path(best.checkpoint).is_dir()
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))) == 3
    again = toy(tmp_path / "run", [Counting(tmp_path)]).search(sweep, "wandb", project="p", name="s", in_process=True)
    assert again[:3] == best[:3] and len(updates(tmp_path)) == 18  # nothing is repeated


def test_what_only_the_server_can_do_is_refused(offline: None, tmp_path: Path) -> None:
    with pytest.raises(ArgumentsError, match="method='bayes'.*methods random and grid; set WANDB_MODE=online"):
        toy(tmp_path).search(lambda trial: {**sweep(trial), "method": "bayes"}, "wandb", in_process=True)
    with pytest.raises(ArgumentsError, match="sweep_id='abc'"):
        toy(tmp_path).search(sweep, "wandb", sweep_id="abc", in_process=True)
    with pytest.raises(ArgumentsError, match="projet is not an option of a sweep"):
        toy(tmp_path).search(sweep, "wandb", projet="abc", in_process=True)
    with pytest.raises(ArgumentsError, match="the key 'parameters'"):
        toy(tmp_path).search(lambda trial: {}, "wandb", in_process=True)


def test_parameters_of_sweeps_are_read_as_spaces() -> None:
    found = space_of(
        {
            "a": {"min": 1, "max": 6},
            "b": {"min": 0.0, "max": 1.0},
            "c": {"distribution": "log_uniform_values", "min": 1e-6, "max": 1e-3},
            "d": {"distribution": "log_uniform", "min": 0, "max": 1},
            "e": {"values": [1, 2]},
            "f": {"value": 5},
        }
    ).parts
    assert found["a"] == Interval(1, 6, integer=True) and found["b"] == Interval(0.0, 1.0)
    assert found["c"] == Interval(1e-6, 1e-3, log=True) and found["d"].low == 1.0
    assert found["e"] == Choice((1, 2)) and found["f"] == Choice((5,))
    with pytest.raises(ArgumentsError, match="x: .*normal.* is not available without a server"):
        space_of({"x": {"distribution": "normal", "mu": 0}})


def test_a_space_is_written_as_a_sweep_and_read_back() -> None:
    for space in (DEFAULT, read_space({"a": {"uniform": [0, 1]}, "b": [1, 2], "c": {"log_uniform": [1, 2]}})):
        assert space_of(sweep_of(space)["parameters"]) == space
    assert sweep_of(read_space({"b": [1, 2]}))["method"] == "grid" and sweep_of(DEFAULT)["method"] == "random"
