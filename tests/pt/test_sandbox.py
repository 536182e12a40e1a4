"""Computations in a sandbox leave no trace."""

from __future__ import annotations

import itertools
import random
import time
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from functools import partial, partialmethod
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import loopwright
from loopwright.notices import Notices
from loopwright.pt.restoring.kept_state import first_iterator, iterator_of_loss
from loopwright.pt.restoring.sandbox import HAS_CHANGED, Sandbox, sandbox
from tests import models
from tests.models import Tokens, made, samples, trainer_of


class Note:
    """A user's own object, without methods of its own."""

    def __init__(self) -> None:
        self.count, self.seen = 0, [1]


class Busy(nn.Module):
    """Changes every kind of state there is."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm, self.other = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.register_buffer("memory", torch.zeros(3))
        self.register_buffer("lent", torch.zeros(1).expand(3))
        self.config = SimpleNamespace(kind="sparse", sizes=[1, 2])
        self.calls, self.rate, self.name, self.flag, self.nothing = 0, 0.5, "a", False, None
        self.list, self.dict, self.set = [1, [2]], {"a": [1]}, {1}
        self.deque, self.counter = deque([1], maxlen=2), Counter(a=1)
        self.ordered, self.default = OrderedDict(a=1), defaultdict(list)
        self.pair = ([1], {"b": 2})
        self.state, self.array = torch.zeros(2), np.zeros(2)
        self.generator, self.own, self.numpy = torch.Generator(), random.Random(1), np.random.default_rng(1)
        self.numbers, self.entries = itertools.count(3, 2), iter([1, 2, 3])
        self.note = Note()
        self.note.owner = self.note

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.rate, self.name, self.flag, self.nothing = self.calls + 1, 0.1, "b", True, 1
        self.list[1].append(3)
        self.list.append(4)
        self.dict["a"].append(2)
        self.dict["c"] = 1
        self.set.add(2)
        self.deque.extend([2, 3])
        self.counter["a"] += 1
        self.ordered.move_to_end("a")
        self.ordered["z"] = 1
        self.default["x"].append(1)
        self.pair[0].append(2)
        self.pair[1].clear()
        self.state += 1
        self.array += 1
        self.late = "came later"
        torch.rand(2, generator=self.generator)
        self.own.random(), self.numpy.random(), next(self.numbers), next(self.entries)
        self.note.count += 1
        self.note.seen.append(2)
        self.config.kind = "full"
        self.config.sizes.pop()
        self.memory.add_(1)
        self.lent = torch.ones(3)
        self.other = nn.Linear(3, 3)
        self.norm.eval() if self.norm.training else self.norm.train()
        self.register_forward_hook(lambda *_: None)
        with torch.no_grad():
            self.line.weight.data.mul_(2)
        random.random(), np.random.rand(), torch.rand(1)
        return self.norm(self.line(x)).sum()


def everything(model: Busy) -> Any:
    """All there is to know about the model, by value."""
    return {
        "plain": (model.calls, model.rate, model.name, model.flag, model.nothing, model.config.kind),
        "held": repr((model.list, model.dict, model.set, model.deque, model.counter, model.ordered, model.default)),
        "more": repr((model.pair, model.config.sizes, model.note.count, model.note.seen, model.state, model.array)),
        "tensors": repr([value.tolist() for value in model.state_dict().values()]),
        "lent": model.lent.tolist(),
        "modes": [module.training for module in model.modules()],
        "names": sorted(vars(model)),
        "hooks": len(model._forward_hooks),
        "drawn": (repr(model.numbers), model.own.getstate(), str(model.numpy.bit_generator.state)),
        "streams": (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()),
        "generator": model.generator.get_state().tolist(),
        "left": model.entries.__length_hint__(),
    }


def test_every_kind_of_state_is_put_back() -> None:
    torch.manual_seed(0)
    model = Busy()
    before, other, place = everything(model), model.other, model.lent
    containers = [id(model.list), id(model.dict), id(model.deque), id(model.counter), id(model.note)]
    changed = None
    with sandbox(model) as box:
        for _ in range(2):
            model(torch.randn(4, 3)).backward()
            changed = everything(model)
            box.restore()
            assert everything(model) == before
    assert changed is not None and all(changed[name] != before[name] for name in before)
    assert model.other is other and model.lent is place
    assert containers == [id(model.list), id(model.dict), id(model.deque), id(model.counter), id(model.note)]


def test_an_error_inside_leaves_no_trace_either() -> None:
    model = Busy()
    before = everything(model)
    with pytest.raises(ZeroDivisionError), sandbox(model):
        model(torch.randn(4, 3))
        raise ZeroDivisionError
    assert everything(model) == before


def test_gradients_of_an_update_under_way_are_kept() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    kept, values = [p.grad for p in model.parameters()], [p.grad.clone() for p in model.parameters()]
    with sandbox(model):
        assert all(p.grad is None for p in model.parameters())
        model(torch.ones(1, 2)).sum().backward()
    assert all(p.grad is grad for p, grad in zip(model.parameters(), kept, strict=True))
    assert all(torch.equal(p.grad, value) for p, value in zip(model.parameters(), values, strict=True))


class Counting(loopwright.Trainer):
    """Keeps metrics as trainers of other libraries do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls, self._metrics, self.note = 0, {"train": defaultdict(list)}, Note()
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.note.count += 1
        self._metrics["train"]["loss"].append(1.0)
        return super().compute_loss(model, inputs, **kwargs)


