"""When to log, evaluate, save and stop."""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from loopwright.callbacks.flow import DefaultFlowCallback
from loopwright.callbacks.triggers import seconds_in
from loopwright.core.state import TrainerControl, TrainerState
from loopwright.errors import ArgumentsError


def arguments(**changes):
    values = {
        "logging_strategy": "no",
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_first_step": False,
        "eval_delay": 0,
    }
    return SimpleNamespace(**{**values, **changes})


class Clock:
    def __init__(self):
        self.now = 1000.0
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.now


class Run:
    """A run that only counts steps and obeys control."""

    def __init__(self, args, *, clock=None, max_steps=10**9, global_step=0, samples_seen=0):
        self.args, self.clock = args, clock or Clock()
        self.flow = DefaultFlowCallback(clock=self.clock)
        self.state = TrainerState(max_steps=max_steps, global_step=global_step)
        self.state.samples_seen = samples_seen
        self.control = TrainerControl()
        self.flow.on_train_begin(args, self.state, self.control)

    def step(self, seconds=0.0, samples=0, save_seconds=0.0):
        """One update; returns what was asked for, after granting it."""
        self.control = TrainerControl()
        self.clock.now += seconds
        self.state.global_step += 1
        self.state.samples_seen += samples
        self.flow.on_step_end(self.args, self.state, self.control)
        if self.control.should_save:
            self.clock.now += save_seconds
            self.state.last_save_seconds = save_seconds
            self.flow.on_save(self.args, self.state, self.control)
        return self.control

    def evaluate(self, seconds):
        self.clock.now += seconds
        self.flow.on_evaluate(self.args, self.state, self.control)

    def steps_that_save(self, count, **step):
        return [n for n in range(1, count + 1) if self.step(**step).should_save]


STRATEGIES = list(
    itertools.product(["no", "steps", "epoch"], ["no", "steps", "epoch"], ["no", "steps", "epoch", "best"])
)


@pytest.mark.parametrize(("logging", "evaluation", "saving"), STRATEGIES)
def test_flow_agrees_with_transformers(logging, evaluation, saving):
    transformers = pytest.importorskip("transformers.trainer_callback")
    utils = pytest.importorskip("transformers.trainer_utils")
    theirs = transformers.DefaultFlowCallback()
    ours = DefaultFlowCallback()
    grid = itertools.product([False, True], [0, 3, 2.5], [1, 2, 3, 5], [0, 1, 4], [1, 2, 3, 4, 6, 7, 12])
    for first, delay, interval, save_interval, step in grid:
        common = {"logging_first_step": first, "eval_delay": delay}
        our_args = arguments(logging_strategy=logging, eval_strategy=evaluation, save_strategy=saving, **common)
        their_args = SimpleNamespace(
            logging_strategy=utils.IntervalStrategy(logging),
            eval_strategy=utils.IntervalStrategy(evaluation),
            save_strategy=utils.SaveStrategy(saving),
            **common,
        )
        state = TrainerState(
            global_step=step, max_steps=7, epoch=step / 2, logging_steps=interval, eval_steps=interval + 1
        )
        state.save_steps = save_interval
        for event in ("on_step_end", "on_epoch_end"):
            our_control, their_control = TrainerControl(), transformers.TrainerControl()
            getattr(ours, event)(our_args, state, our_control)
            getattr(theirs, event)(their_args, state, their_control)
            assert asdict(our_control) == vars(their_control), (event, our_args, state)


def test_flow_understands_the_enums_of_transformers():
    utils = pytest.importorskip("transformers.trainer_utils")
    run = Run(arguments(save_strategy=utils.SaveStrategy.STEPS))
    run.state.save_steps = 2
    assert run.steps_that_save(4) == [2, 4]


def test_save_minutes_counts_from_the_last_checkpoint():
    run = Run(arguments(save_minutes=1))
    assert run.steps_that_save(10, seconds=25) == [3, 6, 9]


def test_save_minutes_does_not_count_the_time_of_saving():
    run = Run(arguments(save_minutes=1))
    assert run.steps_that_save(10, seconds=25, save_seconds=30) == [3, 6, 9]


def test_another_checkpoint_puts_the_next_timed_one_off():
    run = Run(arguments(save_minutes=1, save_strategy="steps"))
    run.state.save_steps = 4
    assert run.steps_that_save(12, seconds=25) == [3, 4, 7, 8, 11, 12]


