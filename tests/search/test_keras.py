"""The same method on TensorFlow: trainers of Keras models search as those of PyTorch do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.grid, pytest.mark.xdist_group("tensorflow")]


def test_a_keras_model_is_searched(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    import keras
    import numpy as np

    from loopwright import TFTrainer, TFTrainingArguments

    def model(trial: Any = None) -> Any:
        made = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        made.compile(loss="mse")
        return made

    inputs = np.random.default_rng(0).random((16, 3)).astype("float32")
    data = [(each, each.sum(keepdims=True)) for each in inputs]
    args = TFTrainingArguments(
        str(tmp_path), max_steps=4, eval_strategy="steps", eval_steps=2, save_steps=2, per_device_train_batch_size=4,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    best = TFTrainer(model_init=model, args=args, train_dataset=data, eval_dataset=data).hyperparameter_search(
        {"learning_rate": [1e-4, 1e-1]}, backend="grid", n_trials=2, in_process=True
    )
    assert best.hyperparameters == {"learning_rate": 0.1} and Path(best.checkpoint).is_dir()
