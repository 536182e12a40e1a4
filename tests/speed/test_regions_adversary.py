"""Joined micro-batches and compiled regions with models, hooks and callbacks that are not ordinary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional

import loopwright.speed.joining as joining
import loopwright.speed.planner.cost as cost
import loopwright.speed.planner.regions as regions
from loopwright import Trainer, TrainerCallback, TrainingArguments
from loopwright.pt.acceleration import Acceleration
from loopwright.speed.joining import JOINED
from loopwright.speed.planner.regions import REGION


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "JOINING_DEVICES", ("cpu",))


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(regions, "COMPILING_DEVICES", ("cpu",))
    monkeypatch.setattr(regions, "FASTER", 1e9)
    monkeypatch.setattr(cost, "MARGIN", 0.0)
    monkeypatch.setattr(Acceleration, "region_backend", "aot_eager")
    yield
    torch._dynamo.reset()


GLOBAL = {"calls": 0}


class Net(nn.Module):
    """A model of images; `between` alters its features."""

    def __init__(self, between: Callable[..., Tensor] = lambda net, x: x) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last, self.between = nn.Conv2d(3, 4, 3), nn.Linear(4, 5), between
        self.register_buffer("mean", torch.zeros(4))
        self.seen: list[Any] = []
        self.counts = {"calls": 0}
        self.double()

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        features = self.between(self, torch.relu(self.first(pixel_values.double())).mean((2, 3)))
        logits = self.last(features)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def images(count: int = 48) -> list[dict[str, Tensor]]:
    made = torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return [{"pixel_values": image, "labels": torch.tensor(i % 5)} for i, image in enumerate(made)]


def train(model: nn.Module, folder: Path, speed: str, callbacks: Any = (), data: Any = None, **options: Any) -> Any:
    GLOBAL["calls"] = 0
    torch.manual_seed(0)
    np.random.seed(0)
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": 7, "learning_rate": 1e-2,
        "logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "speed": speed, **options,
    }  # fmt: skip
    trainer = Trainer(
        model, TrainingArguments(str(folder), **arguments), train_dataset=data or images(),
        callbacks=[each() for each in callbacks],
    )  # fmt: skip
    trainer.train()
    return trainer


def both(make: Callable[[], nn.Module], folder: Path, **options: Any) -> tuple[Any, float]:
    """The fast trainer, and how far its losses, weights and buffers are from those of the plain one."""
    plain, fast = (train(make(), folder / speed, speed, **options) for speed in ("off", "max"))
    states = [trainer.model.state_dict() for trainer in (plain, fast)]
    logged = [[row["loss"] for row in each.state.log_history if "loss" in row] for each in (plain, fast)]
    apart = [float((states[0][name] - states[1][name]).abs().max()) for name in states[0]]
    return fast, max(*apart, *np.abs(np.subtract(*logged)).tolist())


def choice(trainer: Any, name: str) -> tuple[bool, str]:
    choices = trainer._loopwright.run.speed.plan.choices
    return next(((each.is_on, each.reason) for each in choices if each.name == name), (False, str(choices)))


# ---- hooks and changes ----------------------------------------------------------------------------------------------


def clipped(gradient: Tensor) -> Tensor:
    return gradient * torch.clamp(0.05 / gradient.norm(), max=1.0)


def clip_added(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-2, 1e-2)


def with_hook() -> Net:
    net = Net()
    net.last.weight.register_hook(clipped)
    return net


def with_hook_after() -> Net:
    net = Net()
    net.last.weight.register_post_accumulate_grad_hook(clip_added)
    return net


@pytest.mark.parametrize("make", [with_hook, with_hook_after])
def test_a_hook_gets_the_gradient_of_each_micro_batch(make: Any, joins: None, tmp_path: Path) -> None:
    fast, apart = both(make, tmp_path)
    assert apart == 0.0 and fast._loopwright.run.speed.plan.joined == 1


class AtFourth(TrainerCallback):
    """Changes the model after the fourth update."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 4:
            self.change(model)


class AddsHook(AtFourth):
    def change(self, model: Any) -> None:
        model.last.weight.register_hook(clipped)


class AddsHookAfter(AtFourth):
    def change(self, model: Any) -> None:
        model.last.weight.register_post_accumulate_grad_hook(clip_added)


