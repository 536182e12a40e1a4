"""The Python state that a model, a trainer and its losses refer to, and functions that restore it in place."""

from __future__ import annotations

import threading
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from types import CellType, FunctionType, MemberDescriptorType as Slot, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ProxyTypes

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ...speed.users_loss import users_loss_of
from ..data.columns import innermost
from ..devices import is_lazy
from .attributes import DICTS, PLAIN, attributes_of, read_slots, rebinding, write_slots
from .kept_weights import is_sharded, parameters_of
from .refilling import Undo, copied, random_stream, refilling
from .shared_state import is_users_code, is_users_module, may_have_state, names_in, restoring_class, restoring_globals

MOST_NODES = 200_000
"""Most values inspected in all; a model of a thousand modules has about twenty thousand."""
MOST_ENTRIES = 10_000
"""Entries up to which a container's contents are inspected; of a longer one, only the entries themselves are kept."""
DEEPEST = 8
MOST_NUMBERS, MOST_IN_ALL = 32_000_000, 64_000_000
"""Size of the largest array that is copied, and of all of them: a global variable may hold the user's data."""
LIBRARIES = ("loopwright", "torch", "numpy", "datasets", "tokenizers", "pandas", "threading", "logging", "_io")
"""Packages whose objects hold no state that a loss changes, except for STEPPED."""
STEPPED = (Optimizer, LRScheduler)
"""Objects of torch that a loss with weights of its own changes, such as that of a discriminator."""
FUNCTIONS = (FunctionType, MethodType, CellType, partial, partialmethod, staticmethod, classmethod, property)
NOT_STATE = frozenset(
    {
        "_loopwright", "accelerator", "args", "state", "control", "model", "model_wrapped", "optimizer", "lr_scheduler",
        "train_dataset", "eval_dataset", "processing_class", "callback_handler",
    }
)  # fmt: skip
"""Attributes of a trainer whose contents no loss changes, or that are large."""
STATES = ("state", "control")
"""Attributes of a trainer whose own attributes, and the entries of these, are restored."""


