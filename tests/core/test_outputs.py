"""What training and evaluation hand back unpacks and measures as in transformers."""

from __future__ import annotations

import time

import numpy as np
import pytest

from loopwright.core import outputs


@pytest.mark.parametrize("extra", [{}, {"inputs": 3}, {"losses": 4}, {"inputs": 3, "losses": 4}], ids=str)
def test_prediction_unpacks_into_the_parts_that_are_there(extra):
    theirs = pytest.importorskip("transformers.trainer_utils").EvalPrediction
    given = {name: np.array([value]) for name, value in {"predictions": 1, "label_ids": 2, **extra}.items()}
    mine, expected = outputs.EvalPrediction(**given), theirs(**given)
    assert [int(part[0]) for part in mine] == [int(part[0]) for part in expected]
    assert all(mine[index] is expected[index] for index in range(len(mine)))
    with pytest.raises(IndexError):
        mine[len(mine)]


def test_prediction_shows_shapes_not_numbers():
    shown = repr(outputs.EvalPrediction((np.zeros((2, 3)), np.zeros(2)), np.zeros(2)))
    assert shown == "EvalPrediction(predictions=(array(2, 3), array(2,)), label_ids=array(2,))"


@pytest.mark.parametrize("name", ["TrainOutput", "PredictionOutput", "EvalLoopOutput", "BestRun"])
def test_results_have_the_fields_of_transformers(name):
    theirs = getattr(pytest.importorskip("transformers.trainer_utils"), name)
    mine = getattr(outputs, name)
    assert mine._fields == theirs._fields
    assert mine._field_defaults == theirs._field_defaults


@pytest.mark.parametrize(
    "counts", [{}, {"num_samples": 10}, {"num_samples": 10, "num_steps": 3}, {"num_tokens": 7}], ids=str
)
def test_speed_has_the_keys_and_values_of_transformers(counts, monkeypatch):
    theirs = pytest.importorskip("transformers.trainer_utils").speed_metrics
    monkeypatch.setattr(time, "time", lambda: 107.0)
    assert outputs.speed_metrics("eval", 100.0, **counts) == theirs("eval", 100.0, **counts)


def test_speed_without_elapsed_time_has_no_rate(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 100.0)
    assert outputs.speed_metrics("train", 100.0, num_samples=5) == {"train_runtime": 0.0}
