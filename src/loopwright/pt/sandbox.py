"""Running code without side effects: random states, buffers, gradients, modes and plain Python state are restored."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..snapshot import Snapshot
from ..speed.users_loss import users_loss_of
from .data.columns import innermost
from .devices import is_lazy
from .kept_weights import KeptWeights, is_sharded, parameters_of
from .refilling import Undo, copied, random_stream, refilling
from .shared_state import globals_of, is_users_code, named_by, shared_by, shared_by_class

MOST_NODES = 200_000
"""Most values inspected in all; a model of a thousand modules has about twenty thousand."""
MOST_ENTRIES = 10_000
"""Entries up to which a container's contents are inspected; of a longer one, only the entries themselves are kept."""
DEEPEST = 8
MOST_NUMBERS, MOST_IN_ALL = 8_000_000, 64_000_000
"""Size of the largest array that is copied, and of all of them: a global variable may hold the user's data."""
HAS_CHANGED = (
    "computing the loss writes to weights that are too large to copy, so that each test of the loss changes them too; "
    "update them in a callback instead (on_step_end)"
)
PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None)})
DICTS = frozenset({dict, OrderedDict})
NO_ITERATORS = PLAIN | DICTS | {list, tuple, set, nn.Parameter, Tensor}
LIBRARIES = ("loopwright", "torch", "numpy", "datasets", "tokenizers", "pandas", "threading", "logging", "_io")
"""Packages whose objects hold no state that a loss changes."""
NOT_STATE = frozenset(
    {
        "_loopwright", "accelerator", "args", "state", "control", "model", "model_wrapped", "optimizer", "lr_scheduler",
        "train_dataset", "eval_dataset", "processing_class", "callback_handler",
    }
)  # fmt: skip
"""Attributes of a trainer whose contents no loss changes, or that are large."""
STATES = ("state", "control")
"""Attributes of a trainer whose own attributes are restored."""


@contextmanager
def sandbox(model: nn.Module, trainer: Any = None, *, spares_memory: bool = False) -> Iterator[Sandbox]:
    """Restore model, trainer and random states after the block; `spares_memory` keeps weights on the host."""
    box = Sandbox(model, trainer, spares_memory=spares_memory)
    try:
        yield box
    finally:
        box.restore()
        box.close()
    internals = getattr(trainer, "_loopwright", None)
    if internals is not None and box.has_changed_weights:
        internals.notices.warn_once(HAS_CHANGED)


