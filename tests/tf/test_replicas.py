"""Two replicas train as one: sums before clipping, accumulation, uneven batches, evaluation, checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .tools import MARKS, TF, arrays, kept, logged, rows, sentences, trainer, two_replicas, weights

pytestmark = MARKS


def run(folder: Any, replicas: int, accumulation: int, task: str = "tokens", **options: Any) -> Any:
    data = sentences(24) if task == "tokens" else rows(24)
    made = trainer(
        folder, getattr(TF, task)(), data, strategy=two_replicas() if replicas == 2 else None, max_steps=4,
        per_device_train_batch_size=32 // replicas // accumulation // 2, gradient_accumulation_steps=accumulation,
        max_grad_norm=0.1, **options,
    )  # fmt: skip
    made.train()
    return made


@pytest.mark.parametrize(
    ("replicas", "accumulation"), [(2, 4), *(pytest.param(*each, marks=pytest.mark.grid) for each in ((1, 4), (2, 1)))]
)
def test_replicas_and_accumulation_change_nothing(replicas: int, accumulation: int, tmp_path: Any) -> None:
    one = run(tmp_path, 1, 1)
    assert min(logged(one, "grad_norm")) > 0.1, "nothing was clipped"
    other = run(tmp_path, replicas, accumulation)
    assert logged(other, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
    assert logged(other, "grad_norm") == pytest.approx(logged(one, "grad_norm"), rel=1e-4)
    for mine, theirs in zip(weights(other), weights(one), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("n", [7, 5])
def test_batches_that_cannot_be_shared_evenly_are_exact(n: int, tmp_path: Any) -> None:
    """Seven samples in batches of four: the last has three; five: the last has one, less than there are replicas."""
    results = []
    for strategy in (None, two_replicas()):
        size = 4 if strategy is None else 2
        made = trainer(
            tmp_path, TF.net(), rows(n), strategy=strategy, max_steps=4, per_device_train_batch_size=size,
            evaluation=rows(n), per_device_eval_batch_size=size, compute_metrics=lambda p: {"n": len(p.predictions)},
        )  # fmt: skip
        made.train()
        results.append((logged(made, "loss"), made.evaluate(), made.predict(rows(n)), weights(made)))
    (loss, metrics, predicted, mine), (two_loss, two_metrics, two_predicted, theirs) = results
    assert two_loss == pytest.approx(loss, rel=1e-5)
    assert two_metrics["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-4)
    assert metrics["eval_n"] == two_metrics["eval_n"] == n
    np.testing.assert_allclose(predicted.predictions, two_predicted.predictions, atol=1e-4)
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_model_built_outside_the_scope_is_rebuilt_inside_with_its_weights(tmp_path: Any, caplog: Any) -> None:
    model = TF.net()
    before = [variable.numpy() for variable in model.variables]
    made = trainer(tmp_path, model, strategy=two_replicas(), per_device_train_batch_size=2)
    assert "built outside args.strategy.scope()" in caplog.text
    assert made.model is not model
    for mine, theirs in zip(made.model.variables, before, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs)
    made.train()
    assert logged(made, "loss")[-1] < logged(made, "loss")[0] * 2


def test_a_model_built_in_the_scope_or_by_model_init_is_taken_as_it_is(tmp_path: Any, caplog: Any) -> None:
    strategy = two_replicas()
    with strategy.scope():
        model = TF.net()
    made = trainer(tmp_path, model, strategy=strategy, max_steps=1, per_device_train_batch_size=2)
    assert made.model is model and "rebuilt" not in caplog.text and "outside" not in caplog.text


def test_a_checkpoint_of_two_replicas_goes_on_with_one(tmp_path: Any) -> None:
    two = trainer(
        tmp_path, strategy=two_replicas(), max_steps=4, per_device_train_batch_size=2, save_strategy="steps",
        save_steps=2,
    )  # fmt: skip
    two.train()
    assert kept(tmp_path) == [2, 4]
    one = trainer(tmp_path, max_steps=4, per_device_train_batch_size=4)
    one.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(one, "loss") == pytest.approx(logged(two, "loss"), rel=1e-5)


def test_moving_means_stay_the_same_on_all_replicas_and_bad_updates_can_be_left_out(tmp_path: Any) -> None:
    import keras

    strategy = two_replicas()
    with strategy.scope():
        layers = [keras.Input((4,)), keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(loss="mse")
    x, y = arrays(12)
    x[4:8] = np.nan
    made = trainer(
        tmp_path, model, (x, y), strategy=strategy, max_steps=1, per_device_train_batch_size=2, on_nonfinite="skip",
        train_sampling_strategy="sequential",
    )  # fmt: skip
    made.train()
    moving = [v for v in model.non_trainable_variables if "moving" in v.path]
    for variable in moving:
        first, second = (part.numpy() for part in strategy.experimental_local_results(variable.value))
        np.testing.assert_array_equal(first, second)
    before = weights(made)
    made = trainer(
        tmp_path, model, (x[4:8], y[4:8]), strategy=strategy, max_steps=1, per_device_train_batch_size=2,
        on_nonfinite="skip",
    )  # fmt: skip
    made.train()
    assert logged(made, "nonfinite_steps") == [1]
    for mine, theirs in zip(weights(made), before, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert all(np.isfinite(variable.numpy()).all() for variable in moving)
