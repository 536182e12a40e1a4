"""Stopping when a metric no longer gets better."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest

from loopwright.callbacks.early_stopping import EarlyStoppingCallback
from loopwright.core.state import TrainerControl, TrainerState, callback_states, restore_callback_states
from loopwright.errors import ArgumentsError, MetricError


def arguments(**changes):
    values = {"metric_for_best_model": "loss", "greater_is_better": False, "eval_strategy": "steps"}
    return SimpleNamespace(**{**values, **changes})


class Evaluations:
    """A run that is nothing but evaluations at steps 1, 2, 3, ..."""

    def __init__(self, callback, args, *, step=0, best_metric=None):
        self.callback, self.args = callback, args
        self.state = TrainerState(global_step=step, best_metric=best_metric)
        self.control = TrainerControl()
        callback.on_train_begin(args, self.state, self.control)

    def evaluate(self, **metrics):
        self.state.global_step += 1
        self.callback.on_evaluate(self.args, self.state, self.control, metrics=metrics)
        return self.control.should_training_stop

    def stop_step(self, values):
        for value in values:
            if self.control.should_training_stop or self.evaluate(eval_loss=value):
                return self.state.global_step
        return None


@pytest.mark.parametrize(
    ("patience", "threshold", "greater", "series", "stops_at"),
    [
        (1, 0.0, False, [3, 2, 1, 0], None),
        (1, 0.0, False, [3, 2, 2, 0], 3),
        (2, 0.0, False, [3, 4, 2, 2, 2, 0], 5),
        (1, 0.0, True, [1, 2, 3, 2], 4),
        (1, 0.5, False, [3, 2.8, 2], 2),
        (3, 0.0, False, [1, 2, 2], None),
        (1, None, False, [1, 1], 2),
        (2, 0.0, False, [float("nan"), 1.0, float("nan"), float("nan")], 4),
        (2, 0.0, False, [float("nan"), float("nan"), 1.0], 2),
    ],
)
def test_stops_where_expected(patience, threshold, greater, series, stops_at):
    run = Evaluations(EarlyStoppingCallback(patience, threshold), arguments(greater_is_better=greater))
    assert run.stop_step(series) == stops_at


@pytest.mark.parametrize("seed", range(30))
def test_stops_where_transformers_does(seed):
    theirs_module = pytest.importorskip("transformers.trainer_callback")
    draw = random.Random(seed)
    patience, threshold, greater = draw.randint(1, 4), draw.choice([0.0, 0.05, 0.3]), draw.random() < 0.5
    series = [round(draw.uniform(0, 1), 2) for _ in range(30)]
    ours = Evaluations(EarlyStoppingCallback(patience, threshold), arguments(greater_is_better=greater))

    theirs, state, control = theirs_module.EarlyStoppingCallback(patience, threshold), TrainerState(), TrainerControl()
    stopped = None
    for step, value in enumerate(series, start=1):
        theirs.on_evaluate(arguments(greater_is_better=greater), state, control, metrics={"eval_loss": value})
        if state.best_metric is None or (value > state.best_metric if greater else value < state.best_metric):
            state.best_metric = value
        if control.should_training_stop:
            stopped = step
            break
    assert ours.stop_step(series) == stopped


SERIES = [5, 4, 4.5, 3, 3.2, 3.1, 3.3, 1]


@pytest.mark.parametrize("resume_after", range(1, 7))
def test_resume_stops_at_the_same_step(resume_after):
    callback = EarlyStoppingCallback(3)
    assert Evaluations(EarlyStoppingCallback(3), arguments()).stop_step(SERIES) == 7

    first = Evaluations(callback, arguments())
    assert first.stop_step(SERIES[:resume_after]) is None
    saved = json.loads(json.dumps(callback_states([callback])))

    again = EarlyStoppingCallback(3)
    assert restore_callback_states([again], saved) == []
    resumed = Evaluations(again, arguments(), step=resume_after)
    assert resumed.stop_step(SERIES[resume_after:]) == 7


def test_from_state_gives_the_same_callback():
    callback = EarlyStoppingCallback(3, 0.1)
    Evaluations(callback, arguments()).stop_step([3, 4])
    copy = EarlyStoppingCallback.from_state(callback.state())
    assert copy.state() == callback.state()
    assert (copy.early_stopping_patience_counter, copy.best_value) == (1, 3)


def test_a_run_that_had_stopped_stays_stopped(caplog):
    callback = EarlyStoppingCallback(1)
    Evaluations(callback, arguments()).stop_step([1, 2])
    run = Evaluations(EarlyStoppingCallback.from_state(callback.state()), arguments(), step=2)
    assert run.control.should_training_stop
    assert "is not resumed" in caplog.text


def test_the_best_metric_of_a_foreign_checkpoint_is_used():
    run = Evaluations(EarlyStoppingCallback(1), arguments(), step=5, best_metric=1.0)
    assert run.stop_step([2.0]) == 6


def test_training_anew_starts_to_count_anew():
    callback = EarlyStoppingCallback(2)
    Evaluations(callback, arguments()).stop_step([1, 2, 3])
    assert Evaluations(callback, arguments()).stop_step([5, 4, 6]) is None


def test_evaluations_outside_training_do_not_count():
    callback = EarlyStoppingCallback(1)
    run = Evaluations(callback, arguments())
    run.evaluate(eval_loss=1.0)
    callback.on_train_end(run.args, run.state, run.control)
    assert not run.evaluate(eval_loss=2.0)
    assert callback.early_stopping_patience_counter == 0


@pytest.mark.parametrize("name", ["accuracy", "eval_accuracy"])
def test_the_prefix_of_the_metric_may_be_left_out(name):
    args = arguments(metric_for_best_model=name, greater_is_better=None)
    run = Evaluations(EarlyStoppingCallback(1), args)
    assert [run.evaluate(eval_accuracy=value, eval_loss=1.0) for value in (0.1, 0.5, 0.4)] == [False, False, True]


def test_a_missing_metric_is_an_error_that_lists_the_others():
    run = Evaluations(EarlyStoppingCallback(1), arguments(metric_for_best_model="f1"))
    with pytest.raises(MetricError, match=r"eval_f1.*eval_accuracy, eval_loss, eval_runtime"):
        run.evaluate(eval_loss=1.0, eval_accuracy=0.5, eval_runtime=1.0)


def test_with_several_datasets_the_metric_comes_with_one_of_them():
    callback = EarlyStoppingCallback(1)
    args = arguments(metric_for_best_model="eval_b_loss")
    run = Evaluations(callback, args)
    for b_loss in (2.0, 1.0):
        run.evaluate(eval_a_loss=1.0, eval_a_runtime=0.1)
        run.state.global_step -= 1
        assert not run.evaluate(eval_b_loss=b_loss, eval_b_runtime=0.1)
    assert callback.best_value == 1.0


def test_with_several_datasets_and_no_metric_the_next_step_is_an_error():
    run = Evaluations(EarlyStoppingCallback(1), arguments(metric_for_best_model="f1"))
    run.evaluate(eval_a_loss=1.0, eval_a_runtime=0.1)
    run.state.global_step -= 1
    run.evaluate(eval_b_loss=1.0, eval_b_runtime=0.1)
    with pytest.raises(MetricError, match="eval_a_loss, eval_a_runtime, eval_b_loss"):
        run.evaluate(eval_a_loss=1.0, eval_a_runtime=0.1)


def test_all_problems_of_the_arguments_are_told_together():
    with pytest.raises(ArgumentsError, match=r"2 problems[\s\S]*metric_for_best_model[\s\S]*eval_strategy"):
        Evaluations(EarlyStoppingCallback(1), arguments(metric_for_best_model=None, eval_strategy="no"))


def test_patience_must_be_positive():
    with pytest.raises(ArgumentsError, match="early_stopping_patience=0"):
        EarlyStoppingCallback(0)
