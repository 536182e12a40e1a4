"""Changes of modules outside their state dict: non-persistent buffers and plain attributes.

Rotary embeddings with dynamic frequencies store the longest length so far, modules count their calls, caches grow. A
freshly built model has none of this, so a resumed run would differ without it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

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
        self._start = {name: (_stamp(value), _kept(value)) for name, value in _values(module)}
        self._hooks = {path: _hooks_in(each) for path, each in module.named_modules()}
        self._objects = {path: _objects_of(each) for path, each in module.named_modules()}
        self._weights = {name: _stamp(value) for name, value in module.state_dict(keep_vars=True).items()}

    def changed_weights(self) -> set[str]:
        """Names in the state dict that are trained, or have changed since the start."""
        own = self.module.state_dict(keep_vars=True)
        moved = {
            name
            for name, value in own.items()
            if getattr(value, "requires_grad", False) or _stamp(value) != self._weights.get(name)
        }
        return moved | (self.restored & set(own))

    def adopt(self, names: set[str]) -> None:
        """Take the present values of these attributes as those of the start: the arguments of the run set them."""
        now = {name: value for name, value in _values(self.module) if name in names}
        for name in names:
            self._start.pop(name, None)
        self._start.update({name: (_stamp(value), _kept(value)) for name, value in now.items()})

    def own_buffers(self, tell: Callable[[str], None]) -> dict[str, Any]:
        """Persistent buffers that have changed since the start, as JSON values, for a rank whose weights are not saved.

        Ranks normalize different batches, so running statistics differ between them.
        """
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        moved = {
            name: each
            for name, each in self.module.state_dict(keep_vars=True).items()
            if name in buffers and _is_plain(each) and _stamp(each) != self._weights.get(name)
        }
        size = sum(map(_size, moved.values()))
        if size > LARGEST:
            tell(
                f"the buffers of each rank change during training but, at {size / 1e6:,.1f} MB, are too large to save "
                "for each; a resumed run has those of rank 0 on all ranks"
            )
            return {}
        return {name: _encode(each) for name, each in moved.items()}

    def load_own_buffers(self, saved: dict[str, Any]) -> None:
        """The counterpart of `own_buffers`."""
        own = self.module.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, value in saved.items():
                if name in own:
                    own[name].copy_(_decode(value, own[name].device))

    def state_dict(self, tell: Callable[[str], None]) -> dict[str, Any]:
        """Values that differ from the start, as JSON values; those too large to save are reported."""
        left, found = LARGEST, {}
        now, modules = dict(_values(self.module)), dict(self.module.named_modules())
        for name, value in now.items():
            if _stamp(value) == self._start.get(name, (_ABSENT,))[0]:
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
        modules = dict(self.module.named_modules())
        for name, value in dict(_values(self.module)).items():
            stamp, first = self._start.get(name, (_ABSENT, _ABSENT))
            if name in state["values"] or _stamp(value) == stamp:
                continue
            if not (isinstance(value, bool) and self._stands_for_more(name, modules, tell)):
                _set(modules, name, first)
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


def _stamp(value: Any) -> Any:
    """A value that is equal while `value` is unchanged; for tensors, their identity and version counter."""
    if isinstance(value, Tensor):
        return "tensor", id(value), 0 if value.is_inference() else value._version
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *map(_stamp, value)
    if isinstance(value, dict):
        return "dict", *((key, _stamp(each)) for key, each in value.items())
    return type(value).__name__, repr(value)


def _kept(value: Any) -> Any:
    """A copy of nested collections; tensors are shared."""
    if isinstance(value, dict):
        return {key: _kept(each) for key, each in value.items()}
    return type(value)(map(_kept, value)) if isinstance(value, (list, tuple)) else value


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 0


def _encode(value: Any) -> Any:
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
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