def test_a_trainers_counters_are_those_of_its_training(tmp_path: Any) -> None:
    """Three updates of two micro-batches each are six calls, however often the loss was tried out."""
    trainer = trainer_of(
        made(Tokens), samples((5, 8, 3, 9, 4, 6)), tmp_path, cls=Counting, per_device_train_batch_size=1,
        gradient_accumulation_steps=2, max_steps=3,
    )  # fmt: skip
    metrics = trainer._metrics
    trainer.train()
    assert trainer.calls == trainer.note.count == 6 and trainer._metrics is metrics
    assert metrics == {"train": {"loss": [1.0] * 6}}


DRAWN, SEEN = torch.Generator(), Note()


class Global(loopwright.Trainer):
    """Its loss uses objects in global variables, on its class, and on the state of the run."""

    calls = 0

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        self.draw()
        SEEN.count += 1
        SEEN.seen.append(torch.ones(1))
        type(self).calls += 1
        self.state.calls = getattr(self.state, "calls", 0) + 1
        self.state.log_history.append({"calls": self.state.calls})
        self.control.calls = getattr(self.control, "calls", 0) + 1
        return super().compute_loss(model, inputs, **kwargs)

    def draw(self) -> None:
        torch.rand(1, generator=DRAWN)


class Below(Global):
    """Its calls are counted on this class, which has no number of its own at first."""


def test_global_objects_are_used_by_training_only(tmp_path: Any) -> None:
    DRAWN.manual_seed(0)
    SEEN.count, SEEN.seen = 0, []
    trainer = trainer_of(
        made(Tokens), samples((5, 8, 3, 9, 4, 6)), tmp_path, cls=Below, per_device_train_batch_size=1,
        gradient_accumulation_steps=2, max_steps=3,
    )  # fmt: skip
    trainer.train()
    same = torch.Generator().manual_seed(0)
    for _ in range(6):
        torch.rand(1, generator=same)
    assert torch.equal(DRAWN.get_state(), same.get_state())
    assert [row["calls"] for row in trainer.state.log_history if "calls" in row] == [1, 2, 3, 4, 5, 6]
    assert SEEN.count == len(SEEN.seen) == Below.calls == trainer.state.calls == trainer.control.calls == 6


