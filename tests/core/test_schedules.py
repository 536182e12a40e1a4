"""Schedules end where they should, and say clearly what is wrong with their options."""

from __future__ import annotations

import itertools
import math

import pytest

from loopwright.args.names import SchedulerType
from loopwright.core import schedules
from loopwright.core.schedules import SCHEDULES, build_schedule, register_schedule, schedule_options
from loopwright.errors import ArgumentsError

BASE_LR = 3e-4
OPTIONS = {
    "linear": [{}],
    "cosine": [{}, {"num_cycles": 0.25}, {"num_cycles": 2.5}],
    "cosine_with_restarts": [{}, {"num_cycles": 3}],
    "polynomial": [{}, {"power": 2.0}, {"lr_end": 1e-5, "power": 0.5}],
    "constant": [{}],
    "constant_with_warmup": [{}],
    "inverse_sqrt": [{}, {"timescale": 7}],
    "cosine_with_min_lr": [{"min_lr": 1e-5}, {"min_lr_rate": 0.1, "num_cycles": 1.0}],
    "cosine_warmup_with_min_lr": [
        {"min_lr": 1e-5},
        {"min_lr_rate": 0.2, "warmup_lr_rate": 0.05},
        {"min_lr_rate": 0.0, "num_cycles": 1.5},
    ],
    "warmup_stable_decay": [
        {"num_decay_steps": 5},
        {"num_decay_steps": 5, "num_stable_steps": 4},
        *(
            {"num_decay_steps": 6, "warmup_type": rise, "decay_type": fall, "min_lr_ratio": floor}
            for rise, fall in itertools.product(["linear", "cosine", "1-sqrt"], repeat=2)
            for floor in (0.0, 0.1)
        ),
        {"num_decay_steps": 5, "num_cycles": 1.5},
    ],
}


def test_the_grid_covers_every_schedule():
    assert set(OPTIONS) == set(SCHEDULES)


@pytest.mark.parametrize("total", [1, 7, 1000])
def test_linear_reaches_exactly_zero_at_the_last_update(total):
    assert build_schedule("linear", 0, total)(total) == 0.0


def test_polynomial_with_a_run_that_is_all_warmup_does_not_divide_by_zero():
    assert build_schedule("polynomial", 10, 10, base_lr=BASE_LR)(10) == pytest.approx(1.0)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_an_unknown_option_is_named_and_the_accepted_ones_are_listed(name):
    with pytest.raises(ArgumentsError, match="wobble") as caught:
        build_schedule(name, 1, 10, base_lr=BASE_LR, options={"wobble": 3, **OPTIONS[name][0]})
    for option in schedule_options(name):
        assert option in str(caught.value)


def test_all_problems_are_reported_together():
    with pytest.raises(ArgumentsError) as caught:
        build_schedule("warmup_stable_decay", options={"a": 1, "b": 2})
    assert len(caught.value.problems) == 4  # two unknown options, no warm-up, no num_decay_steps


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"constant"}))
def test_missing_warmup_is_an_error(name):
    with pytest.raises(ArgumentsError, match="num_warmup_steps"):
        build_schedule(name, None, 10, base_lr=BASE_LR, options=OPTIONS[name][0])


@pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_restarts", "polynomial", "cosine_with_min_lr"])
def test_missing_length_is_an_error(name):
    with pytest.raises(ArgumentsError, match="num_training_steps"):
        build_schedule(name, 0, None, base_lr=BASE_LR, options=OPTIONS[name][0])


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("polynomial", {"lr_end": 1.0}, "lr_end"),
        ("cosine_with_min_lr", {}, "min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": 1e-5, "min_lr_rate": 0.1}, "exactly one"),
        ("warmup_stable_decay", {"num_decay_steps": 2, "decay_type": "steps"}, "decay_type='steps'"),
        ("inverse_sqrt", {"timescale": 0}, "timescale"),
    ],
)
def test_nonsense_is_refused_with_the_value(name, options, said):
    with pytest.raises(ArgumentsError, match=said):
        build_schedule(name, 1, 10, base_lr=BASE_LR, options=options)


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(ArgumentsError, match="Did you mean 'cosine'"):
        build_schedule("cosin", 0, 10)


def test_names_may_be_enums():
    assert build_schedule(SchedulerType.LINEAR, 0, 10)(5) == 0.5


def test_a_schedule_can_be_registered_from_outside(monkeypatch):
    monkeypatch.setattr(schedules, "SCHEDULES", dict(SCHEDULES))
    register_schedule("saw", lambda num_warmup_steps, num_training_steps, *, teeth=2: lambda n: n * teeth % 10 / 10)
    assert math.isclose(build_schedule("saw", 0, 10, options={"teeth": 3})(5), 0.5)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_options_of_a_schedule_can_be_read(name):
    if name == "constant":
        return
    options = {"min_lr": 1e-5} if "min_lr" in name else {"num_decay_steps": 3} if "stable" in name else {}
    schedule = build_schedule(name, 2, 10, base_lr=0.2, options=options)
    assert schedule.args == () and schedule.keywords["num_warmup_steps"] == 2
    assert schedule.keywords.get("num_training_steps", 10) == 10