class KeptState:
    """Plain Python values, and functions that restore each of them in place."""

    def __init__(self, *, copies: bool = True) -> None:
        """Without `copies`, arrays are not copied: it is only known what there is."""
        self._copies = copies
        self.iterators: list[Any] = []
        """Iterators whose consumed items cannot be restored."""
        self._is_users: Callable[[Any], bool] = lambda value: True
        """Whether the attributes of an object are inspected."""
        self.leaves: list[Tensor] = []
        """Tensors that gradients may be computed for, beside the parameters of modules."""
        self._undo: list[Undo] = []
        self._found: list[nn.Module] = []
        """Modules that were found as values."""
        self._recorded: set[int] = set()
        self._named: set[tuple[int, frozenset[str]]] = set()
        """Global variables that were recorded: the id of the dict they are in, and their names."""
        self._slots: dict[type, list[Slot]] = {}
        """The slots of the classes that were recorded."""
        self._empty: list[Any] = []
        self._seen: set[int] = set()
        self._left, self._numbers_left = MOST_NODES, MOST_IN_ALL
        self._held: list[Any] = []  # keeps objects alive, so that ids stay unique

    def leave_out(self, values: Iterable[Any]) -> None:
        """Exclude values that are restored elsewhere."""
        for value in values:
            self._note(value)

    def restore(self) -> None:
        for container in self._empty:
            if container:
                container.clear()
        for undo in self._undo:
            undo()

    def keep_attributes(self, owner: Any, depth: int = 0) -> None:
        """Record the attributes of an object: they are bound again, and later ones are removed."""
        if id(owner) in self._seen:
            return
        self._note(owner)
        self._keep_classes_of(owner, depth)
        attributes = attributes_of(owner)
        without = NOT_STATE if "_loopwright" in attributes else frozenset()  # a trainer
        self._undo.append(rebinding(attributes, without))
        slots = read_slots(owner, self._slots[type(owner)])
        if slots:
            self._undo.append(partial(write_slots, owner, slots))
        for name, value in [*attributes.items(), *slots.items()]:
            kind = type(value)
            if kind in PLAIN or name in without:
                continue
            if kind in DICTS and not value:  # most attributes of a module are dicts of hooks
                if id(value) not in self._seen:
                    self._seen.add(id(value))
                    self._empty.append(value)
                    self._left -= 1
            else:
                self.keep(value, depth + 1)

    def add(self, undo: Iterable[Undo]) -> None:
        self._undo.extend(undo)

    def keep_trainer(self, trainer: Any) -> None:
        """Record a trainer and its loss functions."""
        self.leave_out(vars(trainer).get(name) for name in NOT_STATE)  # a loss may refer to the data, too
        with self.of_users_only():
            self.keep_attributes(trainer)
            for function in _loss_functions(trainer):
                self.keep(function)
        for name in STATES:
            attributes = vars(getattr(trainer, name, SimpleNamespace()))
            kept = map(refilling, attributes.values())  # such as log_history, without its rows
            self._undo += [rebinding(attributes), *(each for each in kept if each is not None)]

    def keep_found_modules(self) -> list[nn.Module]:
        """Record the modules that others, a trainer or its loss functions hold, such as teachers; returns them."""
        made: list[nn.Module] = []
        while self._found:
            made += self.keep_modules(self._found.pop())
        return made

    def keep_modules(self, root: nn.Module) -> list[nn.Module]:
        """Record a module and those in it, besides their tensors; returns those that were not recorded before."""
        if id(root) in self._recorded:
            return []
        new = [module for module in root.modules() if id(module) not in self._recorded]
        self._recorded.update(map(id, new))
        self.leave_out(buffer for module in new for buffer in module._buffers.values())
        if is_sharded(new):  # FSDP swaps full and sharded parameters itself
            self.leave_out(module._parameters for module in new)
        else:
            self.leave_out(parameters_of(new))
        for module in new:
            self.keep_attributes(module)
        return new

    def keep(self, value: Any, depth: int = 0) -> None:
        """Record a value and its contents, as far as they are plain state."""
        if type(value) in PLAIN or id(value) in self._seen or depth > DEEPEST or self._left <= 0:
            return
        if type(value) in ProxyTypes:  # its object may no longer exist
            return
        if isinstance(value, nn.Module):
            self._found.append(value)
        elif isinstance(value, type):
            self._keep_class(value, depth)
        elif isinstance(value, (list, dict, set, deque, tuple)):
            self._keep_container(value, depth)
        elif isinstance(value, (Tensor, np.ndarray)):
            self._keep_array(value)
        elif isinstance(value, FUNCTIONS):
            self._keep_function(value, depth)
        elif (undo := random_stream(value)) is not None:
            self._note(value)
            self._undo.append(undo)
        else:
            self._keep_object(value, depth)

    def _keep_object(self, value: Any, depth: int) -> None:
        if is_consumed(value):
            self.iterators.append(value)
        is_inspected = isinstance(value, STEPPED) or (not _is_of_a_library(value) and self._is_users(value))
        if is_inspected and not _runs_by_itself(value):
            self.keep_attributes(value, depth)

    @contextmanager
    def of_users_only(self) -> Iterator[None]:
        """Inspect the attributes of objects of the user's classes only."""
        before, self._is_users = self._is_users, _is_written_here
        try:
            yield
        finally:
            self._is_users = before

    def _keep_classes_of(self, owner: Any, depth: int) -> None:
        kind = type(owner)
        if kind not in self._slots:
            users = filter(is_users_code, kind.__mro__)
            self._slots[kind] = [each for base in users for each in vars(base).values() if type(each) is Slot]
            for base in kind.__mro__:
                self._keep_class(base, depth)

    def _keep_class(self, kind: type, depth: int) -> None:
        """Record the attributes of a class, and its methods: they may use global variables."""
        if id(kind) in self._seen or not may_have_state(kind.__module__):
            return
        self._note(kind)
        self.add(restoring_class(kind))
        is_users = is_users_code(kind)
        with self.of_users_only():
            for value in vars(kind).values():
                if is_users or isinstance(value, FunctionType):
                    self.keep(value, depth + 1)

    def _keep_array(self, value: Any) -> None:
        self._note(value)
        size = value.size if isinstance(value, np.ndarray) else value.numel()
        if size > min(MOST_NUMBERS, self._numbers_left) or not self._copies:
            return
        if isinstance(value, np.ndarray):
            if value.flags.writeable:
                self._numbers_left -= size
                same = value.copy()
                self._undo.append(lambda: np.copyto(value, same))
        elif type(value) in (Tensor, nn.Parameter) and not is_lazy(value.device) and is_writable(value):
            self._numbers_left -= size
            if value.is_leaf and value.requires_grad:
                self.leaves.append(value)
            clone = value.detach().clone()

            def undo() -> None:  # always: not every write changes the version counter
                value.data.copy_(clone)

            self._undo.append(undo)

    def _keep_container(self, value: Any, depth: int) -> None:
        self._note(value)
        if type(value) not in DICTS and type(value).__dictoffset__:
            self.keep(attributes_of(value), depth + 1)
        if not value:
            if not isinstance(value, tuple):
                self._empty.append(value)
            return
        undo = refilling(value)
        if undo is not None:
            self._undo.append(undo)
        if len(value) <= MOST_ENTRIES:
            for each in list(value.values() if isinstance(value, dict) else value):
                if type(each) not in PLAIN:
                    self.keep(each, depth + 1)

    def _keep_function(self, value: Any, depth: int) -> None:
        """Record what a function refers to: closures, defaults and global variables may hold counters."""
        self._note(value)
        if isinstance(value, CellType):
            self._keep_cell(value, depth)
            return
        if isinstance(value, FunctionType):
            parts = self._parts_of_function(value, depth)
        elif isinstance(value, (partial, partialmethod)):
            parts = (value.func, value.args, value.keywords)
        elif isinstance(value, MethodType):
            parts = (value.__func__, value.__self__)
        else:
            parts = (value.fget if isinstance(value, property) else value.__func__,)
        for each in parts:
            self.keep(each, depth + 1)

    def _keep_cell(self, cell: CellType, depth: int) -> None:
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            return
        drawn = copied(content)
        self._undo.append(lambda: setattr(cell, "cell_contents", content if drawn is None else copied(drawn)))
        self.keep(content, depth + 1)

    def _parts_of_function(self, function: FunctionType, depth: int) -> tuple[Any, ...]:
        home = function.__globals__.get("__name__") or ""
        if not may_have_state(home):  # for example torch.no_grad() around a function of the user
            return (getattr(function, "__wrapped__", None),)
        self._keep_names(function.__globals__, names_in(function), home, depth)
        return (vars(function), function.__defaults__, function.__kwdefaults__, *(function.__closure__ or ()))

    def _keep_names(self, place: dict[str, Any], names: frozenset[str], home: str, depth: int) -> None:
        """Record the global variables of these names, also in modules of the user that are among them."""
        if (id(place), names) in self._named or depth > DEEPEST:
            return
        self._named.add((id(place), names))
        self.add(restoring_globals(place, names, home=home))
        with self.of_users_only():
            for value in [place[name] for name in sorted(names) if name in place and is_users_module(home)]:
                if not isinstance(value, ModuleType):
                    self.keep(value, depth + 1)
                elif is_users_module(value.__name__):
                    self._keep_names(vars(value), names, value.__name__, depth + 1)

    def _note(self, value: Any) -> None:
        self._seen.add(id(value))
        self._held.append(value)
        self._left -= 1


