"""What training and evaluation hand back."""

from __future__ import annotations

import time

import numpy as np

from loopwright.core import outputs


def test_prediction_shows_shapes_not_numbers():
    shown = repr(outputs.EvalPrediction((np.zeros((2, 3)), np.zeros(2)), np.zeros(2)))
    assert shown == "EvalPrediction(predictions=(array(2, 3), array(2,)), label_ids=array(2,))"


def test_speed_without_elapsed_time_has_no_rate(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 100.0)
    assert outputs.speed_metrics("train", 100.0, num_samples=5) == {"train_runtime": 0.0}
