"""The step of fused Adam and AdamW with fewer calls: the same numbers, and torch's own step where others take part."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from loopwright import Trainer, TrainingArguments
from loopwright.speed.device import fused_step
from loopwright.speed.device.fused_step import step_
from tests.models import Regression, regression_data

KERNELS = ("_fused_adam_", "_fused_adamw_")


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3), nn.Linear(3, 1)).to(dtype)


def groups(module: nn.Module, decay: float) -> list[dict[str, Any]]:
    weights = [p for p in module.parameters() if p.ndim > 1]
    return [
        {"params": weights, "weight_decay": decay},
        {"params": [p for p in module.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def set_gradients(module: nn.Module, update: int, *, without: tuple[int, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(update)
    for index, parameter in enumerate(module.parameters()):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if index in without else gradient


def assert_same(one: Optimizer, other: Optimizer) -> None:
    pairs = zip(one.param_groups, other.param_groups, strict=True)
    for left, right in ((a, b) for x, y in pairs for a, b in zip(x["params"], y["params"], strict=True)):
        assert torch.equal(left, right)
        assert one.state[left].keys() == other.state[right].keys()
        assert all(torch.equal(value, other.state[right][name]) for name, value in one.state[left].items())


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of parameters in each call of a kernel by this module; torch's own calls are not counted."""
    found: list[int] = []
    plain = fused_step._call_kernel

    def call(optimizer: Any, settings: Any, *tensors: Any) -> None:
        found.append(len(tensors[0]))
        plain(optimizer, settings, *tensors)

    monkeypatch.setattr(fused_step, "_call_kernel", call)
    return found


# ---- the same numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"betas": (0.8, 0.95), "eps": 1e-6}], ids=str)
def test_weights_and_states_are_those_of_torch(
    kind: type[Adam], dtype: torch.dtype, decay: float, options: dict[str, Any], counted: list[int]
) -> None:
    ours, others = model(dtype), model(dtype)
    one, other = (kind(groups(each, decay), lr=1e-2, fused=True, **options) for each in (ours, others))
    for update in range(6):
        for module, optimizer in ((ours, one), (others, other)):
            set_gradients(module, update)
            for index, group in enumerate(optimizer.param_groups):
                group["lr"] = 1e-2 / (1 + update) * (1 + index * (update > 3))
        step_(one)
        other.step()
        assert_same(one, other)
    # The first step makes the states; then one call for all groups if nothing differs between them, otherwise two.
    assert counted == ([3, 5] * 5 if decay else [8] * 3 + [3, 5] * 2)


def test_parameters_without_gradients_are_left_alone(counted: list[int]) -> None:
    ours, others = model(), model()
    one, other = (AdamW(each.parameters(), lr=1e-2, fused=True) for each in (ours, others))
    for update, without in enumerate([(0, 1), (0, 1), (), (2, 3), tuple(range(8)), ()]):
        for module in (ours, others):
            set_gradients(module, update, without=without)
        step_(one)
        other.step()
        assert_same(one, other)
    assert counted == [6, 6, 8]  # the third step made the states of two parameters, the fifth had nothing to do


def test_a_loaded_state_and_a_new_group_are_followed(counted: list[int]) -> None:
    ours, others = model(), model()
    one, other = (AdamW(groups(each, 0.1), lr=1e-2, fused=True) for each in (ours, others))
    for update in range(6):
        for module, optimizer in ((ours, one), (others, other)):
            set_gradients(module, update)
            if update == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if update == 3:
                torch.manual_seed(1)
                more = nn.Linear(2, 2)
                module.add_module("more", more)
                optimizer.add_param_group({"params": list(more.parameters()), "lr": 1e-3})
                set_gradients(module, update)
        step_(one)
        other.step()
        assert_same(one, other)
    assert counted == [3, 5] * 2 + [3, 5, 2] * 2