class Remembering(nn.Module):
    """A part of a loss: weights, statistics, numbers and a state that change with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.norm = nn.Parameter(torch.zeros(3), requires_grad=False), nn.BatchNorm1d(3)
        self.seen, self.state = 0, None

    def compute_loss(self, x: Tensor) -> Tensor:
        self.mean.data.lerp_(self.norm(x).detach().mean(0), 0.1)
        self.seen, self.state = self.seen + 1, x.detach()
        return (x - self.mean).square().mean()

    forward = compute_loss


@pytest.mark.parametrize("place", ["trainer", "list", "object", "function", "model"])
def test_modules_beside_the_model_are_put_back(place: str) -> None:
    """A teacher, or a loss with statistics, is no part of the model that is trained."""
    model, beside = nn.Linear(3, 3), Remembering()
    trainer = SimpleNamespace(compute_loss_func=beside if place == "function" else None, model=model)
    if place == "trainer":
        trainer.teacher = beside
    elif place == "list":
        trainer.losses = [beside]
    elif place == "object":
        trainer.note = Note()
        trainer.note.loss = beside
    elif place == "model":
        model.hidden = (beside, model)  # in a tuple, so that its weights are not those of the model
    before = {name: value.clone() for name, value in beside.state_dict().items()}
    with sandbox(model, trainer):
        beside(model(torch.randn(4, 3))).backward()
        assert beside.seen == 1 and beside.mean.any()
    assert beside.seen == 0 and beside.state is None
    assert all(torch.equal(value, before[name]) for name, value in beside.state_dict().items())


class Distilling(loopwright.Trainer):
    """Its teacher changes with every call."""

    teacher: Any

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, **kwargs)
        self.teacher[0].seen += 1
        self.teacher[0].mean.data.add_(1)
        return loss


def test_a_teacher_of_the_trainer_learns_from_training_only(tmp_path: Any) -> None:
    trainer = trainer_of(
        made(Tokens), samples((5, 8, 3, 9, 4, 6)), tmp_path, cls=Distilling, per_device_train_batch_size=1,
        gradient_accumulation_steps=2, max_steps=3,
    )  # fmt: skip
    trainer.teacher = nn.ModuleList([Remembering()])
    trainer.train()
    assert trainer.teacher[0].seen == 6 and trainer.teacher[0].mean.tolist() == [6.0] * 3


def test_counters_of_a_loss_function_are_those_of_the_training(tmp_path: Any) -> None:
    calls, seen = 0, []

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        seen.append(1)
        loss.calls = getattr(loss, "calls", 0) + 1
        total, count = models.summed(outputs["logits"], labels)
        return total / count

    trainer = trainer_of(
        made(Tokens), samples((5, 8, 3, 9)), tmp_path, compute_loss_func=loss, per_device_train_batch_size=1,
        gradient_accumulation_steps=2, max_steps=2,
    )  # fmt: skip
    trainer.train()
    assert calls == loss.calls == len(seen) == 4


def discriminator() -> Any:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def act() -> None:
        weight.square().sum().backward()
        optimizer.step()
        schedule.step()

    trainer = SimpleNamespace(weight=weight, optimizer_of_discriminator=optimizer, schedule=schedule)
    act()
    return trainer, act, lambda: (weight.tolist(), weight.grad, optimizer.state_dict(), schedule.state_dict())


def in_partial() -> Any:
    beside = Remembering()
    loss = partial(lambda teacher, x: teacher(x), beside)
    return SimpleNamespace(compute_loss_func=loss), lambda: loss(torch.ones(4, 3)), lambda: (beside.seen, beside.mean)


def in_defaults() -> Any:
    def loss(held: Any = [Note()], *, also: Any = {"calls": 0}) -> None:  # noqa: B006, B008
        held[0].count += 1
        also["calls"] += 1

    return SimpleNamespace(compute_loss_func=loss), loss, lambda: (loss.__defaults__[0][0].count, loss.__kwdefaults__)


@dataclass(slots=True)
class Slotted:
    """A state of a loss without a `__dict__`."""

    center: Tensor
    teacher: nn.Module
    count: int = 0


def in_slots() -> Any:
    held = Slotted(torch.zeros(2), Remembering())

    def act() -> None:
        held.count += 1
        held.center = held.center + 1
        held.teacher(torch.ones(4, 3))

    return SimpleNamespace(held=held), act, lambda: (held.count, held.center, held.teacher.seen)


CENTER, STEPS, LOSSES = torch.zeros(2), 0, ModuleType("losses")


def in_globals() -> Any:
    def loss() -> None:
        global CENTER, COMES_LATER
        CENTER = CENTER + 1
        COMES_LATER = 1

    return SimpleNamespace(compute_loss_func=loss), loss, lambda: (CENTER, "COMES_LATER" in globals())


def in_a_module() -> Any:
    LOSSES.steps, LOSSES.note = torch.zeros(1), Note()

    def loss() -> None:
        LOSSES.steps = LOSSES.steps + 1
        LOSSES.note.count += 1

    return SimpleNamespace(compute_loss_func=loss), loss, lambda: (LOSSES.steps, LOSSES.note.count)


class Called:
    """A loss function with a state on its class and in a global variable."""

    center, note, count = torch.zeros(2), Note(), 0

    def __call__(self) -> None:
        global STEPS
        STEPS += 1
        Called.center = self.center + 1
        self.note.count += 1
        type(self).count += 1
        type(self).late = [1]


def of_class() -> Any:
    loss = Called()
    look = lambda: (STEPS, Called.center, Called.note.count, Called.count, hasattr(Called, "late"))  # noqa: E731
    return SimpleNamespace(compute_loss_func=loss), loss, look


def in_closures_of_methods() -> Any:
    count, beside = [0], Remembering()

    class Helped(SimpleNamespace):
        def compute_loss(self) -> None:
            self.distilled  # noqa: B018

        @property
        def distilled(self) -> None:
            count[0] += 1
            beside(torch.ones(4, 3))

    trainer = Helped()
    return trainer, trainer.compute_loss, lambda: (count[0], beside.seen)


def in_an_iterator() -> Any:
    numbers = iter([1, 2, 3])

    def loss() -> None:
        next(numbers)

    return SimpleNamespace(compute_loss_func=loss), loss, lambda: numbers.__length_hint__()


NUMBERS = itertools.count(5)


def in_global_iterators() -> Any:
    class Loss:
        entries = iter([1, 2, 3])

        def __call__(self) -> None:
            next(NUMBERS), next(self.entries)

    loss = Loss()
    return SimpleNamespace(compute_loss_func=loss), loss, lambda: (NUMBERS, loss.entries.__length_hint__())


def of_leaves() -> Any:
    weights, beside = torch.ones(2, requires_grad=True), Remembering()

    def act() -> None:
        weights.sum().backward()
        beside.requires_grad_(False)

    look = lambda: (weights.grad, [each.requires_grad for each in beside.parameters()])  # noqa: E731
    return SimpleNamespace(weights=weights, beside=beside), act, look


def of_a_loss_with_attributes_of_trainers() -> Any:
    class Helper:
        def __init__(self) -> None:
            self.model, self.state = Remembering(), {"calls": 0}

        def compute_loss(self) -> None:
            self.model(torch.ones(4, 3))
            self.state["calls"] += 1

    helper = Helper()
    return SimpleNamespace(helper=helper), helper.compute_loss, lambda: (helper.model.seen, dict(helper.state))


@pytest.mark.parametrize(
    "place",
    [discriminator, in_partial, in_defaults, in_slots, in_globals, in_a_module, of_class, in_closures_of_methods,
     in_an_iterator, in_global_iterators, of_leaves, of_a_loss_with_attributes_of_trainers],
)  # fmt: skip
def test_state_of_a_loss_is_found_wherever_it_is(place: Any) -> None:
    trainer, act, look = place()
    before = repr(look())
    with sandbox(nn.Linear(1, 1), trainer) as box:
        for _ in range(2):
            act()
            assert repr(look()) != before
            box.restore()
    assert repr(look()) == before


def test_a_switch_of_attention_is_undone() -> None:
    """A short batch makes BigBird compute full attention from then on, unless it is in a sandbox."""
    from transformers import BigBirdConfig, BigBirdForSequenceClassification

    model = BigBirdForSequenceClassification(
        BigBirdConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
                      block_size=4, num_random_blocks=1, max_position_embeddings=128)
    )  # fmt: skip
    before = [type(module).__name__ for module in model.modules()]
    assert model.bert.attention_type == "block_sparse"
    with sandbox(model):
        model(torch.randint(1, 20, (2, 8)))
        assert model.bert.attention_type == "original_full"
    assert model.bert.attention_type == model.config.attention_type == "block_sparse"
    assert [type(module).__name__ for module in model.modules()] == before


@pytest.mark.parametrize("by_data", [False, True])
def test_weights_too_large_to_copy_are_looked_at(by_data: bool) -> None:
    notices = Notices(quiet=True)
    trainer = SimpleNamespace(_loopwright=SimpleNamespace(notices=notices))
    model = nn.Linear(3000, 3000)
    with sandbox(model, trainer):
        model(torch.ones(1, 3000)).sum().backward()
    assert not notices.told
    with sandbox(model, trainer), torch.no_grad():
        (model.bias.data if by_data else model.bias).add_(1)
    assert notices.told == [HAS_CHANGED]


def test_a_large_teacher_in_the_model_is_restored() -> None:
    model = nn.ModuleDict({"student": nn.Linear(3000, 3000), "teacher": nn.Linear(3000, 3000).requires_grad_(False)})
    before = model["teacher"].weight.clone()
    with sandbox(model) as box:
        model["teacher"].weight.data.mul_(0.5)
        assert not box.has_changed_weights
    assert torch.equal(model["teacher"].weight, before)


def test_arrays_are_copied_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer may hold its data, which would not fit into memory twice."""
    monkeypatch.setattr("loopwright.pt.restoring.kept_state.MOST_IN_ALL", 5)
    trainer = SimpleNamespace(data=[np.zeros(2), torch.zeros(2), np.zeros(2), np.zeros(1)])
    with sandbox(nn.Linear(1, 1), trainer):
        for each in trainer.data:
            each += 1
    assert [float(each[0]) for each in trainer.data] == [0, 0, 1, 0]


