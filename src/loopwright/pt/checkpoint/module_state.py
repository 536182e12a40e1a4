"""Changes of modules outside their state dict: non-persistent buffers and plain attributes.

Rotary embeddings with dynamic frequencies store the longest length so far, modules count their calls, caches grow. A
freshly built model has none of this, so a resumed run would differ without it.

Changes are found by content: batch norm and writes through `.data` do not change the version counter of a tensor.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...speed.device.prefetch import leaves
from ..devices import is_lazy
from ..tensor_hashes import hashes, is_plain
from .weights import is_adapter

LARGEST = 1 << 24
"""Most bytes of tensors that are saved; larger ones are reported."""
MOST_ENTRIES = 1000
_OWN = {*nn.Module().__dict__, "training", "gradient_checkpointing"}
"""Attributes that every module has, and those set by the arguments of a run."""
_ABSENT = object()


class ModuleState:
    """The modules of a model at the start, to find out what training has changed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.restored: set[str] = set()
        """Names of weights loaded from a checkpoint: they differ from those of a freshly built model."""
        self._start = self._stamps()
        self._first = self._copies(dict(_values(module)))
        self._hooks = {path: _hooks_in(each) for path, each in module.named_modules()}
        self._objects = {path: _objects_of(each) for path, each in module.named_modules()}
        self._weights = _weight_stamps(module) if is_adapter(module) else {}
        self.start_flags()

    def _stamps(self) -> dict[str, Any]:
        values = {name: each for name, each in _values(self.module) if _size(each) <= LARGEST}
        large = {name: each for name, each in _values(self.module) if name not in values}
        saved = self._saved_memory()
        return {**_stamps(values, saved), **{name: _stamp(each, {}, saved) for name, each in large.items()}}

    def _saved_memory(self) -> frozenset[int]:
        return _memory(self.module.state_dict(keep_vars=True).values())

    def _copies(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Copies of values; names of one tensor are names of one copy. Views of weights are shared."""
        made: dict[int, Tensor] = {}
        saved = self._saved_memory()
        return {name: _copy(value, made, saved) for name, value in values.items()}

    def changed_weights(self) -> set[str]:
        """Names in the state dict of an adapter that are trained, or have changed since the start."""
        own, stamps = self.module.state_dict(keep_vars=True), _weight_stamps(self.module)
        live = _live_names(self.module)
        moved = {
            name
            for name, value in own.items()
            if getattr(value, "requires_grad", False) or stamps[name] != self._weights.get(name)
        }
        return (moved & live) | (self.restored & set(own))

    def start_flags(self) -> None:
        """Record which parameters are trained when a run starts."""
        self._trained = {name: each.requires_grad for name, each in self.module.named_parameters()}

    def changed_flags(self) -> dict[str, bool]:
        """Parameters that were frozen or unfrozen since the run started, and whether they are trained now."""
        now = {name: each.requires_grad for name, each in self.module.named_parameters()}
        return {name: flag for name, flag in now.items() if self._trained.get(name, flag) != flag}

    def load_flags(self, saved: dict[str, bool]) -> None:
        """The counterpart of `changed_flags`."""
        for name, each in self.module.named_parameters():
            if name in saved:
                each.requires_grad_(saved[name])

    def adopt(self, names: set[str]) -> None:
        """Take the present values of these attributes as those of the start: the arguments of the run set them."""
        now = {name: value for name, value in _values(self.module) if name in names}
        stamps, copies = self._stamps(), self._copies(now)
        for name in names:
            self._start.pop(name, None)
            self._first.pop(name, None)
        self._start.update({name: stamps[name] for name in now})
        self._first.update(copies)

    def buffer_hashes(self) -> dict[str, str]:
        """A hash of each persistent buffer."""
        return hashes(self._persistent_buffers())

    def own_buffers(self, of_first: Mapping[str, str], tell: Callable[[str], None]) -> dict[str, Any]:
        """Persistent buffers that differ from those of rank 0, which are among the weights, as JSON values.

        Ranks normalize different batches, so running statistics differ between them. `of_first` are the hashes of
        those of rank 0.
        """
        buffers, own = self._persistent_buffers(), self.buffer_hashes()
        differing = {name: each for name, each in buffers.items() if own[name] != of_first.get(name)}
        size = sum(map(_size, differing.values()))
        if size > LARGEST:
            tell(
                f"the buffers of each rank change during training but, at {size / 1e6:,.1f} MB, are too large to save "
                "for each; a resumed run has those of rank 0 on all ranks"
            )
            return {}
        return {name: _encode(each) for name, each in differing.items()}

    def _persistent_buffers(self) -> dict[str, Tensor]:
        names = {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        state = self.module.state_dict(keep_vars=True)
        return {name: each for name, each in state.items() if name in names and is_plain(each)}

    def load_own_buffers(self, saved: dict[str, Any]) -> None:
        """The counterpart of `own_buffers`."""
        own = self._persistent_buffers()
        with torch.no_grad():
            for name, value in saved.items():
                if name not in own:
                    raise ValueError(f"this model has no buffer {name}")
                tensor = _decode(value, own[name].device)
                if not isinstance(tensor, Tensor) or tensor.shape != own[name].shape:
                    raise ValueError(f"{name} is not a tensor of shape {tuple(own[name].shape)}")
                own[name].copy_(tensor)

    def state_dict(self, tell: Callable[[str], None]) -> dict[str, Any]:
        """Values that differ from the start, as JSON values; those too large to save are reported."""
        left, found = LARGEST, {}
        now, modules, stamps = dict(_values(self.module)), dict(self.module.named_modules()), self._stamps()
        for name, value in now.items():
            if stamps[name] == self._start.get(name):
                continue
            if isinstance(value, bool) and self._stands_for_more(name, modules, tell):
                continue
            size = _size(value)
            if size > left:
                tell(
                    f"{name} changes during training but, at {size / 1e6:,.1f} MB, is too large to save outside the "
                    "state dict; a resumed run starts without it. Register it as a persistent buffer to save it"
                )
                continue
            left -= size
            found[name] = _encode(value)
        gone = [name for name in self._start if name not in now]
        return {"values": found, "gone": gone}

    def _stands_for_more(self, name: str, modules: dict[str, nn.Module], tell: Callable[[str], None]) -> bool:
        """Whether a flag records the creation of something a checkpoint cannot hold: hooks or objects."""
        path = name.rpartition(".")[0]
        if _hooks_in(modules[path]) != self._hooks.get(path):
            return True  # the hooks are installed again when needed, if the flag is unset
        made = _objects_of(modules[path]) - self._objects.get(path, set())
        if made:
            tell(
                f"{name} was set during training together with {', '.join(sorted(made))}, which cannot be saved in a "
                "checkpoint; a resumed run starts without both"
            )
        return bool(made)

    def load_state_dict(self, state: dict[str, Any], tell: Callable[[str], None]) -> None:
        """Reset to the values at the start, then load the saved ones."""
        modules, stamps, first = dict(self.module.named_modules()), self._stamps(), self._copies(self._first)
        for name, value in dict(_values(self.module)).items():
            if name in state["values"] or stamps[name] == self._start.get(name):
                continue
            if not (isinstance(value, bool) and self._stands_for_more(name, modules, tell)):
                _set(modules, name, first.get(name, _ABSENT))
        for name, saved in state["values"].items():
            if name.rpartition(".")[0] not in modules:
                tell(f"the checkpoint has {name}, but this model has no such module; it is ignored")
                continue
            _set(modules, name, _decode(saved, _device_of(self.module)))
        for name in state["gone"]:
            if name.rpartition(".")[0] in modules:
                _set(modules, name, _ABSENT)


def _values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Non-persistent buffers and plain attributes of all modules, by full name."""
    for path, each in module.named_modules():
        prefix = f"{path}." if path else "."
        for name in each._non_persistent_buffers_set:
            if each._buffers.get(name) is not None:
                yield prefix + name, each._buffers[name]
        for name, value in each.__dict__.items():
            if name not in _OWN and _is_plain(value):
                yield prefix + name, value


def _is_plain(value: Any) -> bool:
    """Whether a value is data: a number, a string, a tensor without grad, or a small collection of these."""
    if isinstance(value, Tensor):
        usual = type(value) is Tensor and value.layout is torch.strided and not value.is_meta
        return usual and not value.requires_grad
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) in (list, tuple):
        return len(value) <= MOST_ENTRIES and all(map(_is_plain, value))
    if type(value) is dict:
        return len(value) <= MOST_ENTRIES and all(type(key) in (str, int) and _is_plain(v) for key, v in value.items())
    return False


