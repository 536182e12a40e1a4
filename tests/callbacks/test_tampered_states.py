"""States of callbacks in a checkpoint that no callback has written: an error that names the file, nothing is used."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loopwright import EarlyStoppingCallback
from loopwright.config.run_control import RunControl
from loopwright.core.state import TrainerControl, TrainerState, callback_states, restore_callback_states
from loopwright.errors import CheckpointError
from loopwright.reporters.tensorboard import TensorBoardCallback

BEST = ("attributes", "best_value")
ID, FOLDER = ("state_dict", "run_id"), ("state_dict", "state", "folder")
SETTINGS = ("state_dict", "settings")
WRONG: list[tuple[type[Any], tuple[str, ...], Any]] = [
    *((EarlyStoppingCallback, BEST, value) for value in ([1], "seven", {"a": 1}, True)),
    *((TensorBoardCallback, ID, value) for value in (7, [1], "/../../a", "..", "a\0", "")),
    *((TensorBoardCallback, FOLDER, value) for value in (7, [1], "..", "../../elsewhere", "/etc/x", "x" * 300)),
    (TensorBoardCallback, ("state_dict", "state"), [1]),
    (RunControl, SETTINGS, [1]),
    *((RunControl, SETTINGS, {"logging_steps": value}) for value in ("seven", 0, -1, 2.5, None, [1])),
    *((RunControl, SETTINGS, {name: 1}) for name in ("global_step", "max_steps", "log_history")),
    *((RunControl, SETTINGS, {"learning_rate": value}) for value in ("seven", float("nan"), -1.0)),
]


def resumed(callback: Any, states: dict[str, Any], folder: Path) -> None:
    """What a resumed run does with the states of its callbacks."""
    restore_callback_states([callback], states)
    state = TrainerState(global_step=2, best_metric=1.0)
    args = SimpleNamespace(
        output_dir=str(folder), logging_dir=None, metric_for_best_model="loss", eval_strategy="steps"
    )
    callback.on_train_begin(args, state, TrainerControl())
    callback.on_train_end(args, state, TrainerControl())
    getattr(callback, "left", lambda: None)()


def saved(kind: type[Any], folder: Path) -> dict[str, Any]:
    """The states of a callback that has reported to a folder, as a checkpoint has them."""
    made = kind()
    if kind is TensorBoardCallback:
        pytest.importorskip("tensorboard")
        args = SimpleNamespace(output_dir=str(folder), logging_dir=None)
        made.on_log(args, TrainerState(global_step=1), TrainerControl(), logs={"loss": 1.0})
        made.on_train_end(args, TrainerState(global_step=1), TrainerControl())
    return callback_states([made])


@pytest.mark.parametrize(("kind", "path", "value"), WRONG, ids=lambda each: getattr(each, "__name__", str(each)[:30]))
def test_a_state_that_no_callback_has_written_is_refused(
    kind: type[Any], path: tuple[str, ...], value: Any, tmp_path: Path
) -> None:
    states = saved(kind, tmp_path / "a/run")
    resumed(kind(), copy.deepcopy(states), tmp_path / "a/run")
    place: Any = states[kind.__name__]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        resumed(kind(), states, tmp_path / "a/run")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("value", [None, -1.5, 3, float("inf")])
def test_any_best_value_of_early_stopping_is_restored(value: Any, tmp_path: Path) -> None:
    states = callback_states([EarlyStoppingCallback()])
    states["EarlyStoppingCallback"]["attributes"]["best_value"] = value
    callback = EarlyStoppingCallback()
    resumed(callback, states, tmp_path)
    assert callback.best_value == (1.0 if value is None else value)