@pytest.mark.parametrize("veto", [None, 0.0, 1.0])
@pytest.mark.parametrize("scale", [None, 4.0])
def test_scales_and_vetoes_are_applied(veto: float | None, scale: float | None, counted: list[int]) -> None:
    ours, others = model(), model()
    one, other = (AdamW(groups(each, 0.1), lr=1e-2, fused=True) for each in (ours, others))
    for update in range(4):
        for module, optimizer in ((ours, one), (others, other)):
            set_gradients(module, update)
            if update:
                optimizer.grad_scale = None if scale is None else torch.tensor(scale)
                optimizer.found_inf = None if veto is None else torch.tensor(veto)
        step_(one)
        other.step()
        assert_same(one, other)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), others.parameters(), strict=True))
    assert len(counted) == 6


# ---- torch's own step -----------------------------------------------------------------------------------------------


class Own(AdamW):
    """An optimizer of the user."""


class Wrapped(Tensor):
    """A gradient of another class."""


def _with(change: Callable[[Optimizer], Any]) -> Callable[[list[nn.Parameter]], Optimizer]:
    def made(parameters: list[nn.Parameter]) -> Optimizer:
        optimizer = AdamW(parameters, lr=1e-2, fused=True)
        change(optimizer)
        return optimizer

    return made


OTHERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "not fused": lambda parameters: AdamW(parameters, lr=1e-2),
    "amsgrad": lambda parameters: AdamW(parameters, lr=1e-2, fused=True, amsgrad=True),
    "a tensor as rate": lambda parameters: AdamW(parameters, lr=torch.tensor(1e-2), fused=True),
    "a list of betas": _with(lambda optimizer: optimizer.param_groups[0].update(betas=[0.8, 0.99])),
    "tensors as betas": _with(lambda optimizer: optimizer.param_groups[0].update(betas=(torch.tensor(0.8), 0.99))),
    "a subclass": lambda parameters: Own(parameters, lr=1e-2, fused=True),
    "another optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, fused=True),
    "two formats": lambda parameters: AdamW(
        [*parameters, nn.Parameter(torch.ones(2, dtype=torch.float64))], lr=1e-2, fused=True
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_step_by_themselves(name: str, counted: list[int]) -> None:
    ours, others = model(), model()
    one, other = (OTHERS[name](list(each.parameters())) for each in (ours, others))
    for update in range(3):
        for module, optimizer in ((ours, one), (others, other)):
            set_gradients(module, update)
            for parameter in optimizer.param_groups[0]["params"][8:]:
                parameter.grad = torch.ones_like(parameter)
        step_(one)
        other.step()
        assert_same(one, other)
    assert counted == []


@pytest.fixture
def stepped() -> Iterator[tuple[nn.Module, Optimizer]]:
    module = model()
    optimizer = AdamW(module.parameters(), lr=1e-2, fused=True)
    set_gradients(module, 0)
    step_(optimizer)
    yield module, optimizer


@pytest.mark.parametrize("when", ["before", "after", "before, everywhere", "after, everywhere"])
def test_hooks_are_called(when: str, stepped: tuple[nn.Module, Optimizer], counted: list[int]) -> None:
    _, optimizer = stepped
    called: list[Any] = []
    register = {
        "before": optimizer.register_step_pre_hook,
        "after": optimizer.register_step_post_hook,
        "before, everywhere": register_optimizer_step_pre_hook,
        "after, everywhere": register_optimizer_step_post_hook,
    }[when]
    handle = register(lambda *_: called.append(1))
    try:
        step_(optimizer)
    finally:
        handle.remove()
    assert called == [1] and counted == []
    step_(optimizer)
    assert called == [1] and counted == [8]


def test_a_replaced_step_is_called(stepped: tuple[nn.Module, Optimizer], counted: list[int]) -> None:
    _, optimizer = stepped
    called: list[int] = []
    optimizer.step = lambda *_: called.append(1)  # type: ignore[method-assign,assignment]
    step_(optimizer)
    assert called == [1] and counted == []


def test_a_step_replaced_before_a_schedule_wrapped_it_is_called(counted: list[int]) -> None:
    module, called = model(), []
    optimizer = AdamW(module.parameters(), lr=1e-2, fused=True)
    plain = AdamW.step

    def step(self: Any, closure: Any = None) -> Any:
        called.append(1)
        return plain(self, closure)

    optimizer.step = step.__get__(optimizer)  # type: ignore[method-assign]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for update in range(2):
        set_gradients(module, update)
        step_(optimizer)
    assert called == [1, 1] and counted == []


@pytest.mark.parametrize("name", ["_init_group", "adam", "_fused_adam"])
@pytest.mark.parametrize("compiles", [False, True])
def test_a_replaced_part_of_the_step_is_called(
    name: str, compiles: bool, stepped: tuple[nn.Module, Optimizer], counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    if compiles:  # torch's compiler wraps two of them
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    place: Any = AdamW if name == "_init_group" else sys.modules["torch.optim.adam"]
    plain = getattr(place, name)

    @functools.wraps(plain)
    def part(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return plain(*args, **kwargs)

    step_(stepped[1])
    assert counted == [8], "the wrappers of the compiler do not count"
    monkeypatch.setattr(place, name, part)
    step_(stepped[1])
    assert called == [1] and counted == [8]


def test_a_parameter_in_two_groups_is_updated_twice() -> None:
    optimizers = []
    for step in (step_, AdamW.step):
        module = model()
        optimizer = AdamW(module.parameters(), lr=1e-2, fused=True)
        for update in range(4):
            set_gradients(module, update)
            if update == 1:  # by hand, since add_param_group refuses it
                optimizer.param_groups.append({**optimizer.param_groups[0], "params": [module[0].weight]})
            step(optimizer)
        optimizers.append(optimizer)
    assert_same(*optimizers)


def test_a_step_replaced_in_the_class_is_called(
    stepped: tuple[nn.Module, Optimizer], counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    monkeypatch.setattr(AdamW, "step", lambda *_: called.append(1))
    step_(stepped[1])
    assert called == [1] and counted == []


def test_schedules_of_torch_see_the_step(counted: list[int]) -> None:
    module = model()
    optimizer = AdamW(module.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for update in range(3):
            set_gradients(module, update)
            step_(optimizer)
            schedule.step()
    assert counted == [8, 8] and optimizer.param_groups[0]["lr"] == 1e-2 / 8


def test_a_schedule_sees_a_step_that_only_this_module_made(stepped: tuple[nn.Module, Optimizer]) -> None:
    _, optimizer = stepped
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_(optimizer)
        schedule.step()


def test_a_profile_shows_the_step(stepped: tuple[nn.Module, Optimizer], counted: list[int]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step_(stepped[1])
    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()} and counted == []


def test_sparse_gradients_are_refused_as_by_torch() -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = AdamW(embedding.parameters(), lr=1e-2, fused=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        step_(optimizer)
    embedding.weight.grad = torch.ones(4, 3)
    step_(optimizer)
    embedding.weight.grad = None
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        step_(optimizer)


def test_gradients_of_another_class_are_left_to_torch(stepped: tuple[nn.Module, Optimizer], counted: list[int]) -> None:
    module, optimizer = stepped
    first = next(module.parameters())
    first.grad = torch.ones_like(first).as_subclass(Wrapped)
    step_(optimizer)
    assert counted == []


# ---- in training ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decay", "kernels"), [(0.0, 1), (0.1, 2)])
def test_training_uses_it(decay: float, kernels: int, tmp_path: Path, counted: list[int]) -> None:
    def weights(optim: str) -> list[Tensor]:
        torch.manual_seed(0)
        args = TrainingArguments(
            str(tmp_path), max_steps=5, weight_decay=decay, optim=optim, learning_rate=1e-2, save_strategy="no",
            disable_tqdm=True, report_to=[], use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(Regression(), args, train_dataset=regression_data(40))
        trainer.train()
        return [parameter.detach() for parameter in trainer.model.parameters()]

    ours = weights("adamw_torch_fused")
    assert len(counted) == 4 * kernels
    torch.testing.assert_close(weights("adamw_torch"), ours, rtol=1e-5, atol=1e-7)
    assert len(counted) == 4 * kernels, "another optimizer"


def test_a_profile_of_training_shows_loader_and_step(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), max_steps=3, save_strategy="no", disable_tqdm=True, use_cpu=True)
    trainer = Trainer(Regression(), args, train_dataset=regression_data(40))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trainer.train()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["Optimizer.step#AdamW.step"] >= 3
    assert counts["enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"] >= 3