class Sandbox:
    """The state of a model, a trainer and all random states at one moment, which can be restored repeatedly."""

    def __init__(self, model: nn.Module, trainer: Any = None, *, spares_memory: bool = False) -> None:
        state = self._state = _State()
        own = state.keep_modules(model)
        if trainer is not None:
            state.keep_trainer(trainer)
        others = state.keep_found_modules()
        self._modules = own + others
        self._tensors = Snapshot(self._modules, keeps=lambda b: not is_lazy(b.device) and _is_writable(b))
        self._grads = [(parameter, parameter.grad) for parameter in parameters_of(self._modules)]
        self._weights = [KeptWeights(modules, on_host=spares_memory) for modules in (own, others)]
        self._lazy = self._stand_in_for_lazy_buffers()
        self._hide_gradients()

    @property
    def has_changed_weights(self) -> bool:
        """Whether weights too large to copy were written to, which is not undone."""
        return any(weights.has_changed for weights in self._weights)

    def restore(self) -> None:
        """Restore everything; the sandbox can be used again."""
        self._state.restore()
        self._tensors.restore()
        for place, name, clone in self._lazy_clones():
            place[name] = clone
        for weights in self._weights:
            weights.restore()
        self._hide_gradients()

    def close(self) -> None:
        """Restore the gradients and the buffers that were replaced meanwhile."""
        for parameter, grad in self._grads:
            parameter.grad = grad
        for place, name, buffer in self._lazy:
            place[name] = buffer

    def _hide_gradients(self) -> None:
        # Gradients of an update in progress are set aside instead of copied.
        for parameter, _ in self._grads:
            if parameter.grad is not None:
                parameter.grad = None

    def _stand_in_for_lazy_buffers(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Replace lazy buffers by copies, and keep the originals: on a lazy device even restoring a value is work."""
        lazy = [
            (module._buffers, name, buffer)
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None and is_lazy(buffer.device)
        ]
        for place, name, buffer in lazy:
            place[name] = buffer.clone()  # type: ignore[assignment]
        return lazy  # type: ignore[return-value]

    def _lazy_clones(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        return [(place, name, buffer.clone()) for place, name, buffer in self._lazy]


class _State:
    """Plain Python values, and functions that restore each of them in place."""

    def __init__(self) -> None:
        self.is_users: Callable[[Any], bool] = lambda value: True
        """Whether the attributes of an object are inspected."""
        self._undo: list[Undo] = []
        self._found: list[nn.Module] = []
        """Modules that were found as values."""
        self._recorded: set[int] = set()
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
        is_trainer = hasattr(type(owner), "compute_loss") and not isinstance(owner, nn.Module)
        without = NOT_STATE if is_trainer else frozenset()
        attributes = vars(owner)
        self._undo.append(_rebinding(attributes, without))
        for name, value in list(attributes.items()):
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
        self.is_users = _is_written_here
        self.keep_attributes(trainer)
        for function in _loss_functions(trainer):
            self.keep(function)
        self.add(shared_by([trainer]))
        self._keep_globals_of_classes([trainer])
        for name in STATES:
            if hasattr(trainer, name):
                self._undo.append(_rebinding(vars(getattr(trainer, name))))
        self.is_users = lambda value: True

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
        self.leave_out(buffer for module in new for buffer in module._buffers.values() if buffer is not None)
        if is_sharded(new):  # FSDP swaps full and sharded parameters itself
            self.leave_out(module._parameters for module in new)
        for module in new:
            self.keep_attributes(module)
        self.add(shared_by(new))
        self._keep_globals_of_classes(new)
        return new

    def keep(self, value: Any, depth: int = 0) -> None:
        """Record a value and its contents, as far as they are plain state."""
        if type(value) in PLAIN or id(value) in self._seen or depth > DEEPEST or self._left <= 0:
            return
        if isinstance(value, nn.Module):
            self._found.append(value)
        elif isinstance(value, type):
            self._keep_class(value)
        elif isinstance(value, (list, dict, set, deque, tuple)):
            self._keep_container(value, depth)
        elif isinstance(value, (Tensor, np.ndarray)):
            self._keep_array(value)
        elif isinstance(value, (FunctionType, MethodType, CellType)):
            self._keep_function(value, depth)
        elif (undo := random_stream(value)) is not None:
            self._note(value)
            self._undo.append(undo)
        elif hasattr(value, "__dict__") and not _is_of_a_library(value) and self.is_users(value):
            if not _runs_by_itself(value):
                self.keep_attributes(value, depth)

    def _keep_class(self, value: type) -> None:
        if is_users_code(value):
            self._note(value)
            self.add(shared_by_class(value))

    def _keep_array(self, value: Any) -> None:
        self._note(value)
        size = value.size if isinstance(value, np.ndarray) else value.numel()
        if size > min(MOST_NUMBERS, self._numbers_left):
            return
        if isinstance(value, np.ndarray):
            if value.flags.writeable:
                self._numbers_left -= size
                same = value.copy()
                self._undo.append(lambda: np.copyto(value, same))
        elif type(value) is Tensor and not is_lazy(value.device) and _is_writable(value):
            self._numbers_left -= size
            clone = value.detach().clone()

            def undo() -> None:  # always: not every write changes the version counter
                value.data.copy_(clone)

            self._undo.append(undo)

    def _keep_container(self, value: Any, depth: int) -> None:
        self._note(value)
        if not value:
            if not isinstance(value, tuple):
                self._empty.append(value)
            return
        undo = refilling(value)
        if undo is not None:
            self._undo.append(undo)
        if len(value) <= MOST_ENTRIES:
            for each in value.values() if isinstance(value, dict) else value:
                if type(each) not in PLAIN:
                    self.keep(each, depth + 1)

    def _keep_function(self, value: Any, depth: int) -> None:
        """Record a function's attributes and closure variables, which may hold counters."""
        self._note(value)
        if isinstance(value, MethodType):
            self.keep(value.__func__, depth + 1)
            self.keep(value.__self__, depth + 1)
            return
        if isinstance(value, CellType):
            try:
                content = value.cell_contents
            except ValueError:  # not assigned yet
                return
            self._undo.append(lambda: setattr(value, "cell_contents", content))
            self.keep(content, depth + 1)
            return
        if value.__module__ is not None and value.__module__.startswith(("loopwright.", "torch.", "transformers.")):
            return
        self._undo.append(_rebinding(vars(value)))
        self._undo.extend(globals_of(value))
        self._keep_globals(value, depth)
        for each in (*vars(value).values(), *(value.__closure__ or ())):
            self.keep(each, depth + 1)

    def _keep_globals_of_classes(self, objects: Iterable[Any]) -> None:
        for kind in filter(is_users_code, {kind for each in objects for kind in type(each).__mro__}):
            for function in vars(kind).values():
                if isinstance(function, FunctionType):
                    self._keep_globals(function, 1)

    def _keep_globals(self, function: FunctionType, depth: int) -> None:
        """Record the objects in global variables that a function of the user names, such as random generators."""
        if not is_users_code(function):
            return
        before, self.is_users = self.is_users, _is_written_here
        for value in named_by(function).values():
            if not isinstance(value, ModuleType):
                self.keep(value, depth + 1)
        self.is_users = before

    def _note(self, value: Any) -> None:
        self._seen.add(id(value))
        self._held.append(value)
        self._left -= 1


def first_iterator(trainer: Any) -> str | None:
    """The name of an attribute that is an iterator whose consumed items could not be restored."""
    for name, value in vars(trainer).items():
        if name in NOT_STATE or not isinstance(value, Iterator) or copied(value) is not None:
            continue
        if isinstance(value, _BaseDataLoaderIter) or not _is_of_a_library(value):
            return name
    return None


def _loss_functions(trainer: Any) -> list[Any]:
    """The user's functions that compute a loss."""
    found = [getattr(trainer, "compute_loss_func", None), users_loss_of(innermost(getattr(trainer, "model", None)))]
    for cls in type(trainer).__mro__:
        function = vars(cls).get("compute_loss")
        if isinstance(function, FunctionType) and not cls.__module__.startswith("loopwright."):
            found.append(function)
    return [function for function in found if function is not None]


def _rebinding(attributes: dict[str, Any], without: frozenset[str] = frozenset()) -> Undo:
    before = {name: value for name, value in attributes.items() if name not in without} if without else dict(attributes)
    drawn = {
        name: copied(value)
        for name, value in before.items()
        if type(value) not in NO_ITERATORS and isinstance(value, Iterator)
    }

    def undo() -> None:
        if len(attributes) > len(before):
            for name in [name for name in attributes if name not in before and name not in without]:
                del attributes[name]
        for name, value in before.items():
            if attributes.get(name, attributes) is not value:
                attributes[name] = value
        for name, value in drawn.items():
            if value is not None:
                attributes[name] = copied(value)

    return undo


def _is_of_a_library(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in LIBRARIES


def _is_written_here(value: Any) -> bool:
    """Whether an object's class is the user's, not that of an installed package."""
    return type(value).__module__ == "types" or is_users_code(type(value))  # SimpleNamespace is of `types`


def _runs_by_itself(value: Any) -> bool:
    """Whether another thread may use an object, whose queues must not be restored."""
    own = (threading.Thread, type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event)
    return any(isinstance(each, own) for each in vars(value).values())


def _is_writable(tensor: Tensor) -> bool:
    """Whether the tensor has data, and each element its own memory location."""
    if tensor.device.type == "meta" or tensor.is_inference():
        return False
    if tensor.layout is not torch.strided:
        return True
    return all(stride or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