def first_iterator(trainer: Any) -> str | None:
    """The name of an attribute that is an iterator whose consumed items could not be restored."""
    for name, value in vars(trainer).items():
        if name not in NOT_STATE and is_consumed(value):
            return name
    return None


def iterator_of_loss(trainer: Any) -> str | None:
    """The kind of an iterator that the loss functions of a trainer use, if its items could not be restored."""
    state, functions = KeptState(copies=False), _loss_functions(trainer)
    state.leave_out([trainer, *(vars(trainer).get(name) for name in NOT_STATE)])
    with state.of_users_only():
        for each in [*functions, *(vars(trainer).get(name) for name in _names_used(functions, type(trainer)))]:
            state.keep(each)
    return type(state.iterators[0]).__name__ if state.iterators else None


def _names_used(functions: Iterable[Any], kind: type) -> list[str]:
    """The names in the code of functions, and of the user's methods of this class that they name."""
    names: set[str] = set()
    left = [function for function in functions if isinstance(function, FunctionType)]
    while left:
        new = names_in(left.pop()) - names
        names |= new
        named = (getattr(kind, name, None) for name in new)
        left += [each for each in named if isinstance(each, FunctionType) and is_users_code(each)]
    return sorted(names)


def is_consumed(value: Any) -> bool:
    """Whether a value is an iterator whose consumed items cannot be restored."""
    if not isinstance(value, Iterator) or copied(value) is not None:
        return False
    return isinstance(value, _BaseDataLoaderIter) or not _is_of_a_library(value)


def _loss_functions(trainer: Any) -> list[Any]:
    """The user's functions that compute a loss."""
    found = [getattr(trainer, "compute_loss_func", None), users_loss_of(innermost(getattr(trainer, "model", None)))]
    users = [kind for kind in type(trainer).__mro__ if not kind.__module__.startswith("loopwright.")]
    found += [vars(each).get("compute_loss") for each in (trainer, *users)]
    return [function for function in found if function is not None]


def _is_of_a_library(value: Any) -> bool:
    return (type(value).__module__ or "").partition(".")[0] in LIBRARIES


def _is_written_here(value: Any) -> bool:
    """Whether an object's class is the user's, not that of an installed package."""
    return type(value) in (SimpleNamespace, UserDict, UserList) or is_users_code(type(value))


def _runs_by_itself(value: Any) -> bool:
    """Whether another thread may use an object, whose queues must not be restored."""
    own = (threading.Thread, type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event)
    return any(isinstance(each, own) for each in list(attributes_of(value).values()))


def is_writable(tensor: Tensor) -> bool:
    """Whether the tensor has data, and each element its own memory location."""
    if tensor.device.type == "meta" or tensor.is_inference() or tensor.is_nested:
        return False
    if tensor.layout is not torch.strided:
        return True
    return all(stride or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
