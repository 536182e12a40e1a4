"""Scheduler objects set the learning rates of transformers, for every group, and continue exactly after a reload."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from loopwright.errors import ArgumentsError, CheckpointError  # noqa: E402
from loopwright.pt.optim import schedulers  # noqa: E402
from loopwright.pt.optim.greedy_lr import GreedyLR  # noqa: E402
from loopwright.pt.optim.schedulers import ScheduledLR, build_scheduler, get_scheduler, steps_on_metric  # noqa: E402


def parameter():
    return torch.nn.Parameter(torch.ones(2))


def optimizer_with(*lrs):
    return torch.optim.SGD([{"params": [parameter()], "lr": lr} for lr in lrs], lr=lrs[0])


def take_update(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


def lrs(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


CALLS = [
    ("get_constant_schedule", (), {}),
    ("get_constant_schedule_with_warmup", (3,), {}),
    ("get_linear_schedule_with_warmup", (3, 12), {}),
    ("get_cosine_schedule_with_warmup", (3, 12), {"num_cycles": 1.5}),
    ("get_cosine_with_hard_restarts_schedule_with_warmup", (3, 12), {"num_cycles": 2}),
    ("get_polynomial_decay_schedule_with_warmup", (3, 12), {"lr_end": 1e-6, "power": 2.0}),
    ("get_inverse_sqrt_schedule", (3,), {"timescale": 5}),
    ("get_cosine_with_min_lr_schedule_with_warmup", (3, 12), {"min_lr": 1e-5}),
    ("get_cosine_with_min_lr_schedule_with_warmup_lr_rate", (3, 12), {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2}),
    ("get_wsd_schedule", (3, 4), {"num_training_steps": 12, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS)
def test_public_functions_set_the_rates_transformers_sets(function, args, kwargs):
    optimization = pytest.importorskip("transformers").optimization
    ours, theirs = optimizer_with(1e-3, 5e-4), optimizer_with(1e-3, 5e-4)
    our_scheduler = getattr(schedulers, function)(ours, *args, **kwargs)
    their_scheduler = getattr(optimization, function)(theirs, *args, **kwargs)
    for _ in range(15):
        assert lrs(ours) == pytest.approx(lrs(theirs), rel=0, abs=1e-15)
        assert our_scheduler.get_last_lr() == pytest.approx(their_scheduler.get_last_lr(), rel=0, abs=1e-15)
        assert our_scheduler.last_epoch == their_scheduler.last_epoch
        for optimizer, scheduler in ((ours, our_scheduler), (theirs, their_scheduler)):
            take_update(optimizer)
            scheduler.step()


@pytest.mark.parametrize("function", [call[0] for call in CALLS] + ["get_scheduler"])
def test_public_functions_have_the_parameters_users_know(function):
    import inspect

    optimization = pytest.importorskip("transformers").optimization
    ours = inspect.signature(getattr(schedulers, function)).parameters.values()
    theirs = inspect.signature(getattr(optimization, function)).parameters.values()
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]


def test_the_scheduler_is_one_of_torchs_and_leaves_the_optimizer_alone():
    optimizer = optimizer_with(0.1)
    scheduler = get_scheduler("linear", optimizer, 0, 10)
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    assert "step" not in vars(optimizer)


def test_a_group_added_later_follows_the_schedule_from_its_first_update():
    optimizer = optimizer_with(1.0)
    scheduler = get_scheduler("linear", optimizer, 0, 10)
    for _ in range(5):
        take_update(optimizer)
        scheduler.step()
    late = parameter()
    optimizer.add_param_group({"params": [late], "lr": 0.2})
    take_update(optimizer)
    assert torch.equal(late.detach(), torch.ones(2) - 0.2 * 0.5)
    for update in range(6, 11):
        scheduler.step()
        assert lrs(optimizer) == pytest.approx([1 - update / 10, 0.2 * (1 - update / 10)])
        assert scheduler.get_last_lr() == lrs(optimizer)


def test_a_replaced_scheduler_no_longer_touches_the_optimizer():
    optimizer = optimizer_with(1.0)
    get_scheduler("linear", optimizer, 0, 10)  # dropped at once
    optimizer.add_param_group({"params": [parameter()], "lr": 0.2})
    take_update(optimizer)
    assert "initial_lr" not in optimizer.param_groups[1]


def test_a_tensor_learning_rate_is_filled_in_place():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([parameter()], lr=rate)
    held = optimizer.param_groups[0]["lr"]
    scheduler = get_scheduler("linear", optimizer, 0, 10)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is held
    assert held.item() == pytest.approx(0.45)
    assert scheduler.get_last_lr() == [0.45]


@pytest.mark.parametrize("stop", range(11))
def test_state_goes_through_json_and_goes_on_bit_for_bit(stop):
    whole = optimizer_with(3e-4, 1e-4)
    reference = get_scheduler("cosine", whole, 2, 10)
    for _ in range(stop):
        reference.step()
    resumed = optimizer_with(3e-4, 1e-4)
    scheduler = get_scheduler("cosine", resumed, 2, 10)
    scheduler.load_state_dict(json.loads(json.dumps(reference.state_dict())))
    for _ in range(stop, 12):
        assert lrs(resumed) == lrs(whole)
        assert scheduler.get_last_lr() == reference.get_last_lr()
        reference.step()
        scheduler.step()


def test_a_rate_changed_by_hand_survives_the_reload():
    optimizer = optimizer_with(1.0)
    scheduler = get_scheduler("linear", optimizer, 0, 10)
    optimizer.param_groups[0]["lr"] = 0.123
    resumed = optimizer_with(1.0)
    get_scheduler("linear", resumed, 0, 10).load_state_dict(scheduler.state_dict())
    assert lrs(resumed) == [0.123]


def test_base_rates_that_are_assigned_are_used_as_in_torch():
    def rates(build):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1)) for _ in range(2)], lr=0.4)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.2})
        scheduler, seen = build(optimizer), []
        for step in range(4):
            if step == 1:
                scheduler.base_lrs = [base / 2 for base in scheduler.base_lrs]
            if step == 2:
                scheduler.base_lrs[1] = 0.8
            optimizer.step()
            scheduler.step()
            seen.append([group["lr"] for group in optimizer.param_groups])
        return seen, scheduler.state_dict()["base_lrs"]

    ours = rates(lambda optimizer: ScheduledLR(optimizer, lambda step: 1 / (1 + step)))
    assert ours == rates(lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    assert ours[1] == [0.2, 0.8]


def test_the_state_of_transformers_scheduler_can_be_loaded():
    transformers = pytest.importorskip("transformers")
    theirs, ours = optimizer_with(1e-3), optimizer_with(1e-3)
    saved = transformers.get_scheduler("linear", theirs, 2, 10)
    for _ in range(4):
        take_update(theirs)
        saved.step()
    scheduler = get_scheduler("linear", ours, 2, 10)
    scheduler.load_state_dict(saved.state_dict())
    assert (scheduler.last_epoch, lrs(ours)) == (saved.last_epoch, lrs(theirs))


def test_a_state_for_other_groups_is_refused():
    scheduler = get_scheduler("linear", optimizer_with(1.0), 0, 10)
    with pytest.raises(CheckpointError, match="2 parameter groups"):
        get_scheduler("linear", optimizer_with(1.0, 0.5), 0, 10).load_state_dict(scheduler.state_dict())


def test_last_epoch_continues_a_schedule_and_needs_the_initial_rates():
    optimizer = optimizer_with(1.0)
    with pytest.raises(ArgumentsError, match="initial_lr"):
        schedulers.get_linear_schedule_with_warmup(optimizer, 0, 10, last_epoch=4)
    optimizer.param_groups[0]["initial_lr"] = 1.0
    assert schedulers.get_linear_schedule_with_warmup(optimizer, 0, 10, last_epoch=4).get_last_lr() == [0.5]


def test_unknown_names_and_options_are_listed():
    with pytest.raises(ArgumentsError, match="greedy"):
        get_scheduler("unheard_of", optimizer_with(1.0), 0, 10)
    for name in ("linear", "reduce_lr_on_plateau", "greedy"):
        with pytest.raises(ArgumentsError, match="wobble"):
            get_scheduler(name, optimizer_with(1.0), 0, 10, {"wobble": 1})


def test_only_plateau_and_greedy_step_on_a_metric():
    transformers = pytest.importorskip("transformers")
    for name in transformers.SchedulerType:
        options = {"warmup_stable_decay": {"num_decay_steps": 2}}.get(name.value, {})
        if "min_lr" in name.value:
            options = {"min_lr_rate": 0.1}
        scheduler = get_scheduler(name, optimizer_with(1e-3), 0, 10, options)
        assert steps_on_metric(scheduler) == (name.value in ("reduce_lr_on_plateau", "greedy"))


@pytest.mark.parametrize(
    ("greater", "kwargs", "mode"), [(True, {}, "max"), (False, {}, "min"), (True, {"mode": "min"}, "min")]
)
@pytest.mark.parametrize("name", ["reduce_lr_on_plateau", "greedy"])
def test_the_metric_direction_of_the_arguments_is_the_default_mode(name, greater, kwargs, mode):
    args = SimpleNamespace(greater_is_better=greater)
    assert build_scheduler(name, optimizer_with(1e-3), kwargs=kwargs, args=args).mode == mode


def test_a_plain_function_is_a_schedule():
    optimizer = optimizer_with(1.0)
    scheduler = ScheduledLR(optimizer, lambda update: 1 / (1 + update))
    scheduler.step()
    assert lrs(optimizer) == [0.5]


# ------------------------------------------------------------------------------------------------ greedy

GREEDY = [
    {"patience": 2},
    {"patience": 1, "cooldown": 2, "warmup": 3},
    {"patience": 1, "mode": "max", "threshold_mode": "rel", "threshold": 1e-3},
    {"patience": 0, "reset_start": 2, "factor": 0.5},
    {"patience": 0, "smooth": True, "window_size": 4, "factor": 0.7, "reset_start": 3, "cooldown": 1},
    {"patience": 0, "max_lr": 0.15},
]


@pytest.mark.parametrize("options", GREEDY)
@pytest.mark.parametrize("seed", range(4))
def test_greedy_does_what_transformers_does_when_the_bounds_are_given(options, seed):
    optimization = pytest.importorskip("transformers").optimization
    options = {"min_lr": 1e-2, **options}
    ours, theirs = optimizer_with(0.1, 0.05), optimizer_with(0.1, 0.05)
    our_scheduler, their_scheduler = GreedyLR(ours, **options), optimization.GreedyLR(theirs, **options)
    draw = random.Random(seed)
    level = 5.0
    for _ in range(200):
        level += draw.choice([-1, -1, 0, 1]) * draw.random()
        our_scheduler.step(level)
        their_scheduler.step(level)
        assert lrs(ours) == pytest.approx(lrs(theirs), rel=1e-12)


@pytest.mark.parametrize("base", [5e-5, 1e-2, 1.0, 5.0])
def test_greedys_default_floor_is_below_any_learning_rate(base):
    optimizer = optimizer_with(base)
    scheduler = GreedyLR(optimizer, patience=0)
    assert scheduler.min_lrs[0] < base
    for _ in range(3):  # the first value is an improvement, the next two are not
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(base * (0.95 if base < 1 else 0.95**2))


def test_greedy_stays_above_its_floor_and_starts_over():
    optimizer = optimizer_with(0.1)
    scheduler = GreedyLR(optimizer, patience=0, factor=0.5, reset_start=3)
    seen = []
    for _ in range(12):
        scheduler.step(1.0)
        seen.append(optimizer.param_groups[0]["lr"])
    assert min(seen) == pytest.approx(0.001)
    assert seen[-1] > 0.001


def test_greedy_never_lowers_a_rate_above_max_lr():
    optimizer = optimizer_with(2.0)
    scheduler = GreedyLR(optimizer, patience=0, max_lr=1.0)
    scheduler.step(5.0)
    assert lrs(optimizer) == [2.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_lr": 1.0}, "min_lr=1.0"),
        ({"factor": 1.5}, "factor"),
        ({"mode": "up"}, "mode"),
        ({"min_lr": []}, "0 values"),
    ],
)
def test_greedy_refuses_nonsense(options, said):
    with pytest.raises(ArgumentsError, match=said):
        GreedyLR(optimizer_with(0.1), **options)


@pytest.mark.parametrize("stop", [0, 1, 7, 23])
def test_greedys_state_goes_through_json_and_goes_on_bit_for_bit(stop):
    options = {"patience": 1, "cooldown": 1, "smooth": True, "window_size": 3, "reset_start": 2, "factor": 0.5}
    draw = random.Random(0)
    values = [draw.random() for _ in range(60)]
    whole, resumed = optimizer_with(0.1), optimizer_with(0.1)
    reference, scheduler = GreedyLR(whole, **options), GreedyLR(resumed, **options)
    for value in values[:stop]:
        reference.step(value)
    scheduler.load_state_dict(json.loads(json.dumps(reference.state_dict(), allow_nan=False)))
    for value in values[stop:]:
        assert lrs(resumed) == lrs(whole)
        reference.step(value)
        scheduler.step(value)


def test_greedy_takes_in_a_group_added_later():
    optimizer = optimizer_with(0.1)
    scheduler = GreedyLR(optimizer, patience=0)
    optimizer.add_param_group({"params": [parameter()], "lr": 0.5})
    scheduler.step(1.0)
    assert lrs(optimizer) == pytest.approx([0.1 / 0.95, 0.5 / 0.95])


def test_an_optimizer_wrapped_like_accelerates_is_scheduled():
    class Wrapped(torch.optim.Optimizer):
        """Has the methods of an optimizer, but not its hooks."""

        def __init__(self, inner):
            self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults

        def step(self, closure=None):
            self.inner.step(closure)

    optimizer = Wrapped(optimizer_with(1.0))
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=4)
    take_update(optimizer)
    scheduler.step()
    assert lrs(optimizer) == [0.75]
