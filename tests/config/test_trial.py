"""What a trial makes of the time ledger of its updates."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from loopwright.cli.commands.check import seconds_of
from loopwright.config import trial
from loopwright.config.trial import HEAVIEST, SAVED, STRIDE, Measured, TrialClock
from loopwright.config.update_times import OUTLIER, RECURRING, WARM
from loopwright.core.measure.ledger import (
    COMPILING,
    DATA,
    EVALUATION,
    PARTS,
    PREPARING,
    PROVING,
    SAVING,
    UPDATES,
    Seconds,
)

pytestmark = pytest.mark.usefixtures("no_limit")


@pytest.fixture
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "ENOUGH", 1e9)
    monkeypatch.setattr(trial, "SHORT", 1e9)


class Device:
    """A ledger whose updates take given seconds; an asynchronous device delays them to the next wait."""

    def __init__(self, *, is_late: bool = False) -> None:
        self.seconds: Seconds = {**dict.fromkeys(PARTS, 0.0), PREPARING: 3.0}
        self.is_late, self.queued, self.waits = is_late, 0.0, 0

    def wait(self) -> None:
        self.seconds[UPDATES] += self.queued
        self.queued = 0.0
        self.waits += 1

    def spent(self) -> Seconds:
        return dict(self.seconds)

    def add(self, updates: float, **more: float) -> None:
        if self.is_late:
            self.queued += updates
        else:
            self.seconds[UPDATES] += updates
        for part, seconds in more.items():
            self.seconds[part] += seconds


def run(device: Device, updates: list[dict[str, float]], *, stride: int = 1, has_heavy: bool = False) -> TrialClock:
    clock = TrialClock(device.wait, device.spent)
    clock.stride, clock.has_heavy, clock.saves_early = stride, has_heavy, False
    state: Any = SimpleNamespace(global_step=0, max_steps=len(updates))
    args: Any = None
    clock.on_train_begin(args, state, SimpleNamespace())
    for each in updates:
        clock.on_step_begin(args, state, SimpleNamespace())
        device.add(**each)
        state.global_step += 1
        control = SimpleNamespace(should_training_stop=False)
        clock.on_step_end(args, state, control)
        if control.should_training_stop:
            break
    return clock


def same(seconds: float, count: int) -> list[dict[str, float]]:
    return [{"updates": seconds}] * count


def found(clock: TrialClock) -> tuple[float, float]:
    """Seconds by which updates were slower, and of a usual one."""
    times = clock.times()
    return times.slower, times.usual


def test_slower_first_updates_are_counted_once() -> None:
    clock = run(Device(), [{"updates": 5.0}, *same(1.0, 29)])
    assert found(clock) == pytest.approx((4.0, 1.0))


def test_the_heaviest_updates_are_not_a_warm_up() -> None:
    heavy = [{"updates": 3.0}] * HEAVIEST
    clock = run(Device(), [{"updates": 2.0}, *heavy, *same(1.0, 27)], has_heavy=True)
    assert found(clock) == pytest.approx((1.0, 1.0))


def test_waiting_for_data_belongs_to_an_update() -> None:
    clock = run(Device(), [{"updates": 1.0, DATA: 0.5}] * 20)
    assert found(clock) == pytest.approx((0.0, 1.5))


def test_proofs_compiling_and_saves_are_no_part_of_an_update() -> None:
    other = {PROVING: 7.0, COMPILING: 20.0, SAVING: 2.0}
    clock = run(Device(), [*same(1.0, 9), {"updates": 1.0, **other}, *same(1.0, 10)])
    assert found(clock) == pytest.approx((0.0, 1.0))


def test_a_slow_update_in_the_first_half_is_counted_once() -> None:
    clock = run(Device(), [*same(1.0, 6), {"updates": 30.0}, *same(1.0, 23)])
    assert clock.times().timed == 30 - WARM - 1
    assert found(clock) == pytest.approx((29.0, 1.0))


@pytest.mark.parametrize("place", [WARM, 20, 70, 81, 85])
@pytest.mark.parametrize("stride", [1, STRIDE])
def test_an_update_that_is_slow_once_is_counted_once_wherever_it_is(place: int, stride: int) -> None:
    """The only batch with padding, for which kernels are loaded, may be the last update of the trial."""
    slow = [*same(1.0, place), {"updates": 48.0}, *same(1.0, 85 - place)]
    assert found(run(Device(is_late=stride > 1), slow, stride=stride)) == pytest.approx((47.0, 1.0))


def test_an_update_of_a_late_device_that_is_a_few_times_slower_is_counted_once() -> None:
    """Among the others between two waits it is hardly visible, and still adds a tenth to their mean."""
    slow = [*same(1.0, 60), {"updates": 1.5 * OUTLIER}, *same(1.0, 27)]
    clock = run(Device(is_late=True), slow, stride=STRIDE)
    assert found(clock) == pytest.approx((1.5 * OUTLIER - 1, 1.0))


def test_slow_updates_that_come_again_are_a_part_of_training() -> None:
    """Such as a file of data that is opened every ten updates."""
    cycle = [*same(1.0, 9), {"updates": 11.0}]
    clock = run(Device(), [*same(1.0, WARM), *cycle * 2 * RECURRING])
    assert found(clock) == pytest.approx((0.0, 2.0))


@pytest.mark.parametrize(("stride", "is_late"), [(1, False), (STRIDE, False), (STRIDE, True)])
def test_an_update_that_is_slow_once_does_not_end_the_trial(
    stride: int, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "SHORT", 70.0)
    device = Device(is_late=is_late)
    clock = run(device, [*same(1.0, 65), {"updates": 48.0}, *same(1.0, 60)], stride=stride)
    assert WARM + 70 <= len(clock.marks) <= WARM + 70 + 2 * STRIDE
    assert found(clock) == pytest.approx((47.0, 1.0))


def test_a_trial_waits_for_a_late_device_only_at_stops_and_where_it_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SHORT", 66.0)
    device = Device(is_late=True)
    clock = run(device, same(1.0, 200), stride=STRIDE)
    assert device.waits == len(clock.stops) <= WARM + 1 + 66 // STRIDE + 1


def test_updates_that_become_faster_are_timed_when_they_are_fast() -> None:
    """Kernels that are loaded when a shape first occurs, for example."""
    clock = run(Device(), [*same(2.0, 14), *same(1.0, 16)])
    slower, usual = found(clock)
    assert usual == pytest.approx(1.0, rel=0.05) and slower == pytest.approx(14.0, rel=0.15)


def test_the_first_evaluation_is_slower_once() -> None:
    device = Device()
    clock = TrialClock(device.wait, device.spent)
    clock.evaluates, clock.saves_early = True, False
    state: Any = SimpleNamespace(global_step=0, max_steps=12)
    asked, args = [], None
    clock.on_train_begin(args, state, SimpleNamespace())
    for number in range(12):
        device.add(1.0)
        state.global_step += 1
        control = SimpleNamespace(should_evaluate=False)
        clock.on_step_end(args, state, control)
        if control.should_evaluate:
            asked.append(number)
            device.seconds[EVALUATION] += 3.0 if len(asked) == 1 else 0.5
            clock.on_evaluate(args, state, control, metrics={"eval_loss": 1.0})
    assert asked == [SAVED, 11] and clock.evaluations == [3.0, 0.5]
    assert found(clock) == pytest.approx((0.0, 1.0))


def test_updates_of_a_device_that_computes_later_are_timed_between_waits() -> None:
    device = Device(is_late=True)
    clock = run(device, [{"updates": 4.0}, *same(1.0, WARM + 5 * STRIDE)], stride=STRIDE)
    assert found(clock) == pytest.approx((3.0, 1.0))
    assert device.waits == WARM + 6, "a device that is waited for in every update is slower"


def test_a_late_device_that_was_slow_is_timed_from_the_next_wait() -> None:
    slow = [*same(1.0, WARM + 2), {"updates": 80.0}, *same(1.0, 6 * STRIDE)]
    clock = run(Device(is_late=True), slow, stride=STRIDE)
    assert clock.times().timed == len(slow) - WARM - STRIDE
    assert clock.times().usual == pytest.approx(1.0)


@pytest.mark.parametrize(("hits", "misses", "share"), [(0, 0, 1.0), (4, 0, 1.0), (0, 4, 0.3), (2, 2, 0.65)])
def test_the_run_after_the_trial_compiles_from_the_cache(
    hits: int, misses: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counter({"fxgraph_cache_hit": hits, "fxgraph_cache_miss": misses})
    monkeypatch.setitem(trial.sys.modules, "torch._dynamo.utils", SimpleNamespace(counters={"inductor": counts}))
    assert trial.cached_share() == pytest.approx(share)


@pytest.mark.parametrize("count", [1, 2, WARM, WARM + 1])
def test_a_run_of_few_updates_can_be_timed(count: int) -> None:
    assert found(run(Device(), same(1.0, count))) == pytest.approx((0.0, 1.0))


def ended(*, saves_early: bool) -> Measured:
    """What is measured if 20 updates of 1 s are followed by others of the parts of the ledger."""
    device, measured = Device(), Measured()
    clock = run(device, same(1.0, 20))
    clock.saves_early, clock.save_seconds = saves_early, 0.5 if saves_early else 0.0
    device.add(0.25, **{SAVING: 3.0, PROVING: 0.125})
    trainer: Any = SimpleNamespace(
        _loopwright=SimpleNamespace(run=SimpleNamespace(ledger=SimpleNamespace(settle=lambda: device)))
    )
    trial.take_times(measured, clock, trainer, None)
    return measured


@pytest.mark.parametrize(
    ("saves_early", "saves", "seconds"), [(False, 0, 0.0), (False, 1, 3.0), (True, 4, 4 * 0.5 + 3.0)]
)
def test_parts_of_the_prediction_are_those_of_the_ledger(saves_early: bool, saves: int, seconds: float) -> None:
    parts = seconds_of(ended(saves_early=saves_early), steps=100, evaluations=0, saves=saves)
    assert parts["saves"] == seconds, "a run that does not save takes no time for it"
    assert parts["updates"] == 100.25 and parts["once"] == 0.125
    assert parts["end"] == trial.INTERPRETER


@pytest.mark.parametrize(("load", "is_said"), [(None, False), (1.0, False), (3.2, True)])
def test_the_time_of_a_busy_machine_is_said_to_be_one(load: float | None, is_said: bool) -> None:
    from loopwright.cli.commands.check import text_of

    parts = ("start", "once", "updates", "evaluations", "saves", "end", "total", "per_step")
    plan = ("model", "device", "strategy")
    numbers = ("parameters", "trained_parameters", "training_samples", "steps", "samples_per_step")
    report: dict[str, Any] = {
        "plan": {**dict.fromkeys(plan, "cpu"), **dict.fromkeys(numbers, 1)},
        "memory": dict.fromkeys(("program", "weights", "gradients", "optimizer", "activations", "peak"), 1),
        "checkpoint": {"bytes": 1, "needed": 1, "free": 1},
        "seconds": dict.fromkeys(parts, 1.0),
        "load": load,
        "metrics": {},
        "loaded_step": None,
        "speed_text": "",
        "sample": None,
        "problems": [],
    }
    assert ("other programs use this machine (3.2 running for each processor)" in text_of(report)) is is_said