def test_the_data_is_not_copied_where_a_loss_refers_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopwright.pt.restoring.kept_state.MOST_IN_ALL", 2)
    data, center = [np.zeros(2)], np.zeros(2)
    trainer = SimpleNamespace(train_dataset=data, compute_loss_func=lambda: (data, center))
    with sandbox(nn.Linear(1, 1), trainer):
        center += 1
    assert not center.any()


def test_a_source_of_data_on_the_trainer_is_seen() -> None:
    trainer = SimpleNamespace(count=itertools.count(), batches=iter([1]), train_dataset=iter([1]))
    assert first_iterator(trainer) is None
    trainer.unlabeled = (i for i in range(3))
    assert first_iterator(trainer) == "unlabeled"


def test_an_iterator_that_a_loss_function_uses_is_seen() -> None:
    source = (i for i in range(3))
    trainer = SimpleNamespace(compute_loss_func=lambda: next(source))
    assert iterator_of_loss(trainer) == "generator"
    trainer.compute_loss_func = lambda: next(iter([1]))
    assert iterator_of_loss(trainer) is None
    trainer.compute_loss = partial(lambda batches: next(batches), source)
    assert iterator_of_loss(trainer) == "generator"
    made = type("OfAClass", (SimpleNamespace,), {"compute_loss": partialmethod(lambda self, held: next(held), source)})
    assert iterator_of_loss(made()) == "generator"


