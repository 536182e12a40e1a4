"""State, progress and control: what is saved in a checkpoint."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from loopwright.core.state import (
    ExportableState,
    Progress,
    TrainerControl,
    TrainerState,
    callback_states,
    interval_in_updates,
    restore_callback_states,
)


@given(st.integers(1, 10_000), st.floats(0.0001, 0.9999))
def test_a_share_of_all_updates_is_rounded_up(max_steps: int, share: float) -> None:
    assert interval_in_updates(share, max_steps) == max(1, math.ceil(max_steps * share))


@given(st.integers(1, 10_000), st.integers(1, 1000))
def test_an_interval_in_updates_is_itself(max_steps: int, interval: int) -> None:
    assert interval_in_updates(interval, max_steps) == interval


def test_intervals_of_the_arguments_become_updates() -> None:
    state = TrainerState()
    state.compute_steps(SimpleNamespace(logging_steps=0.1, eval_steps=None, save_steps=7), max_steps=95)
    assert (state.logging_steps, state.eval_steps, state.save_steps) == (10, 500, 7)


def test_state_survives_json(tmp_path: Any) -> None:
    state = TrainerState(epoch=1.5, global_step=3, best_metric=0.25, log_history=[{"loss": 1.0, "step": 3}])
    path = tmp_path / "state.json"
    state.save_to_json(path)
    assert TrainerState.load_from_json(path) == state
    assert json.loads(path.read_text())["global_step"] == 3


def test_state_of_another_version_is_read_as_far_as_it_is_known() -> None:
    assert TrainerState.from_dict({"global_step": 4, "from_the_future": 1}).global_step == 4


def test_an_epoch_is_closed() -> None:
    progress = Progress(epoch=1, samples_in_epoch=10, batches_in_epoch=5, samples_seen=30)
    progress.close_epoch()
    assert progress == Progress(epoch=2, samples_seen=30)


def test_control_adopts_another() -> None:
    control = TrainerControl(should_log=True)
    control.adopt(TrainerControl(should_save=True))
    assert control == TrainerControl(should_save=True)
    assert TrainerControl.from_state(control.state()) == control


class Patient(ExportableState):
    def __init__(self, patience: int = 1) -> None:
        self.patience, self.waited = patience, 0

    def state(self) -> dict[str, Any]:
        return {"args": {"patience": self.patience}, "attributes": {"waited": self.waited}}


class Plain:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_callbacks_get_their_own_state_back() -> None:
    saved = [Patient(3), Plain(), Patient(5), object()]
    saved[0].waited, saved[1].count, saved[2].waited = 2, 9, 4
    states = json.loads(json.dumps(callback_states(saved)))
    fresh = [Patient(), Patient(), Plain()]
    assert restore_callback_states(fresh, states) == []
    assert [(each.patience, each.waited) for each in fresh[:2]] == [(3, 2), (5, 4)] and fresh[2].count == 9


def test_states_nobody_takes_are_named() -> None:
    states = callback_states([Patient(3), Patient(4), Plain()])
    assert restore_callback_states([Patient()], states) == ["Patient", "Plain"]


def test_an_exportable_callback_without_a_state_says_so() -> None:
    with pytest.raises(NotImplementedError, match="ExportableState is exportable"):
        ExportableState().state()