class AddsSecondHook(TrainerCallback):
    """Adds one and removes it first, so that the place of hooks exists already."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step in (2, 4):
            handle = model.last.weight.register_hook(clipped)
            if state.global_step == 2:
                handle.remove()


class AddsForwardHook(AtFourth):
    def change(self, model: Any) -> None:
        model.last.register_forward_hook(lambda module, args, output: output - output.mean(0))


class MixesSamples(AtFourth):
    def change(self, model: Any) -> None:
        model.between = lambda net, x: x - x.mean(0)


@pytest.mark.parametrize("callback", [AddsHook, AddsHookAfter, AddsSecondHook, AddsForwardHook, MixesSamples])
def test_the_update_after_a_change_is_not_joined(callback: Any, joins: None, tmp_path: Path) -> None:
    """Its batches were joined before the callback was called."""
    fast, apart = both(Net, tmp_path, callbacks=[callback])
    assert apart < 1e-12 and fast._loopwright.run.speed.plan.joined == 1


class Schedule(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.scale = 1.0 + 0.1 * state.global_step


class Scaled(Net):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__(lambda net, x: x * net.scale)
        self.scale = 1.0


def test_a_model_that_changes_in_every_update_is_not_compared_in_each(joins: None, tmp_path: Path) -> None:
    fast, apart = both(Scaled, tmp_path, callbacks=[Schedule], max_steps=12)
    assert apart < 1e-12 and choice(fast, JOINED) == (False, "scale changes during training")


class Accumulates(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        args.gradient_accumulation_steps = 2 if state.global_step < 4 else 3


@pytest.mark.grid
def test_another_accumulation_is_followed(joins: None, tmp_path: Path) -> None:
    fast, apart = both(Net, tmp_path, callbacks=[Accumulates], gradient_accumulation_steps=4)
    assert apart < 1e-12 and fast._loopwright.run.speed.plan.joined == 4


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bool])
def test_other_types_and_a_smaller_last_batch(dtype: torch.dtype, joins: None, tmp_path: Path) -> None:
    data = [{**row, "pixel_values": (4 * row["pixel_values"]).to(dtype)} for row in images(46)]
    fast, apart = both(Net, tmp_path, data=data, max_steps=-1, num_train_epochs=2)
    assert apart < 1e-12 and choice(fast, JOINED)[0]


# ---- models ---------------------------------------------------------------------------------------------------------


def counted(net: Any, x: Tensor) -> Tensor:
    net.counts["calls"] += 1
    return x * (1 + 0.01 * (net.counts["calls"] % 3))


def counted_globally(net: Any, x: Tensor) -> Tensor:
    GLOBAL["calls"] += 1
    return x * (1 + 0.01 * (GLOBAL["calls"] % 40))


def collected(net: Any, x: Tensor) -> Tensor:
    net.seen.append(x.detach())
    return x


def moved(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x - 0.1 * net.mean


BETWEEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a list": collected,
    "a dict of counts": counted,
    "a moving mean": moved,
    "statistics": lambda net, x: functional.batch_norm(x, None, None, training=True),
    "rows": lambda net, x: 1.01 * x if len(x) > 6 else x,
    "dropped samples": lambda net, x: x * (torch.rand(len(x), 1, dtype=x.dtype) < 0.7),
    "numpy's random numbers": lambda net, x: x * (1 + 0.1 * float(np.random.rand())),
    "a value": lambda net, x: 2 * x if x.sum() > 0 else x,
}
SEPARATE = ("a value",)
"""Models whose samples do not meet, so that their micro-batches are joined."""


def ways(*always: str) -> list[Any]:
    return [pytest.param(name, marks=() if name in always else pytest.mark.grid) for name in BETWEEN]


@pytest.mark.parametrize("way", ways("a list", "a dict of counts"))
def test_models_are_trained_as_collated(way: str, joins: None, tmp_path: Path) -> None:
    made: list[Net] = []

    def make() -> Net:
        made.append(Net(BETWEEN[way]))
        return made[-1]

    fast, apart = both(make, tmp_path)
    assert apart < 1e-12 and choice(fast, JOINED)[0] is (way in SEPARATE), choice(fast, JOINED)
    assert made[0].counts == made[1].counts and len(made[0].seen) == len(made[1].seen)


@pytest.mark.parametrize("way", ways("a dict of counts"))
def test_compiled_models_give_the_numbers_of_the_model_as_written(way: str, compiles: None, tmp_path: Path) -> None:
    _, apart = both(lambda: Net(BETWEEN[way]), tmp_path)
    assert apart < 1e-12


class ByCount(Net):
    """Divides by the number of samples of the update, if it is given one."""

    def forward(self, pixel_values: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        logits = super().forward(pixel_values, labels)["logits"]
        if isinstance(num_items_in_batch, int):
            return {"loss": functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch}
        return {"loss": functional.cross_entropy(logits, labels) * 1.0}


def test_a_region_is_proved_with_the_form_of_the_loss(compiles: None, tmp_path: Path) -> None:
    _, apart = both(ByCount, tmp_path)
    assert apart < 1e-12


def test_a_region_that_is_compiled_again_and_again_is_switched_off(compiles: None, tmp_path: Path) -> None:
    """Its forward reads a global that changes with every call."""
    fast, apart = both(lambda: Net(counted_globally), tmp_path, max_steps=12)
    assert apart < 1e-12 and not choice(fast, REGION)[0] and fast.model._compiled_call_impl is None


# ---- planted errors -------------------------------------------------------------------------------------------------


def test_a_joining_that_mixes_samples_is_refused(joins: None, tmp_path: Path, monkeypatch: Any) -> None:
    exact = joining.joined

    def mixed(batches: Any, count: int) -> Any:
        made = exact(batches, count)
        return [{**made[0], "labels": made[0]["labels"].roll(1)}, *made[1:]]

    monkeypatch.setattr(joining, "joined", mixed)
    fast, apart = both(Net, tmp_path)
    assert apart == 0.0 and not choice(fast, JOINED)[0] and "differs" in choice(fast, JOINED)[1]