class Endless:
    """Batches of a source without end; not an iterator itself."""

    def __init__(self) -> None:
        self.batches = (i for i in range(3))


class DrawsFromOne(SimpleNamespace):
    def compute_loss(self) -> Any:
        return self.unlabeled_batch()

    def unlabeled_batch(self) -> Any:
        return next(self.unlabeled.batches)


def test_an_iterator_in_an_object_that_the_loss_uses_is_seen() -> None:
    assert iterator_of_loss(DrawsFromOne(unlabeled=Endless())) == "generator"
    assert iterator_of_loss(DrawsFromOne(unlabeled=None, of_an_evaluation=Endless())) is None


def test_a_model_of_many_modules_is_kept_quickly() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)) for _ in range(300)))
    started = time.perf_counter()
    for _ in range(10):
        Sandbox(model).restore()
    assert time.perf_counter() - started < 60  # it took minutes


def test_objects_of_generated_classes_that_have_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Note, "__module__", None)
    model = nn.Linear(1, 1)
    model.note = Note()
    with sandbox(model):
        model.note.count += 1
        model.note.seen.append(2)
    assert model.note.count == 0
    assert model.note.seen == [1]


class Guarded:
    """Has a slot that is not set, one that a property hides, and an own way to look up attributes."""

    __slots__ = ("_cache", "data", "hidden")

    def __init__(self) -> None:
        self.data, self.hidden = {"rate": 1.0}, 1

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


class Hiding(Guarded):
    __slots__ = ()

    @property
    def hidden(self) -> str:
        return "hidden"


def test_slots_are_read_and_written_by_themselves() -> None:
    held, slot = Hiding.__new__(Hiding), Guarded.__dict__["hidden"]
    Guarded.data.__set__(held, {"rate": 1.0})  # type: ignore[attr-defined]
    slot.__set__(held, 1)
    with sandbox(nn.Linear(1, 1), SimpleNamespace(held=held)):
        slot.__set__(held, 2)
        held._cache = [1]
    assert slot.__get__(held) == 1
    with pytest.raises(KeyError):
        held._cache  # noqa: B018


def test_a_module_imported_by_a_loss_stays_bound() -> None:
    def loss() -> None:
        LOSSES.imported = ModuleType("losses.imported")  # as an import of a part of a package does

    with sandbox(nn.Linear(1, 1), SimpleNamespace(compute_loss_func=loss)):
        loss()
    assert LOSSES.imported.__name__ == "losses.imported"
    del LOSSES.imported


def test_what_cannot_be_copied_is_left_alone() -> None:
    gone = Note()
    proxy = weakref.proxy(gone)
    del gone
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with sandbox(nn.Linear(1, 1), SimpleNamespace(entries=[proxy], nested=nested)):
        pass
