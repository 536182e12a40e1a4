"""What a plan assumes about a model and its training, in a form that is cheap to compare at every update."""

from __future__ import annotations

import functools
import hashlib
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
PLAIN = (bool, int, float, str, type(None))
DICTS = (dict, OrderedDict)
FEW = 64
"""Longest sequence of plain values on a module that is compared."""
HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
)  # fmt: skip
FORWARD = "forward"
NOT_OURS = ("_compiled_call_impl", FORWARD)
"""Attributes of modules that accelerations set and remove; a `forward` that the user has set is read by other means."""
OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module, which a forward does not change, or which are read by other means."""
UNREADABLE = (LookupError, RuntimeError, ValueError, TypeError)
"""Errors of values that were removed, or became tensors."""
DEEPEST = 3
"""Levels of containers and objects on a module whose contents are compared."""
LIBRARIES = ("torch", "transformers", "loopwright", "numpy", "peft", "builtins")
_FORWARD = operator.attrgetter(FORWARD)
_GRADIENTS = operator.attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
AROUND = "the optimizer, the loss, the accumulation or the parameters"
BUFFER = "a buffer"
GRADIENT = "requires_grad of "
ATTENTION = "_attn_implementation_internal"


def plain(value: Any) -> Any:
    """A value that can be compared: number, text, function, short sequence of numbers; `...` for anything else."""
    kind = type(value)
    if kind in PLAIN or isinstance(value, PLAIN):
        return value
    if kind in DICTS:
        return ...
    if isinstance(value, FUNCTIONS):
        return f"function {id(value)}"
    if isinstance(value, (list, tuple, deque)) and len(value) <= FEW and all(isinstance(each, PLAIN) for each in value):
        return tuple(value)
    return ...


def configs_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The configurations that the modules of a model read in forward, each once."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        config = module.__dict__.get("config")
        if config is not None and hasattr(config, "__dict__") and id(config) not in seen:
            seen.add(id(config))
            yield f"{name}.config" if name else "config", config


class ModelStamp:
    """Modes, plain numbers, functions, hooks, buffers and trainable parameters of a model, and objects around it.

    Call `settle` after each update and `changes` before the next one, to detect changes made by callbacks. The values
    to compare are located once and only read afterwards.
    """

    def __init__(self, model: nn.Module, around: Callable[[], tuple[Any, ...]] = tuple) -> None:
        self._model, self._around = model, around
        self._take()

    def _take(self) -> None:
        self._modules = [(name, module.__dict__) for name, module in self._model.named_modules()]
        self._configs = [(name, config.__dict__) for name, config in configs_of(self._model)]
        places = [place for _, place in self._modules]
        self._instances = list(self._model.modules())
        self._classes = list(dict.fromkeys(map(type, self._instances)))
        own = [(place, key) for place in places for key in place if key not in NOT_OURS]
        self._parameters = list(self._model.named_parameters())
        self._tensors = [parameter for _, parameter in self._parameters]
        self._hook_dicts = [place[key] for place in places for key in HOOKS if key in place]
        self._hook_dicts += [hooks for parameter in self._tensors for hooks in hooks_of(parameter)]
        numbers = [(place, key) for place, key in own if isinstance(place[key], PLAIN)]
        numbers += [(place, key) for _, place in self._configs for key in place if _counts(key, place[key])]
        self._held = [held for name, place in self._modules for held in _held_by(name, place)]
        self._held += _set_on_classes(self._classes)
        numbers += [(place, key) for _, place in self._held for key, _ in _plain_in(place)]
        self._numbers = ([place for place, _ in numbers], [key for _, key in numbers])
        held = [place for _, place in self._held]
        self._dicts = [*places, *(place for _, place in self._configs), *held, *self._hook_dicts]
        self._others = [
            (place, key) for place, key in own if not isinstance(place[key], PLAIN) and plain(place[key]) is not ...
        ]
        self._buffers = [(place["_buffers"], key) for place in places for key in place["_buffers"]]
        self._objects = self._around()
        self._known = self._named()
        self._read = self._readings()

    def settle(self) -> None:
        """Store the current values, so that changes made by the update itself are not reported."""
        try:
            self._read = self._readings()
        except UNREADABLE:
            self._take()

    def _readings(self) -> tuple[Any, ...]:
        return (
            # `map` with C functions: a model of ordinary size has thousands of these values.
            list(map(operator.getitem, *self._numbers)),
            [plain(place[key]) for place, key in self._others],
            list(map(len, self._dicts)),
            list(map(_GRADIENTS, self._tensors)),
            self._code(),
            [None if place[key] is None else (id(place[key]), place[key]._version) for place, key in self._buffers],
        )

    def _code(self) -> tuple[list[type], list[Any], list[int | None]]:
        """What modules compute: their classes, the functions of these, and functions that a user set on modules."""
        set_on = [_id_of_users(place[FORWARD]) if FORWARD in place else None for _, place in self._modules]
        return list(map(type, self._instances)), list(map(_FORWARD, self._classes)), set_on

    def changes(self) -> list[str]:
        """Names of everything that has changed since the last call of `settle`; usually empty."""
        objects, before = self._around(), self._read
        found = [AROUND] if any(a is not b and a != b for a, b in zip(objects, self._objects, strict=True)) else []
        try:
            if not found and self._readings() == before:
                return []
        except UNREADABLE:  # an attribute was removed, or a number became a tensor
            pass
        known = self._known
        self._take()
        found += [key for key in {**known, **self._known} if _differ(known, self._known, key)]
        return found or ([BUFFER] if self._read[-1] != before[-1] else [])

    def _named(self) -> dict[str, Any]:
        """All compared values that have a name, by name."""
        found = {
            f"{name}.{key}".lstrip("."): kept
            for name, place in self._modules
            for key, value in place.items()
            if key not in NOT_OURS and (kept := plain(value)) is not ...
        }
        for name, place in self._held:
            found.update((f"{name}[{key!r}]", value) for key, value in _plain_in(place))
        for name, place in self._configs:
            found.update((f"{name}.{key}", value) for key, value in place.items() if _counts(key, value))
        kinds, functions, set_on = self._code()
        for (name, _), kind, function in zip(self._modules, kinds, set_on, strict=True):
            found[f"the class of {name or 'the model'}"] = id(kind)
            found[f"{name}.{FORWARD}".lstrip(".")] = function
        for kind, function in zip(self._classes, functions, strict=True):
            found[f"{kind.__module__}.{kind.__qualname__}.{FORWARD}"] = id(function)
        found["hooks"] = [id(hook) for hooks in self._hook_dicts for hook in hooks.values() if is_foreign(hook)]
        found.update((f"{GRADIENT}{name}", each.requires_grad) for name, each in self._parameters)
        return found


def besides(changes: Iterable[str], harmless: Collection[str]) -> list[str]:
    """The changes that a stamp has found, without these and without those of `requires_grad`."""
    return [each for each in changes if each not in harmless and not each.startswith(GRADIENT)]


def _held_by(name: str, place: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The dicts and lists of a module, also those in others, by name."""
    for key, value in place.items():
        if key not in OF_MODULES and plain(value) is ...:
            yield from _containers(f"{name}.{key}".lstrip("."), value)


