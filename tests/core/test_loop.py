"""The loop on a model of numpy: order of events and samples, requests of callbacks, and the cost of an update."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from loopwright.core.order import permutation
from loopwright.core.strategy import Strategy
from loopwright.errors import ArgumentsError, DataError

from .numpy_runs import Counted, Interfering, Recorder, outcome, rows, samples, steps_in, trainer_of

# ---- events ----------------------------------------------------------------------------------------------------------


def expected_events(
    *, n: int, size: int, accumulation: int, epochs: int, log: int, evaluate: int | None, save: int | None
) -> list[str]:
    """The events of a run, written down as a plain loop."""
    micro_batches = -(-n // size)
    updates = -(-micro_batches // accumulation)
    found, step = ["on_init_end", "on_train_begin"], 0
    for _ in range(epochs):
        found.append("on_epoch_begin")
        for update in range(updates):
            step += 1
            is_last = step == updates * epochs
            parts = min(accumulation, micro_batches - update * accumulation)
            found += ["on_step_begin", *["on_substep_end"] * (parts - 1)]
            found += ["on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
            found += ["on_log"] * (step % log == 0)
            if evaluate is not None and (is_last or step % evaluate == 0):
                found += [*["on_prediction_step"] * 3, "on_log", "on_evaluate"]  # 20 samples in batches of eight
            if save is not None and (is_last or step % save == 0):
                found.append("on_save")
        found.append("on_epoch_end")
    return [*found, "on_log", "on_train_end"]


intervals = st.none() | st.integers(1, 5)


@settings(max_examples=40)
@given(
    n=st.integers(1, 20),
    size=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    epochs=st.integers(1, 3),
    log=st.integers(1, 5),
    evaluate=intervals,
    save=intervals,
)
def test_events_come_in_this_order(
    n: int, size: int, accumulation: int, epochs: int, log: int, evaluate: int | None, save: int | None
) -> None:
    recorder = Recorder()
    options: dict[str, Any] = {}
    if evaluate is not None:
        options |= {"eval_strategy": "steps", "eval_steps": evaluate, "eval_data": samples()}
    if save is not None:
        options |= {"save_strategy": "steps", "save_steps": save}
    with TemporaryDirectory() as folder:
        trainer_of(
            folder,
            recorder,
            data=samples(n),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=epochs,
            logging_steps=log,
            **options,
        ).train()
    expected = expected_events(
        n=n, size=size, accumulation=accumulation, epochs=epochs, log=log, evaluate=evaluate, save=save
    )
    assert recorder.events == expected


@pytest.mark.parametrize("what", ["logging", "eval", "save"])
def test_what_is_asked_for_by_epoch_comes_after_its_end(what: str, output_dir: str) -> None:
    recorder = Recorder()
    strategies = {f"{each}_strategy": "epoch" if each == what else "no" for each in ("logging", "eval", "save")}
    trainer_of(output_dir, recorder, eval_data=samples(), **strategies).train()
    event = {"logging": "on_log", "eval": "on_evaluate", "save": "on_save"}[what]
    at = [step for name, step in recorder.seen if name == event]
    assert at[:3] == [4, 8, 12]
    after = [recorder.events[i - 1] for i, name in enumerate(recorder.events) if name == "on_epoch_end"]
    assert after == ["on_step_end"] * 3


# ---- samples ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    st.integers(1, 30), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(0, 2**31)
)
def test_samples_come_in_the_order_of_seed_and_epoch(
    n: int, size: int, accumulation: int, epochs: int, drop_last: bool, seed: int
) -> None:
    data = Counted(samples(n))
    whole = n - n % size if drop_last else n
    with TemporaryDirectory() as folder:
        trainer = trainer_of(
            folder,
            data=data,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=epochs,
            dataloader_drop_last=drop_last,
            seed=seed,
        )
        if not whole:
            with pytest.raises(DataError, match="returned no batch"):
                trainer.train()
            return
        trainer.train()
    assert data.taken == [i for epoch in range(epochs) for i in permutation(n, seed + epoch)[:whole].tolist()]
    assert trainer.state.samples_seen == epochs * whole


@settings(max_examples=20)
@given(st.integers(1, 11), st.integers(1, 11))
def test_training_on_takes_up_where_a_shorter_run_ended(first: int, more: int) -> None:
    data = Counted(samples())
    with TemporaryDirectory() as folder:
        options = {"data": data, "save_strategy": "steps", "save_steps": 100}
        trainer_of(folder, max_steps=first, **options).train()
        trainer_of(folder, max_steps=first + more, **options).train(resume_from_checkpoint=True)
    order = [i for epoch in range(6) for i in permutation(20, 42 + epoch).tolist()]
    # An epoch of 20 samples has three updates of six and one of two.
    done = (first + more) // 4 * 20 + (first + more) % 4 * 6
    assert data.taken == order[:done]


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 7))
def test_a_run_with_batches_of_another_size_leaves_out_no_sample(step: int, before: int, after: int) -> None:
    data = Counted(samples())
    common = {"data": data, "num_train_epochs": 2, "gradient_accumulation_steps": 1, "save_strategy": "steps"}
    with TemporaryDirectory() as folder:
        trainer_of(folder, per_device_train_batch_size=before, save_steps=50, **{**common, "max_steps": step}).train()
        trainer_of(folder, per_device_train_batch_size=after, **common).train(resume_from_checkpoint=True)
    epochs = math.ceil(len(data.taken) / 20)
    assert data.taken == [i for epoch in range(epochs) for i in permutation(20, 42 + epoch).tolist()]


# ---- numbers ---------------------------------------------------------------------------------------------------------


def by_hand(sizes: list[list[int]], *, seed: int, epochs: int, rate: float, clip: float) -> dict[str, list[Any]]:
    """Linear regression with momentum, clipping and a linear schedule, as one would write it down."""
    data, first = samples(), np.random.default_rng(0)
    weight, bias = first.normal(size=(3, 1)), np.zeros(1)
    speed_weight, speed_bias = np.zeros((3, 1)), np.zeros(1)
    updates, done = epochs * len(sizes), 0
    for epoch in range(epochs):
        order = iter(permutation(len(data), seed + epoch).tolist())
        for update in sizes:
            slope_weight, slope_bias = np.zeros((3, 1)), np.zeros(1)
            for size in update:
                batch = [data[next(order)] for _ in range(size)]
                inputs, targets = np.stack([x for x, _ in batch]), np.stack([y for _, y in batch])
                errors = inputs @ weight + bias - targets
                slope_weight = slope_weight + inputs.T @ (2 * errors / sum(update))
                slope_bias = slope_bias + (2 * errors / sum(update)).sum(axis=0)
            norm = math.sqrt(float((slope_weight**2).sum()) + float((slope_bias**2).sum()))
            scale = clip / norm if norm > clip else 1.0
            speed_weight = 0.9 * speed_weight + slope_weight * scale
            speed_bias = 0.9 * speed_bias + slope_bias * scale
            now = rate * ((updates - done) / updates)
            weight, bias, done = weight - now * speed_weight, bias - now * speed_bias, done + 1
    return {"weight": weight.tolist(), "bias": bias.tolist()}


def test_weights_are_those_of_a_loop_written_by_hand(output_dir: str) -> None:
    trainer = trainer_of(output_dir, dropout=0.0, max_grad_norm=1.0)
    trainer.train()
    updates = [[3, 3], [3, 3], [3, 3], [2]]
    assert outcome(trainer)["weights"] == by_hand(updates, seed=42, epochs=3, rate=0.02, clip=1.0)


@pytest.mark.parametrize("accumulation", [1, 2, 4, 10])
def test_how_an_update_is_cut_does_not_change_it(accumulation: int, output_dir: str) -> None:
    def trained(parts: int) -> np.ndarray:
        folder = f"{output_dir}-{parts}"
        trainer = trainer_of(
            folder, dropout=0.0, per_device_train_batch_size=20 // parts, gradient_accumulation_steps=parts
        )
        trainer.train()
        return trainer.model.parameters["weight"]

    np.testing.assert_allclose(trained(accumulation), trained(1), rtol=1e-12)


# ---- what callbacks ask for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3, 4, 11])
@pytest.mark.parametrize(("wish", "event"), [("log", "on_log"), ("evaluate", "on_evaluate"), ("save", "on_save")])
def test_a_wish_is_granted_once_and_at_once(wish: str, event: str, step: int, output_dir: str) -> None:
    def ask(args: Any, state: Any, control: Any, **context: Any) -> None:
        setattr(control, f"should_{wish}", True)

    recorder = Recorder()
    asking = Interfering("on_step_end", step, ask)
    trainer_of(output_dir, asking, recorder, eval_data=samples(), logging_strategy="no").train()
    extra = [12] if wish == "log" else []  # the last log is that of the whole run
    evaluations = [step] if wish == "evaluate" else []
    assert [at for name, at in recorder.seen if name == event] == [step, *extra]
    assert [at for name, at in recorder.seen if name == "on_evaluate"] == evaluations


@pytest.mark.parametrize("event", ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_step_end", "on_log"])
@pytest.mark.parametrize("at", [1, 3])
def test_training_stops_after_the_update_in_which_it_is_asked_to(event: str, at: int, output_dir: str) -> None:
    found = []

    def stop(args: Any, state: Any, control: Any, **context: Any) -> None:
        found.append(state.global_step)
        control.should_training_stop = True

    recorder = Recorder()
    result = trainer_of(output_dir, Interfering(event, at, stop), recorder, logging_steps=1).train()
    finished = found[0] + (event not in ("on_step_end", "on_log"))
    assert result.global_step == finished
    assert recorder.events[-3:] == ["on_epoch_end", "on_log", "on_train_end"]


def test_an_epoch_that_is_stopped_is_followed_by_the_next(output_dir: str) -> None:
    def stop(args: Any, state: Any, control: Any, **context: Any) -> None:
        control.should_epoch_stop = True

    data = Counted(samples())
    result = trainer_of(output_dir, Interfering("on_step_end", 2, stop), data=data).train()
    orders = [permutation(20, 42 + epoch).tolist() for epoch in range(3)]
    assert data.taken == [*orders[0][:12], *orders[1], *orders[2]]
    assert result.global_step == 10


def test_a_control_that_is_returned_counts(output_dir: str) -> None:
    class Returning(Recorder):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return dataclasses.replace(control, should_training_stop=state.global_step == 5)

    assert trainer_of(output_dir, Returning()).train().global_step == 5


def test_an_error_in_a_callback_says_where_it_was(output_dir: str) -> None:
    def fail(*given: Any, **context: Any) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError) as caught:
        trainer_of(output_dir, Interfering("on_optimizer_step", 3, fail)).train()
    assert caught.value.__notes__ == ["raised in the callback Interfering.on_optimizer_step at step 2, epoch 0.5714"]


# ---- changes while training ------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 11))
def test_another_accumulation_counts_from_the_next_update_on(before: int, after: int, step: int) -> None:
    def change(args: Any, state: Any, control: Any, **context: Any) -> None:
        args.gradient_accumulation_steps = after

    data, recorder = Counted(samples()), Recorder()
    with TemporaryDirectory() as folder:
        trainer = trainer_of(
            folder, Interfering("on_step_end", step, change), recorder, data=data, gradient_accumulation_steps=before
        )
        result = trainer.train()
    assert data.taken == [i for epoch in range(3) for i in permutation(20, 42 + epoch).tolist()]
    assert result.global_step == trainer.state.max_steps == micro_updates(before, after, step)


def micro_updates(before: int, after: int, step: int) -> int:
    """Updates of three epochs of seven micro-batches, if the accumulation changes after a step."""
    done = 0
    for _ in range(3):
        left = 7
        while left > 0:
            left -= before if done < step else after
            done += 1
    return done


def test_an_accumulation_that_is_none_is_refused(output_dir: str) -> None:
    def change(args: Any, state: Any, control: Any, **context: Any) -> None:
        args.gradient_accumulation_steps = 0

    with pytest.raises(ArgumentsError, match="gradient_accumulation_steps=0 was set after step 2"):
        trainer_of(output_dir, Interfering("on_step_end", 2, change)).train()


def test_an_optimizer_that_is_assigned_takes_the_next_step(output_dir: str) -> None:
    class Still:
        parameters: dict[str, Any] = {}
        learning_rate, momentum, velocity, steps = 0.0, 0.0, dict[str, Any](), 0

        def step(self, gradients: Any) -> None:
            self.steps += 1

    still = Still()
    trainer = trainer_of(output_dir)

    def change(args: Any, state: Any, control: Any, **context: Any) -> None:
        trainer.optimizer = still

    trainer.callback_handler.add_callback(Interfering("on_step_end", 5, change))
    trainer.train()
    assert still.steps == 7


# ---- what it costs ---------------------------------------------------------------------------------------------------


class CountingVerbs:
    """Wraps a strategy and counts the calls of its methods."""

    def __init__(self, strategy: Any) -> None:
        self.__dict__.update(_strategy=strategy, calls=Counter[str]())

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._strategy, name)
        if not callable(value) or isinstance(value, type):
            return value

        def call(*given: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return value(*given, **options)

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._strategy, name, value)


def verbs_of(output_dir: str, **options: Any) -> Counter[str]:
    trainer = trainer_of(output_dir, **options)
    counting = trainer._loopwright.strategy = CountingVerbs(trainer._loopwright.strategy)  # type: ignore[assignment]
    trainer.train()
    return counting.calls


def test_numbers_are_read_at_log_points_only(output_dir: str) -> None:
    calls = verbs_of(output_dir, logging_steps=4, max_steps=40)
    assert calls["read"] == 10
    assert calls["optimizer_step"] == calls["clip_gradients"] == 40


@pytest.mark.parametrize(("accumulation", "held"), [(1, 0), (2, 12)])
def test_random_states_are_kept_only_where_a_signal_can_find_half_an_update(
    accumulation: int, held: int, output_dir: str
) -> None:
    calls = verbs_of(output_dir, gradient_accumulation_steps=accumulation)
    assert held <= calls["snapshot"] <= held + 3, "once for each update, and once more for the end of an epoch"


def test_an_update_makes_few_calls(output_dir: str) -> None:
    """Calls of functions of the library for each update more; a clock would say as much and be wrong sometimes."""

    def calls_in(updates: int) -> int:
        trainer = trainer_of(f"{output_dir}-{updates}", max_steps=updates, logging_strategy="no", dropout=0.0)
        count = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call" and "loopwright" in Path(frame.f_code.co_filename).parts

        earlier = sys.getprofile()
        sys.setprofile(note)
        try:
            trainer.train()
        finally:
            sys.setprofile(earlier)
        return count

    few, many = calls_in(8), calls_in(88)  # whole epochs of four updates
    assert (many - few) / 80 < 100


# ---- the strategy ----------------------------------------------------------------------------------------------------


def test_the_strategy_has_every_verb(output_dir: str) -> None:
    strategy = trainer_of(output_dir)._loopwright.strategy
    verbs = {name for name in vars(Strategy) if not name.startswith("_")}
    given = {name for kind in type(strategy).__mro__ if kind is not Strategy for name in vars(kind)}
    missing = verbs - given
    missing |= {name for name in Strategy.__annotations__ if not hasattr(strategy, name)}
    assert not missing


def test_gradients_are_those_of_small_differences(output_dir: str) -> None:
    trainer = trainer_of(output_dir, dropout=0.0)
    inputs, targets = np.stack([x for x, _ in samples()]), np.stack([y for _, y in samples()])
    loss, model = trainer.model.loss(inputs, targets, 20), trainer.model
    for name, gradient in loss.gradients.items():
        for place in np.ndindex(gradient.shape):
            losses = []
            for change in (1e-6, -1e-6):
                model.parameters[name][place] += change
                losses.append(model.loss(inputs, targets, 20).value)
                model.parameters[name][place] -= change
            assert gradient[place] == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-5)


def test_the_loss_falls_and_the_log_says_so(output_dir: str) -> None:
    trainer = trainer_of(output_dir, dropout=0.0, num_train_epochs=20, logging_strategy="epoch")
    result = trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < 0.05 * losses[0]
    assert result.training_loss == pytest.approx(np.mean(losses))
    assert [row["step"] for row in rows(output_dir) if "loss" in row] == [4 * epoch for epoch in range(1, 21)]


def test_a_run_that_saves_nothing_leaves_no_checkpoint(output_dir: str) -> None:
    trainer_of(output_dir).train()
    assert steps_in(output_dir) == []
