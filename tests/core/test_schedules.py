"""Schedules equal transformers' at every update, and say clearly what is wrong with their options."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, strategies as st

from loopwright.core import schedules
from loopwright.core.schedules import SCHEDULES, build_schedule, register_schedule, schedule_options
from loopwright.errors import ArgumentsError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

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
CASES = [(name, options) for name, rows in OPTIONS.items() for options in rows]


def theirs(name, warmup, total, options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE_LR)
    scheduler = transformers.get_scheduler(name, optimizer, warmup, total, dict(options))
    return scheduler.lr_lambdas[0]


def test_the_grid_covers_every_schedule():
    assert set(OPTIONS) == set(SCHEDULES)


def test_every_closed_form_of_transformers_is_here():
    stepped_by_a_metric = {"reduce_lr_on_plateau", "greedy"}
    assert {t.value for t in transformers.SchedulerType} - stepped_by_a_metric == set(SCHEDULES)


@pytest.mark.filterwarnings("ignore:Both num_training_steps")
@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize(("warmup", "total"), [(0, 20), (1, 20), (5, 20), (19, 20), (0, 1), (3, 4), (30, 20)])
def test_values_equal_transformers_at_every_update(name, options, warmup, total):
    ours = build_schedule(name, warmup, total, base_lr=BASE_LR, options=options)
    other = theirs(name, warmup, total, options)
    for update in range(total + 15):
        assert ours(update) == pytest.approx(other(update), rel=0, abs=1e-12)


@given(warmup=st.integers(0, 500), rest=st.integers(1, 2000), data=st.data())
def test_common_schedules_equal_transformers_anywhere(warmup, rest, data):
    total = warmup + rest
    update = data.draw(st.integers(0, total + 10))
    for name in ("linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "constant_with_warmup"):
        ours = build_schedule(name, warmup, total, base_lr=BASE_LR)(update)
        assert ours == pytest.approx(theirs(name, warmup, total, {})(update), rel=0, abs=1e-12)


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
    assert build_schedule(transformers.SchedulerType.LINEAR, 0, 10)(5) == 0.5


def test_a_schedule_can_be_registered_from_outside(monkeypatch):
    monkeypatch.setattr(schedules, "SCHEDULES", dict(SCHEDULES))
    register_schedule("saw", lambda num_warmup_steps, num_training_steps, *, teeth=2: lambda n: n * teeth % 10 / 10)
    assert math.isclose(build_schedule("saw", 0, 10, options={"teeth": 3})(5), 0.5)
