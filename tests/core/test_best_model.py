"""Evaluation, the best model, and which checkpoints are kept."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors.numpy import load_file

from loopwright.callbacks.early_stopping import EarlyStoppingCallback
from loopwright.errors import MetricError

from .numpy_runs import Interfering, Recorder, samples, steps_in, timeless, trainer_of
from .numpy_trainer import NumpyTrainer

EVERY = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "logging_strategy": "no"}


class Scripted(NumpyTrainer):
    """Evaluates to numbers that are known beforehand."""

    values: tuple[float, ...] = ()

    def evaluate(self, *given: Any, **options: Any) -> dict[str, float]:
        self._loopwright.callback_handler.fire("on_evaluate", metrics={})
        return {"eval_score": self.values[self.state.global_step - 1]}


def scripted(folder: str, values: list[float], *callbacks: Any, **options: Any) -> NumpyTrainer:
    cls = type("Mine", (Scripted,), {"values": tuple(values)})
    given = {**EVERY, "metric_for_best_model": "score", "max_steps": len(values), "eval_data": samples(), **options}
    return trainer_of(folder, *callbacks, cls=cls, **given)


def kept_by_hand(best_then: list[int], limit: int | None) -> list[int]:
    """The checkpoints that are left, if the oldest go but never the newest or the best so far."""
    held: list[int] = []
    for step, best in enumerate(best_then, start=1):
        held.append(step)
        while limit is not None and len(held) > limit:
            going = [each for each in held if each not in (step, best)]
            if not going:
                break
            held.remove(going[0])
    return held


scores = st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4, 0.5]), min_size=1, max_size=8)


@settings(max_examples=40)
@given(scores, st.booleans(), st.sampled_from([None, 1, 2, 3]), st.booleans())
def test_the_best_and_the_newest_are_kept(
    values: list[float], greater: bool, limit: int | None, later: bool
) -> None:
    def best_of(seen: list[float]) -> int:
        return seen.index(max(seen) if greater else min(seen)) + 1

    best_then = [best_of(values[:end]) for end in range(1, len(values) + 1)]
    with TemporaryDirectory() as folder:
        trainer = scripted(
            folder,
            values,
            greater_is_better=greater,
            save_total_limit=limit,
            load_best_model_at_end=True,
            async_save=later,
        )
        trainer.train()
        assert steps_in(folder) == kept_by_hand(best_then, limit)
        best = best_then[-1]
        assert (trainer.state.best_global_step, trainer.state.best_metric) == (best, values[best - 1])
        assert trainer.state.best_model_checkpoint == f"{folder}/checkpoint-{best}"
        weights = load_file(f"{folder}/checkpoint-{best}/model.safetensors")
    for name, value in trainer.model.parameters.items():
        assert value.tolist() == weights[name].tolist()


@settings(max_examples=15)
@given(scores)
def test_only_what_is_better_is_saved_when_that_is_asked(values: list[float]) -> None:
    with TemporaryDirectory() as folder:
        scripted(folder, values, save_strategy="best", greater_is_better=False).train()
        better = [step for step in range(1, len(values) + 1) if values[step - 1] < min([9.0, *values[: step - 1]])]
        assert steps_in(folder) == better


def test_a_pinned_checkpoint_stays(output_dir: str) -> None:
    def pin(args: Any, state: Any, control: Any, **context: Any) -> None:
        (Path(args.output_dir) / "checkpoint-2" / "pinned").touch()

    trainer_of(
        output_dir, Interfering("on_save", 2, pin), **EVERY, eval_data=samples(), save_total_limit=2, async_save=False
    ).train()
    assert steps_in(output_dir) == [2, 11, 12]


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_training_stops_when_nothing_gets_better(patience: int, output_dir: str) -> None:
    trainer = scripted(
        output_dir,
        [0.5, 0.4, 0.6, 0.6, 0.6, 0.1],
        Stopper(patience),
        greater_is_better=False,
        load_best_model_at_end=True,
    )
    assert trainer.train().global_step == 2 + patience
    assert trainer.state.best_global_step == 2


class Stopper(EarlyStoppingCallback):
    """Early stopping that is told the metrics by the trainer's state."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        values = (0.5, 0.4, 0.6, 0.6, 0.6, 0.1)
        super().on_evaluate(args, state, control, metrics={"eval_score": values[state.global_step - 1]}, **kwargs)


def test_evaluation_is_exact_and_leaves_no_trace(output_dir: str) -> None:
    recorder = Recorder()
    data = samples(17, seed=5)
    trainer = trainer_of(output_dir, recorder, eval_data=data, per_device_eval_batch_size=4)
    states, weights = trainer._loopwright.strategy.rng_state(), trainer.model.parameters["weight"].copy()
    metrics = trainer.evaluate()
    inputs, targets = np.stack([x for x, _ in data]), np.stack([y for _, y in data])
    assert metrics["eval_loss"] == pytest.approx(float(((trainer.model(inputs) - targets) ** 2).mean()), rel=1e-12)
    assert recorder.events.count("on_prediction_step") == 5
    assert trainer._loopwright.strategy.rng_state() == states
    assert np.array_equal(trainer.model.parameters["weight"], weights) and trainer.model.is_training


def test_metrics_are_computed_from_all_predictions(output_dir: str) -> None:
    data = samples(17, seed=5)

    def metrics(prediction: Any) -> dict[str, float]:
        errors = prediction.predictions - prediction.label_ids
        return {"worst": float(abs(errors).max()), "rows": len(errors)}

    trainer = trainer_of(output_dir, compute_metrics=metrics)
    result = trainer.predict(data)
    expected = np.stack([trainer.model(x) for x, _ in data])
    np.testing.assert_allclose(result.predictions, expected, rtol=1e-12)
    assert result.metrics["test_worst"] == pytest.approx(abs(expected - np.stack([y for _, y in data])).max())
    assert result.metrics["test_rows"] == 17


def test_named_sets_are_evaluated_one_by_one(output_dir: str) -> None:
    sets = {"small": samples(3, seed=3), "large": samples(9, seed=4)}
    trainer = trainer_of(output_dir, eval_data=sets)
    metrics = timeless(trainer.evaluate())
    assert set(metrics) == {"eval_small_loss", "eval_large_loss", "epoch"}
    assert metrics["eval_small_loss"] == trainer.evaluate(sets["small"])["eval_loss"]


def test_a_metric_that_does_not_exist_is_named(output_dir: str) -> None:
    trainer = trainer_of(output_dir, **EVERY, eval_data=samples(), metric_for_best_model="accuracy")
    with pytest.raises(MetricError, match="'accuracy' is not one of the metrics of the evaluation: .*eval_loss"):
        trainer.train()


def test_evaluating_first_comes_before_the_first_step(output_dir: str) -> None:
    recorder = Recorder()
    trainer_of(output_dir, recorder, eval_data=samples(), eval_strategy="epoch", eval_on_start=True).train()
    assert recorder.events.index("on_evaluate") < recorder.events.index("on_step_begin")
    assert [step for event, step in recorder.seen if event == "on_evaluate"] == [0, 4, 8, 12]
