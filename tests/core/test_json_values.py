"""Values in logs, metrics and states: numbers are converted, the rest is refused by name, and no save fails."""

from __future__ import annotations

import decimal
import fractions
import json
import math
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from core.numpy_trainer import NumpyTrainer

from loopwright import TrainerCallback
from loopwright.args.base import BaseArguments
from loopwright.core.logs.json_values import LEFT_OUT, json_or_left_out, json_value
from loopwright.errors import LogError, LoopwrightError
from tests.core.numpy_strategy import LinearModel

SAMPLES = [(np.arange(2.0) + i, np.array([float(i)])) for i in range(8)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(np.float32(1.5), 1.5), (np.int64(3), 3), (np.bool_(True), True), (np.array(2.5), 2.5), (np.array([[4]]), 4),
     (None, None), ("text", "text"), ({"a": (np.float16(1), 2)}, {"a": [1.0, 2]}), (np.float64(0.1), 0.1),
     (decimal.Decimal("0.5"), 0.5), (fractions.Fraction(1, 4), 0.25), (np.longdouble(1.5), 1.5),
     (np.array([2.5], np.longdouble), 2.5), (10**400, 10**400)],
)  # fmt: skip
def test_numbers_are_converted(value: Any, expected: Any) -> None:
    found = json_value(value, "x")
    assert found == expected and type(found) is type(expected)
    assert json.loads(json.dumps(found)) == expected


def test_what_is_no_number_stays_what_it_is() -> None:
    assert math.isnan(json_value(np.float32("nan"), "x")) and json_value(float("inf"), "x") == float("inf")
    assert math.isnan(json_value(np.ma.array([1.0], mask=[True]), "x")), "what is under a mask is no value"


class Raises:
    """An object whose methods raise whatever they like."""

    def item(self) -> Any:
        raise KeyError("item")

    def __str__(self) -> str:
        raise RuntimeError("str")

    __repr__ = __str__


class Endless(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("items")


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


ITSELF: dict[str, Any] = {}
ITSELF["deeper"] = [ITSELF]
ODD: dict[str, Any] = {
    "contains itself": ITSELF, "too deep": nested(5000), "too long": 10**5000, "signaling NaN": decimal.Decimal("sNaN"),
    "beyond floats": fractions.Fraction(10**400), "raises": Raises(), "raises as a name": {Raises(): 1},
    "raises in items": Endless(a=1), "masked": np.ma.array([1.0, 2.0], mask=[True, False]), "complex": np.complex64(1),
    "date": np.datetime64("2026-01-01"), "structured": np.zeros(1, dtype=[("a", "f4")]),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_no_object_gets_past_its_name(name: str) -> None:
    with pytest.raises(LogError, match="the accuracy"):
        json_value({"inside": ODD[name]}, "the accuracy")


@pytest.mark.parametrize("name", ODD)
def test_no_object_in_a_state_breaks_a_save(name: str, tmp_path: Path) -> None:
    class Odd(TrainerCallback):
        def state_dict(self) -> dict[str, Any]:
            return {"odd": ODD[name]}

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.log_history.append({"odd": ODD[name]})

    trained(tmp_path, Odd())
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert "Odd" not in saved["stateful_callbacks"] and not [row for row in saved["log_history"] if "odd" in row]


def test_an_integer_that_is_no_float_is_refused_where_it_is_logged(tmp_path: Path) -> None:
    """The display and trackers need a float; the state of a callback may have it."""
    with pytest.raises(LogError, match="the logged value 'odd' is an integer of 1,329 bits"):
        trained(tmp_path).log({"odd": 10**400})


@pytest.mark.parametrize("value", [{1, 2}, object(), np.zeros(3), 1j, b"bytes", [1, {2}]])
def test_anything_else_is_refused_by_name(value: Any) -> None:
    with pytest.raises(LogError, match="the accuracy"):
        json_value(value, "the accuracy")
    told: list[str] = []
    assert json_or_left_out({"kept": 1, "lost": value}, "row", told.append) is LEFT_OUT
    assert len(told) == 1 and "row['lost']" in told[0]


class Holds(TrainerCallback):
    """A callback with a state that no file can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": np.int32(3), "lock": object()}


class Counts(TrainerCallback):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": np.int32(3)}


class Appends(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.log_history.append({"mine": object(), "step": np.int64(state.global_step)})


def trained(folder: Path, *callbacks: Any) -> NumpyTrainer:
    args = BaseArguments(str(folder), max_steps=4, save_steps=2, logging_steps=1, per_device_train_batch_size=2)
    trainer = NumpyTrainer(LinearModel(2), args, SAMPLES, callbacks=callbacks)
    trainer.train()
    return trainer


def test_no_value_breaks_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, Holds(), Counts(), Appends())
    assert caplog.text.count("left out of the checkpoint") == 2  # once for each of the two values
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert "Holds" not in saved["stateful_callbacks"], "a part of a state would not be that state"
    assert saved["stateful_callbacks"]["Counts"] == {"state_dict": {"seen": 3}}
    assert [row["step"] for row in saved["log_history"] if "loss" in row] == [1, 2, 3, 4]
    assert all("mine" not in row for row in saved["log_history"])


def test_a_logged_value_is_refused_where_it_is_logged(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    trainer.log({"fine": np.float32(0.5)})
    assert trainer.state.log_history[-1]["fine"] == 0.5
    with pytest.raises(LogError, match="the logged value 'odd' is a set"):
        trainer.log({"odd": {1}})
    assert "odd" not in trainer.state.log_history[-1]


@pytest.mark.parametrize("logs", [{1: 0.5}, {None: 0.5}, {("a",): 0.5, "b": 1}, None, [], "loss", 0.5])
def test_names_that_are_not_text_and_logs_that_are_not_a_dict_are_refused(logs: Any, tmp_path: Path) -> None:
    """Otherwise this row would fail in every file that it is written to later."""
    trainer = trained(tmp_path)
    rows = len(trainer.state.log_history)
    with pytest.raises(LogError, match=r"trainer\.log was given"):
        trainer.log(logs)
    trainer.log(MappingProxyType({"fine": 0.5}))
    assert len(trainer.state.log_history) == rows + 1


def test_a_state_that_cannot_be_saved_is_reported_before_the_first_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []

    class Listens(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            said.append(caplog.text)

    trained(tmp_path, Holds(), Listens())
    assert "the state of Holds['state_dict']['lock'] is a object" in said[0]
    assert caplog.text.count("left out of the checkpoint") == 1


def test_in_strict_mode_it_is_an_error_before_the_first_update(tmp_path: Path) -> None:
    steps: list[int] = []

    class Counting(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    args = BaseArguments(str(tmp_path), max_steps=4, save_steps=2, per_device_train_batch_size=2, strict=True)
    trainer = NumpyTrainer(LinearModel(2), args, SAMPLES, callbacks=[Holds(), Counting()])
    with pytest.raises(LoopwrightError, match="the state of Holds"):
        trainer.train()
    assert steps == []
