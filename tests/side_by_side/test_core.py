"""Order, schedules and results of the core have the values and names of torch and transformers."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from loopwright.core import outputs
from loopwright.core.order import permutation
from loopwright.core.schedules import SCHEDULES, build_schedule
from tests.core.test_schedules import BASE_LR, OPTIONS

transformers = pytest.importorskip("transformers")
trainer_utils = pytest.importorskip("transformers.trainer_utils")

CASES = [(name, options) for name, rows in OPTIONS.items() for options in rows]
seeds = st.one_of(st.integers(0, 2**32 - 1), st.integers(-(2**63), 2**63 - 1))


@given(st.integers(0, 400), seeds)
def test_a_permutation_is_torchs(n: int, seed: int) -> None:
    theirs = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    assert permutation(n, seed).tolist() == theirs.tolist()


def test_a_long_permutation_is_torchs() -> None:
    theirs = torch.randperm(50_000, generator=torch.Generator().manual_seed(11))
    assert np.array_equal(permutation(50_000, 11), theirs.numpy())


def theirs(name, warmup, total, options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE_LR)
    scheduler = transformers.get_scheduler(name, optimizer, warmup, total, dict(options))
    return scheduler.lr_lambdas[0]


def test_every_closed_form_of_transformers_is_here():
    stepped_by_a_metric = {"reduce_lr_on_plateau", "greedy"}
    assert {t.value for t in transformers.SchedulerType} - stepped_by_a_metric == set(SCHEDULES)


def test_names_may_be_those_of_transformers():
    assert build_schedule(transformers.SchedulerType.LINEAR, 0, 10)(5) == 0.5


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


@pytest.mark.parametrize("extra", [{}, {"inputs": 3}, {"losses": 4}, {"inputs": 3, "losses": 4}], ids=str)
def test_prediction_unpacks_into_the_parts_that_are_there(extra):
    theirs = trainer_utils.EvalPrediction
    given = {name: np.array([value]) for name, value in {"predictions": 1, "label_ids": 2, **extra}.items()}
    mine, expected = outputs.EvalPrediction(**given), theirs(**given)
    assert [int(part[0]) for part in mine] == [int(part[0]) for part in expected]
    assert all(mine[index] is expected[index] for index in range(len(mine)))
    with pytest.raises(IndexError):
        mine[len(mine)]


@pytest.mark.parametrize("name", ["TrainOutput", "PredictionOutput", "EvalLoopOutput", "BestRun"])
def test_results_have_the_fields_of_transformers(name):
    theirs = getattr(trainer_utils, name)
    mine = getattr(outputs, name)
    assert mine._fields == theirs._fields
    assert mine._field_defaults == theirs._field_defaults


@pytest.mark.parametrize(
    "counts", [{}, {"num_samples": 10}, {"num_samples": 10, "num_steps": 3}, {"num_tokens": 7}], ids=str
)
def test_speed_has_the_keys_and_values_of_transformers(counts, monkeypatch):
    theirs = trainer_utils.speed_metrics
    monkeypatch.setattr(time, "time", lambda: 107.0)
    assert outputs.speed_metrics("eval", 100.0, **counts) == theirs("eval", 100.0, **counts)
