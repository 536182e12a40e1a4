"""The arithmetic of a run against a run that is simply counted."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, strategies as st

from loopwright.core.plan import make_plan


@given(
    n=st.integers(1, 40),
    size=st.integers(1, 8),
    accumulation=st.integers(1, 5),
    epochs=st.sampled_from([0.25, 0.5, 1, 1.3, 2, 3]),
    max_steps=st.integers(-1, 25),
)
def test_a_plan_is_what_counting_gives(n: int, size: int, accumulation: int, epochs: float, max_steps: int) -> None:
    batches = math.ceil(n / size)
    plan = make_plan(batch_size=size, accumulation=accumulation, batches_per_epoch=batches, examples=n,
                     max_steps=max_steps, num_train_epochs=epochs)  # fmt: skip
    windows = [min(accumulation, batches - i) for i in range(0, batches, accumulation)]
    assert plan.updates_per_epoch == len(windows)
    wanted = max_steps if max_steps > 0 else math.ceil(epochs * len(windows))
    assert plan.max_steps == wanted

    updates, seen, epoch, position = 0, 0, 0, 0.0
    while updates < plan.max_steps:
        done = 0
        for window in windows:
            if updates == plan.max_steps:
                break
            done, updates = done + window, updates + 1
            position = plan.epoch_after(epoch, done)
        seen += min(done * size, n)
        epoch += 1
    assert (epoch, seen) == (plan.epochs, plan.train_samples)
    assert position == pytest.approx(epoch if updates % len(windows) == 0 else epoch - 1 + done / batches)
    assert plan.total_batch_size == size * accumulation


def test_a_stream_lasts_as_long_as_its_steps() -> None:
    plan = make_plan(batch_size=2, accumulation=3, batches_per_epoch=None, examples=None, max_steps=7,
                     num_train_epochs=3)  # fmt: skip
    assert (plan.max_steps, plan.updates_per_epoch, plan.train_samples) == (7, 7, 42)
    assert plan.epochs > 10**9 and plan.epoch_after(0, 21) == 1.0


def test_more_processes_make_larger_updates() -> None:
    plan = make_plan(batch_size=2, accumulation=3, batches_per_epoch=18, examples=36, max_steps=-1, num_train_epochs=1,
                     world_size=3)  # fmt: skip
    assert (plan.total_batch_size, plan.max_steps, plan.train_samples) == (18, 2, 36)


def test_a_plan_is_frozen() -> None:
    plan = make_plan(batch_size=1, accumulation=1, batches_per_epoch=1, examples=1, max_steps=1, num_train_epochs=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.max_steps = 2  # type: ignore[misc]
