"""What a save costs does not grow with the run: rows are encoded once, and losses are kept as sums."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core.numpy_runs import outcome, steps_in, trainer_of
from core.numpy_trainer import NumpyTrainer
from hypothesis import given, strategies as st

from loopwright import TrainerCallback
from loopwright.core import actions
from loopwright.core.checkpoint.json_files import documents_writer, write_json
from loopwright.core.logs.log_history import RECENT, LogHistory
from loopwright.core.measure.meter import READ_AT, Meter
from loopwright.core.resuming import saved_state
from loopwright.core.state import TrainerState


def written(history: LogHistory, convert: Callable[[Any], Any] = lambda row: row) -> Any:
    return json.loads("".join(history.encoded(convert).pieces()))


def rows(number: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": step / 7} for step in range(number)]


def test_every_row_is_encoded_when_it_is_recent_and_then_no_more() -> None:
    encoded: list[int] = []
    history = LogHistory()

    def convert(row: Any) -> Any:
        encoded.append(row["step"])
        return row

    for _ in range(30):
        history.extend({"step": len(history) + each} for each in range(50))
        encoded.clear()
        assert written(history, convert) == list(history)
        assert len(encoded) <= 50 + RECENT


CHANGES: dict[str, Callable[[LogHistory, random.Random], Any]] = {
    "append": lambda h, r: h.append({"x": r.random()}),
    "extend": lambda h, r: h.extend(rows(r.randrange(150))),
    "add": lambda h, r: h.__iadd__(rows(3)),
    "edit": lambda h, r: r.choice(h).update(x=r.random()),
    "set": lambda h, r: r.choice(h).__setitem__("y", r.random()),
    "or": lambda h, r: r.choice(h).__ior__({"z": r.random()}),
    "default": lambda h, r: r.choice(h).setdefault(str(r.random()), 1),
    "forget": lambda h, r: r.choice(h).pop("x", None),
    "forget all": lambda h, r: r.choice(h).clear(),
    "replace": lambda h, r: h.__setitem__(r.randrange(len(h)), {"new": r.random()}),
    "replace the last": lambda h, r: h.__setitem__(-1, {"last": r.random()}),
    "replace some": lambda h, r: h.__setitem__(slice(0, 5), [{"some": 1}]),
    "delete": lambda h, r: h.__delitem__(r.randrange(len(h))),
    "delete some": lambda h, r: h.__delitem__(slice(0, len(h) - 1, 3)),
    "insert": lambda h, r: h.insert(r.randrange(len(h)), {"inserted": 1}),
    "pop": lambda h, r: h.pop(),
    "pop the first": lambda h, r: h.pop(0),
    "remove": lambda h, r: h.remove(h[0]),
    "reverse": lambda h, r: h.reverse(),
    "sort": lambda h, r: h.sort(key=len),
    "twice": lambda h, r: h.__imul__(2) if len(h) < 2000 else None,
    "clear": lambda h, r: h.clear(),
}


@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=12), st.randoms(use_true_random=False))
def test_any_change_of_the_list_is_written(changes: list[str], rnd: random.Random) -> None:
    history = LogHistory(rows(250))
    for change in ["append", *changes]:
        if history or change in ("append", "extend", "add"):
            CHANGES[change](history, rnd)
        assert written(history) == list(history), change


def test_a_save_in_the_background_writes_what_was_there_when_it_began(tmp_path: Path) -> None:
    history = LogHistory(rows(300))
    before = copy.deepcopy(list(history))
    write = documents_writer({"state.json": {"log_history": history.encoded(lambda row: row), "a": {"b": [1]}}})
    history[3]["loss"] = 99
    history.extend(rows(200))
    history.encoded(lambda row: row)
    write(tmp_path)
    assert json.loads((tmp_path / "state.json").read_text()) == {"log_history": before, "a": {"b": [1]}}


@pytest.mark.parametrize("number", [0, 1, RECENT, RECENT + 1, 350])
def test_a_document_with_rows_is_json(number: int, tmp_path: Path) -> None:
    values = {"z": None, "log_history": LogHistory(rows(number)).encoded(lambda row: row), "a": {"b": [1, {"c": 2}]}}
    write_json(tmp_path / "state.json", values)
    assert json.loads((tmp_path / "state.json").read_text()) == {**values, "log_history": rows(number)}


def test_it_is_a_list_of_dicts_for_everything_else() -> None:
    state = TrainerState(global_step=3)
    state.log_history.extend(rows(250))
    written(state.log_history)  # type: ignore[arg-type]
    assert state.log_history == rows(250) and isinstance(state.log_history[0], dict)
    assert json.loads(state.to_json_string())["log_history"] == rows(250)
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert other == state
        other.log_history[0]["loss"] = 5
        assert written(other.log_history)[0]["loss"] == 5 and state.log_history[0]["loss"] == 0


class Edits(TrainerCallback):
    """Changes old rows and assigns a list of its own."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 150:
            state.log_history[0]["note"] = "edited"
        if state.global_step == 250:
            state.log_history = list(state.log_history[50:])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows that each save has encoded."""
    saves: list[int] = []
    convert, encode = saved_state.json_or_left_out, actions.LoopActions.encoded_history

    def counting(row: Any, name: str, tell: Any) -> Any:
        if name.startswith("a row"):
            saves[-1] += 1
        return convert(row, name, tell)

    def counted(self: Any) -> Any:
        saves.append(0)
        return encode(self)

    monkeypatch.setattr(actions.LoopActions, "encoded_history", counted)
    monkeypatch.setattr(saved_state, "json_or_left_out", counting)
    return saves


def long_run(folder: Path, *callbacks: Any, steps: int = 1200, **options: Any) -> NumpyTrainer:
    return trainer_of(
        folder, *callbacks, max_steps=steps, logging_steps=1, save_strategy="steps", save_steps=100,
        save_total_limit=2, gradient_accumulation_steps=1, **options,
    )  # fmt: skip


@pytest.mark.parametrize("async_save", [True, False])
def test_a_save_takes_as_long_at_the_end_as_at_the_beginning(
    async_save: bool, counted: list[int], tmp_path: Path
) -> None:
    long_run(tmp_path, async_save=async_save).train()
    assert len(counted) == 12 and max(counted) <= 100 + RECENT
    assert len(json.loads((tmp_path / "checkpoint-1200/trainer_state.json").read_text())["log_history"]) == 1200
    assert steps_in(tmp_path) == [1100, 1200]
    counted.clear()
    resumed = long_run(tmp_path, steps=1400)
    resumed.train(resume_from_checkpoint=True)
    assert counted[0] == 1200 and max(counted[1:]) <= 100 + RECENT  # once for all rows, before the first step
    assert [row["step"] for row in outcome(resumed)["log_history"] if "loss" in row] == [*range(1, 1401)]


def test_rows_that_a_callback_changes_are_saved(tmp_path: Path) -> None:
    trainer = long_run(tmp_path, Edits(), steps=400)
    trainer.train()
    saved = json.loads((tmp_path / "checkpoint-400/trainer_state.json").read_text())["log_history"]
    assert saved == trainer.state.log_history[: len(saved)] and saved[0]["step"] == 51 and len(saved) == 350
    trainer = long_run(tmp_path / "other", Edits(), steps=200)
    trainer.train()
    saved = json.loads((tmp_path / "other/checkpoint-200/trainer_state.json").read_text())["log_history"]
    assert saved[0]["note"] == "edited"


def losses(number: int) -> list[float]:
    return [math.nan if each % 997 == 500 else 1 / (each + 1) for each in range(number)]


@pytest.mark.parametrize("filtered", [True, False])
def test_a_run_without_log_points_keeps_sums(filtered: bool) -> None:
    """The mean does not depend on when losses were read or on a save in between."""
    meter, other = (Meter(lambda values: [*values], filter_nonfinite=filtered) for _ in range(2))
    for number, loss in enumerate(losses(3 * READ_AT + 50)):
        meter.add(loss, 1.0)
        other.add(loss, 1.0)
        if number % 700 == 3:
            state = json.loads(json.dumps(other.state_dict()))
            assert len(state["losses"]) < READ_AT
            other = Meter(lambda values: [*values], filter_nonfinite=filtered)
            other.load_state_dict(state)
    one, two = meter.read(), other.read()
    assert json.dumps(one.__dict__) == json.dumps(two.__dict__)
    finite = [loss for loss in losses(3 * READ_AT + 50) if math.isfinite(loss)]
    assert one.nonfinite == 3 * READ_AT + 50 - len(finite) and one.first_nonfinite == 500
    assert math.isclose(one.loss, sum(finite) / len(finite)) if filtered else math.isnan(one.loss)