def _set_on_classes(classes: Iterable[type]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What classes of the user hold, by name; those of libraries are not changed."""
    for kind in dict.fromkeys(each for one in classes for each in one.__mro__):
        if str(kind.__module__).partition(".")[0] not in LIBRARIES:
            yield f"{kind.__module__}.{kind.__qualname__}", vars(kind)


def _containers(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth < DEEPEST and isinstance(value, (dict, list, tuple)):
        yield name, value
        for key, each in _items(value):
            yield from _containers(f"{name}[{key!r}]", each, depth + 1)


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(islice(value.items() if isinstance(value, Mapping) else enumerate(value), FEW))


def _plain_in(value: Any) -> list[tuple[Any, Any]]:
    return [(key, each) for key, each in _items(value) if isinstance(each, PLAIN)]


def plain_settings(model: nn.Module) -> str:
    """A digest of what modules and configurations have besides weights, such as dropout rates; modes do not count."""
    places = [(name, module.__dict__) for name, module in model.named_modules()]
    places += [(name, module._buffers) for name, module in model.named_modules()]
    places += [(name, config.__dict__) for name, config in configs_of(model)]
    found = [
        (name, key, described(value))
        for name, place in places
        for key, value in place.items()
        if key not in OF_MODULES and key not in NOT_OURS
    ]
    frozen = [(name, weight) for name, weight in model.named_parameters() if not weight.requires_grad]
    found += [("frozen", name, described(weight.data)) for name, weight in frozen]
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()


def described(value: Any, depth: int = 0) -> str:
    """A text that is the same in another process: of plain values and short tensors their contents, of containers and
    objects of the user what they hold, of anything else its class."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        shows = value.numel() <= FEW and type(value) in (Tensor, nn.Parameter) and value.device.type != "meta"
        return f"{tuple(value.shape)} {value.dtype} {value.tolist() if shows else ''}"
    if isinstance(value, FUNCTIONS) or isinstance(value, type):
        return _name_of(value)
    if depth < DEEPEST and isinstance(value, Mapping):
        return _joined(value, (f"{key}: {described(each, depth + 1)}" for key, each in islice(value.items(), FEW)))
    if depth < DEEPEST and isinstance(value, (set, frozenset)):
        return _joined(value, sorted(described(each, depth + 1) for each in value)[:FEW])
    if depth < DEEPEST and isinstance(value, (list, tuple, deque)):
        return _joined(value, (described(each, depth + 1) for each in islice(value, FEW)))
    kind = type(value).__name__
    if depth < DEEPEST and hasattr(value, "__dict__") and not _is_of_a_library(value):
        return f"{kind} {described(dict(vars(value)), depth + 1)}"
    return kind


def _joined(values: Sized, texts: Iterable[str]) -> str:
    return f"{len(values)} [{', '.join(texts)}]"


def _id_of_users(function: Any) -> int | None:
    """Identifies a function that was set on a module; None if an acceleration has set it."""
    is_ours = str(getattr(function, "__module__", "")).startswith("loopwright.")
    return None if is_ours else id(function)


def _counts(key: str, value: Any) -> bool:
    """Whether a value of a configuration may affect results: numbers, and the name of the attention."""
    return isinstance(value, (bool, int, float)) or key == ATTENTION


def hooks_of(parameter: Tensor) -> list[dict[Any, Any]]:
    """The hooks that get a parameter's gradient, in each backward pass or after it was added."""
    found = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return [hooks for hooks in found if hooks is not None]


def is_foreign(hook: Any) -> bool:
    """Whether a hook belongs to the user: not to loopwright, transformers or torch."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return not home.startswith(("loopwright.", "transformers.", "torch."))


def _differ(before: Mapping[str, Any], now: Mapping[str, Any], key: str) -> bool:
    a, b = before.get(key, ...), now.get(key, ...)
    return a is not b and (type(a) is not type(b) or a != b)


# ---- state changed by a forward -------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything a forward may change: buffers, tensors and plain values on modules and configurations."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key not in OF_MODULES:
                _add_state(found, f"{name}.{key}", value)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                found[f"{name}.{key}"] = buffer.detach().clone()
    for name, config in configs_of(model):
        values = {f"{name}.{key}": plain(value) for key, value in config.__dict__.items() if key != ATTENTION}
        found.update((key, value) for key, value in values.items() if value is not ...)
    return found


def _add_state(found: dict[str, Any], name: str, value: Any, depth: int = 0) -> None:
    """Add a value under its name; of containers and objects of the user, their size and contents."""
    if isinstance(value, Tensor):
        found[name] = value.detach().clone()
    elif (kept := plain(value)) is not ...:
        found[name] = kept
    elif depth < DEEPEST and isinstance(value, (dict, list, tuple, set, deque)):
        found[f"the length of {name.lstrip('.')}"] = len(value)
        for key, each in islice(value.items() if isinstance(value, dict) else enumerate(value), FEW):
            _add_state(found, f"{name}[{key!r}]", each, depth + 1)
    elif depth < DEEPEST and hasattr(value, "__dict__") and not _is_of_a_library(value):
        for key, each in islice(vars(value).items(), FEW):
            _add_state(found, f"{name}.{key}", each, depth + 1)


def _is_of_a_library(value: Any) -> bool:
    home = type(value).__module__.partition(".")[0]
    return isinstance(value, (nn.Module, type)) or home in LIBRARIES or callable(value)


def left_differently(
    one: tuple[Mapping[str, Any], ...], other: tuple[Mapping[str, Any], ...], tolerance: float
) -> str | None:
    """Name of the first value that two runs, each given as (before, after), changed differently; None if equal."""
    for name in {**one[1], **other[1]}:
        changed = [not _same(before.get(name), after.get(name), 0.0) for before, after in (one, other)]
        a, b = one[1].get(name), other[1].get(name)
        if any(changed) and not _same(a, b, tolerance) and not _is_longer_cache(a, b):
            return name.strip(".")
    return None


def counted_by(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Name of the first plain number that a forward has changed, so that results depend on the number of forwards."""
    for name, value in after.items():
        was = before.get(name)
        if type(value) in (int, float) and type(was) is type(value) and value != was:
            return name.strip(".")
    return None


def _same(a: Any, b: Any, tolerance: float) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and not isinstance(a, Tensor) and a == b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    if not tolerance or not a.is_floating_point() or not a.numel():
        return False
    return bool((a - b).abs().max() <= tolerance * a.abs().max().clamp_min(1e-6))


def _is_longer_cache(a: Any, b: Any) -> bool:
    """Whether one tensor is a prefix of the other: position tables grow with the longest row."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dim() != b.dim() or a.dtype != b.dtype:
        return False
    unequal = [dim for dim in range(a.dim()) if a.shape[dim] != b.shape[dim]]
    if len(unequal) != 1:
        return False
    size = min(a.shape[unequal[0]], b.shape[unequal[0]])
    same: bool = size > 1 and torch.equal(a.narrow(unequal[0], 0, size), b.narrow(unequal[0], 0, size))
    return same


# ---- identity of code -----------------------------------------------------------------------------------------------


def fingerprint(thing: Any) -> str:
    """Describes a function, class or object by a text that changes with its code and the plain values bound to it."""
    if thing is None:
        return ""
    thing = getattr(thing, "__wrapped__", thing)
    if isinstance(thing, functools.partial):
        bound = [repr(plain(each)) for each in (*thing.args, *thing.keywords.values())]
        return f"partial {fingerprint(thing.func)} {' '.join(bound)}"
    function = getattr(thing, "__func__", thing)
    if hasattr(function, "__code__"):
        return f"{_name_of(function)} {_code_of(function)}"
    kind = thing if isinstance(thing, type) else type(thing)
    call = getattr(kind, "forward" if issubclass(kind, nn.Module) else "__call__", None)
    values = {} if isinstance(thing, (type, nn.Module)) else getattr(thing, "__dict__", {})
    own = sorted(f"{key}={plain(value)!r}" for key, value in values.items() if plain(value) is not ...)
    code = _code_of(call) if call is not None and hasattr(call, "__code__") else ""
    return " ".join([_name_of(kind), code, *own]).strip()


def _name_of(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__name__)}"


def _code_of(function: Callable[..., Any]) -> str:
    digest = hashlib.sha256()
    _add_code(digest, function.__code__)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            digest.update(repr(plain(cell.cell_contents)).encode())
        except ValueError:  # a variable that is not bound yet
            continue
    digest.update(repr([plain(each) for each in getattr(function, "__defaults__", None) or ()]).encode())
    return digest.hexdigest()[:12]


def _add_code(digest: Any, code: Any) -> None:
    digest.update(code.co_code)
    digest.update(repr(code.co_names).encode())
    for constant in code.co_consts:
        if hasattr(constant, "co_code"):
            _add_code(digest, constant)
        else:  # the order of a set differs between processes
            digest.update(repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant).encode())