@pytest.mark.parametrize(("per_update", "expected"), [(8, [4, 8]), (30, [1, 2, 3]), (100, [1, 2, 3]), (1, [])])
def test_save_samples_saves_when_another_lot_is_full(per_update, expected):
    run = Run(arguments(save_samples=30))
    assert run.steps_that_save(10, samples=per_update)[:3] == expected


@pytest.mark.parametrize("stop", range(1, 12))
def test_save_samples_goes_on_after_a_resume_as_if_nothing_happened(stop):
    whole = Run(arguments(save_samples=30)).steps_that_save(12, samples=8)
    first = Run(arguments(save_samples=30)).steps_that_save(stop, samples=8)
    resumed = Run(arguments(save_samples=30), global_step=stop, samples_seen=8 * stop)
    second = [stop + n for n in resumed.steps_that_save(12 - stop, samples=8)]
    assert first + second == whole


def test_trigger_file_saves_once_and_is_deleted(tmp_path):
    trigger = tmp_path / "save-now"
    run = Run(arguments(save_trigger_file=str(trigger)))
    assert not run.step().should_save
    trigger.touch()
    assert run.step().should_save
    assert not trigger.exists()
    assert not run.step().should_save


def test_trigger_that_cannot_be_deleted_saves_only_once(tmp_path, caplog):
    trigger = tmp_path / "save-now"
    trigger.mkdir()
    run = Run(arguments(save_trigger_file=trigger))
    assert run.steps_that_save(3) == [1]
    assert "cannot be deleted" in caplog.text


@pytest.mark.parametrize("save_seconds", [0, 5, 40])
@pytest.mark.parametrize("eval_seconds", [0, 30])
@pytest.mark.parametrize("step_seconds", [1, 7])
def test_max_runtime_stops_and_saves_before_the_limit(step_seconds, eval_seconds, save_seconds):
    run = Run(arguments(max_runtime=600))
    start = run.clock.now
    for step in itertools.count(1):
        run.state.last_save_seconds = save_seconds
        control = run.step(step_seconds, save_seconds=save_seconds)
        if step % 10 == 0:
            run.evaluate(eval_seconds)
        if control.should_training_stop:
            break
    used = run.clock.now - start
    assert control.should_save
    assert used <= 600
    assert used >= 600 - 2 * (step_seconds + eval_seconds + save_seconds) - 1


def test_a_slow_first_update_does_not_shorten_the_run():
    run = Run(arguments(max_runtime=1000))
    run.step(300)
    while not run.step(1).should_training_stop:
        pass
    assert run.state.global_step > 690


def test_max_runtime_says_why_it_stops(caplog):
    run = Run(arguments(max_runtime="00:01:00"))
    run.step(59.9)
    assert "max_runtime: stopping at step 1 after 60 of 60 seconds" in caplog.text


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (90, 90),
        (1.5, 1.5),
        ("90", 90),
        ("00:01:30", 90),
        ("1:00:00", 3600),
        ("2-03:04:05", 183845),
        ("100:00:00", 360000),
    ],
)
def test_durations(given, seconds):
    assert seconds_in(given) == seconds


@pytest.mark.parametrize("given", ["soon", "1:30", "1-2", ""])
def test_a_duration_nobody_understands_is_an_error(given):
    with pytest.raises(ArgumentsError, match="HH:MM:SS"):
        seconds_in(given)


def test_nothing_looks_at_a_clock_or_a_file_unless_asked():
    clock = Clock()
    run = Run(arguments(logging_strategy="steps", eval_strategy="steps", save_strategy="steps"), clock=clock)
    calls = calls_during(lambda: run.flow.on_step_end(run.args, run.state, run.control))
    assert clock.calls == 0
    assert len(calls) <= 1, calls


def test_watches_are_dropped_when_training_ends():
    run = Run(arguments(save_minutes=1))
    run.flow.on_train_end(run.args, run.state, run.control)
    before = run.clock.calls
    run.step(600)
    assert run.clock.calls == before


def calls_during(function):
    """The names of the functions, Python's and C's, that are called while the function runs."""
    seen = []

    def note(frame, event, arg):
        if event == "call":
            seen.append(frame.f_code.co_name)
        elif event == "c_call":
            seen.append(arg.__name__)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    ignored = {function.__code__.co_name, "setprofile"}
    return [name for name in seen if name not in ignored]


def test_the_default_clock_is_the_monotonic_one():
    assert DefaultFlowCallback()._clock is time.monotonic
