"""Values of an optimizer's state as JSON values, with the names of tensors in place of these.

Some optimizers keep more than numbers and tensors: GaLore and APOLLO keep projector objects, torchao tensors of its own
classes, GrokAdamW a mapping by parameter. These are saved as data too. An object is made again only from a class of the
optimizer's own package that is imported already and has no finalizer: a file never chooses which code runs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...core.checkpoint.schema import DEEPEST, LARGEST, label, restoring, shown
from ...errors import CheckpointError

_KEYS = (str, bool, int, float, type(None))
_NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32")
"""Kinds of numpy's numbers that are saved with their kind, since it decides how they are rounded."""


class Owner(NamedTuple):
    """Whose values these are: how errors name them, the package of its classes, and the parameters by name."""

    whose: str = "the optimizer's "
    package: str = ""
    parameters: Mapping[str, nn.Parameter] = {}


def owner_of(optimizer: Any, names: Mapping[int, str]) -> Owner:
    """The owner of the values in an optimizer's state; `names` are those of its parameters by their index."""
    package = type(optimizer).__module__.partition(".")[0]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_name = {names[index]: parameter for index, parameter in enumerate(parameters)}
    return Owner(package="" if package == "torch" else package, parameters=by_name)


PLAIN = Owner()
"""Of values that hold numbers, texts and tensors only."""


# ---- saving ----------------------------------------------------------------------------------------------------------


def encode_value(value: Any, key: str, tensors: dict[str, Tensor], owner: Owner = PLAIN) -> Any:
    """A value as JSON values; its tensors are added to `tensors`, by the names of their places."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if _is_object(value, owner):
        return _encode_object(value, key, tensors, owner)
    if isinstance(value, Tensor):
        tensors[key] = value
        order = _order(value) if owner.package else None
        return {"tensor": key} if order is None else {"tensor": key, "order": order}
    if isinstance(value, np.generic) and value.dtype.name in _NUMBERS:
        return {"numpy": value.dtype.name, "value": value.item()}
    if key.count("/") > DEEPEST:
        raise CheckpointError(f"{owner.whose}{key[:100]} ... has more than {DEEPEST} levels, or contains itself")
    if isinstance(value, (list, tuple)):
        parts = [encode_value(each, f"{key}/{i}", tensors, owner) for i, each in enumerate(value)]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    if isinstance(value, Mapping):
        return _encode_mapping(value, key, tensors, owner)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise _refused(f"{owner.whose}{key}", value)


def _order(tensor: Tensor) -> list[int] | None:
    """The order of the dimensions in memory, if it is not the usual one: last bits of products depend on it."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    order = sorted(range(tensor.ndim), key=lambda each: -tensor.stride(each))
    return None if order == list(range(tensor.ndim)) else order


def _encode_mapping(value: Mapping[Any, Any], key: str, tensors: dict[str, Tensor], owner: Owner) -> dict[str, Any]:
    kind = "parameters" if value and all(isinstance(each, nn.Parameter) for each in value) else "dict"
    names = {id(parameter): name for name, parameter in owner.parameters.items()} if kind == "parameters" else {}
    pairs = []
    for own, each in value.items():
        name = names.get(id(own)) if kind == "parameters" else own
        if not isinstance(name, _KEYS) or (kind == "parameters" and name is None):
            raise _refused(f"a key of {owner.whose}{key}", own)
        pairs.append([name, encode_value(each, f"{key}/{name}", tensors, owner)])
    return {kind: pairs}


def _is_object(value: Any, owner: Owner) -> bool:
    return bool(owner.package) and _is_data_class(type(value), owner.package)


def _is_data_class(kind: type, package: str) -> bool:
    """Whether objects of a class can be made again from their attributes without running code of a file's choice."""
    if kind.__module__.partition(".")[0] != package or hasattr(kind, "__del__"):
        return False
    if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind:
        return False  # could not be found again by its name
    if issubclass(kind, Tensor):
        return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
    return kind.__new__ is object.__new__ and hasattr(kind, "__dict__")


def _encode_object(value: Any, key: str, tensors: dict[str, Tensor], owner: Owner) -> dict[str, Any]:
    if isinstance(value, Tensor):
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        attributes, extra = {name: getattr(value, name) for name in names}, {"context": context}
    else:
        attributes, extra = vars(value), {}
    held: dict[str, Tensor] = {}
    pairs = _encode_mapping(attributes, key, held, owner)["dict"]
    tensors.update(held)
    return {
        "object": f"{type(value).__module__}.{type(value).__name__}",
        "on": "cpu" if all(each.device.type == "cpu" for each in held.values()) else "device",
        "dict": pairs,
        **{name: encode_value(each, f"{key}/{name}", {}, owner) for name, each in extra.items()},
    }


def _refused(what: str, value: Any) -> CheckpointError:
    return CheckpointError(f"{what} is a {type(value).__name__}, which cannot be saved without pickle")