def _hooks_in(module: nn.Module) -> int:
    """Number of hooks of a module and its submodules."""
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules())


def _objects_of(module: nn.Module) -> set[str]:
    """Attributes that are neither plain data nor in `_OWN`."""
    return {name for name, value in module.__dict__.items() if name not in _OWN and not _is_plain(value)}


def _live_names(module: nn.Module) -> set[str]:
    """Names of parameters and buffers. A state dict may hold more, such as a description of quantized weights."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {name for each in (parameters, module.named_buffers(remove_duplicate=False)) for name, _ in each}


def _weight_stamps(module: nn.Module) -> dict[str, Any]:
    return _stamps(module.state_dict(keep_vars=True), frozenset())


def _stamps(values: Mapping[str, Any], saved: frozenset[int]) -> dict[str, Any]:
    """For each value one that is equal while its content is the same; `saved` is the memory of the state dict."""
    tensors = {str(id(each)): each for value in values.values() for each in leaves(value) if is_plain(each)}
    found = hashes(tensors)
    return {name: _stamp(value, found, saved) for name, value in values.items()}


def _stamp(value: Any, found: Mapping[str, str], saved: frozenset[int]) -> Any:
    if isinstance(value, Tensor):
        return _tensor_stamp(value, found.get(str(id(value))), saved)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *(_stamp(each, found, saved) for each in value)
    if isinstance(value, dict):
        return "dict", *((key, _stamp(each, found, saved)) for key, each in value.items())
    return type(value).__name__, repr(value)


def _tensor_stamp(tensor: Tensor, content: str | None, saved: frozenset[int]) -> tuple[Any, ...]:
    place = _memory([tensor])
    if place & saved:  # a view of a weight, whose content is saved with it
        return "view", *place, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    if content is None:
        return "tensor", id(tensor), 0 if tensor.is_inference() else tensor._version
    return "tensor", tuple(tensor.shape), tensor.dtype, content


def _memory(values: Iterable[Any]) -> frozenset[int]:
    """The addresses of the memory of tensors, as far as there are any."""
    plain = [each for each in values if is_plain(each) and not is_lazy(each.device)]
    return frozenset(each.untyped_storage().data_ptr() for each in plain) - {0}


def _copy(value: Any, made: dict[int, Tensor], saved: frozenset[int]) -> Any:
    """A copy; of tensors too large to save, and of views of what is saved elsewhere, the value itself."""
    if isinstance(value, Tensor):
        if _size(value) > LARGEST or not is_plain(value) or _memory([value]) & saved:
            return value
        # A clone on a lazy device would become part of the next graph.
        copied = value.detach().cpu().to(value.device) if is_lazy(value.device) else value.detach().clone()
        return made.setdefault(id(value), copied)
    if isinstance(value, dict):
        return {key: _copy(each, made, saved) for key, each in value.items()}
    return type(value)(_copy(each, made, saved) for each in value) if isinstance(value, (list, tuple)) else value


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 0


def _encode(value: Any) -> Any:
    if isinstance(value, Tensor):
        on_host = value.detach().cpu().resolve_conj().resolve_neg()
        content = on_host.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        device = "cpu" if value.device.type == "cpu" else "device"
        text = base64.b64encode(content).decode()
        return {"tensor": text, "dtype": dtype, "shape": list(value.shape), "on": device}
    if isinstance(value, tuple):
        return {"tuple": [_encode(each) for each in value]}
    if isinstance(value, list):
        return [_encode(each) for each in value]
    if isinstance(value, dict):
        return {"dict": [[key, _encode(each)] for key, each in value.items()]}
    return {"number": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _decode(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_decode(each, device) for each in value]
    if not isinstance(value, dict):
        return value
    if "number" in value:
        return float(value["number"])
    if "tuple" in value:
        return tuple(_decode(each, device) for each in value["tuple"])
    if "dict" in value:
        return {key: _decode(each, device) for key, each in value["dict"]}
    content = bytearray(base64.b64decode(value["tensor"]))
    dtype = getattr(torch, value["dtype"])
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(value["shape"]).clone()
    return tensor if value["on"] == "cpu" else tensor.to(device)


def _set(modules: dict[str, nn.Module], name: str, value: Any) -> None:
    """Set a value on a module. Tensors are replaced, not written to: other names may refer to the old one."""
    path, _, leaf = name.rpartition(".")
    module = modules[path]
    if leaf in module._buffers:
        module._buffers[leaf] = None if value is _ABSENT else value
    elif value is _ABSENT:
        module.__dict__.pop(leaf, None)
    elif isinstance(value, Tensor) and leaf not in module.__dict__ and hasattr(module, leaf):
        module.register_buffer(leaf, value, persistent=False)
    else:
        object.__setattr__(module, leaf, value)


def _device_of(module: nn.Module) -> torch.device:
    first = next(iter(module.parameters()), None)
    return torch.device("cpu") if first is None else first.device