# ---- loading ---------------------------------------------------------------------------------------------------------


def decode_value(
    value: Any, tensors: Mapping[str, Tensor], owner: Owner = PLAIN, device: torch.device | None = None
) -> Any:
    """A value of a described state, with its tensors; `device` is that of the parameter it belongs to."""
    if isinstance(value, list):
        return [decode_value(each, tensors, owner, device) for each in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        found = tensors[value["tensor"]]
        return found if "order" not in value else _in_order(found, value["order"])
    if "tuple" in value:
        return tuple(decode_value(each, tensors, owner, device) for each in value["tuple"])
    if "dtype" in value:
        return _dtype(value["dtype"])
    if "numpy" in value:
        return _numpy_number(value["numpy"], value["value"])
    if "parameters" in value:
        pairs = value["parameters"]
        return {owner.parameters[name]: decode_value(each, tensors, owner, device) for name, each in pairs}
    pairs = {name: decode_value(each, tensors, owner, device) for name, each in value["dict"]}
    return _made(value, pairs, owner, device) if "object" in value else pairs


def _numpy_number(name: Any, value: Any) -> Any:
    if name not in _NUMBERS or not isinstance(value, (bool, int, float)):
        raise ValueError(f"numpy is {shown(name)} with the value {shown(value)}, expected a number")
    return np.dtype(name).type(value)


def _in_order(tensor: Tensor, order: list[int]) -> Tensor:
    """A tensor with its dimensions in this order in memory."""
    back = [order.index(each) for each in range(tensor.ndim)]
    return tensor.permute(order).contiguous().permute(back)


def _made(value: dict[str, Any], attributes: dict[str, Any], owner: Owner, device: torch.device | None) -> Any:
    kind = _class(value["object"], owner)
    if value["on"] == "device" and device is not None:
        attributes = {name: _moved(each, device) for name, each in attributes.items()}
    if issubclass(kind, Tensor):
        return kind.__tensor_unflatten__(attributes, decode_value(value["context"], {}), None, None)  # type: ignore[attr-defined]
    made: Any = object.__new__(kind)
    made.__dict__.update(attributes)
    return made


def _class(name: Any, owner: Owner) -> type:
    """A class of the owner's package by its full name; nothing is imported."""
    module, _, own = str(name).rpartition(".")
    found = getattr(sys.modules.get(module), own, None)
    if not owner.package or not isinstance(found, type) or not _is_data_class(found, owner.package):
        raise CheckpointError(
            f"the optimizer's state holds an object of {shown(name)}, which this optimizer does not have. Resume with "
            "the optimizer that saved it, or start a new run from the weights"
        )
    return found


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return type(value)(_moved(each, device) for each in value) if isinstance(value, (list, tuple)) else value


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"the optimizer's state names the number format {shown(name)}, which torch does not have")
    return found


# ---- checking --------------------------------------------------------------------------------------------------------


def tensors_in(value: Any, key: str, path: Path) -> Iterator[str]:
    """The tensors that a described value refers to; each has the name of its place."""
    if isinstance(value, dict) and "tensor" in value:
        if value["tensor"] != key:
            found = shown(value["tensor"])
            raise CheckpointError(f"{label(path)}: {key} refers to the tensor {found}; the file was changed")
        yield key
    elif isinstance(value, dict) and "numpy" in value:
        yield from tensors_in(value.get("value"), key, path)
    elif isinstance(value, dict) and "dtype" not in value:
        with restoring(path, key):
            pairs = _pairs(value)
        for name, one in pairs:
            yield from tensors_in(one, f"{key}/{name}", path)
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from tensors_in(one, f"{key}/{index}", path)
    elif isinstance(value, (int, float)) and (value != value or LARGEST < abs(value) < math.inf):
        raise CheckpointError(f"{label(path)}: {key} is {shown(value)}, expected a finite number; the file was changed")


def _pairs(value: dict[str, Any]) -> list[tuple[Any, Any]]:
    if "tuple" in value:
        return list(enumerate(value["tuple"]))
    return [(name, one) for name, one in value["parameters" if "parameters" in value else "dict"]]


def check_plain(described: Mapping[str, Any]) -> None:
    """Raise if the state in optimizer.json holds more than numbers and tensors, which no other format can restore."""
    named = [*described["state"].values(), described["extra"], *(group["options"] for group in described["groups"])]
    found = next(_unusual([value for values in named for value in values.values()]), None)
    if found is not None:
        raise CheckpointError(
            f"the optimizer's state holds {found}, which a checkpoint in the format of transformers cannot restore; "
            "use checkpoint_format='native'"
        )


def _unusual(value: Any) -> Iterator[str]:
    """Names of objects, and of mappings by parameter, in described values."""
    if isinstance(value, dict) and "object" in value:
        yield f"objects of {value['object']}"
    elif isinstance(value, dict) and "parameters" in value:
        yield "a mapping by parameter"
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _unusual(each)
