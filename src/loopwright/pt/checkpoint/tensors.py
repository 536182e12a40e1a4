"""Tensors in checkpoint files: safetensors and JSON only, which cannot execute code."""

from __future__ import annotations

import copy
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ...core.checkpoint.folder import OPTIMIZER
from ...core.checkpoint.json_files import read_json, write_json
from ...core.checkpoint.schema import (
    label,
    list_of,
    named,
    record,
    text,
)
from ...errors import CheckpointError, some
from ..devices import address_of
from .described_values import decode_value, encode_value, owner_of, tensors_in
from .optimizer_options import check_groups

DESCRIPTION = record(
    {
        "groups": list_of(record({"params": list_of(text), "options": named()})),
        "state": named(named()),
        "extra": named(),
    }
)
"""optimizer.json: the groups and states of an optimizer, with names of tensors in place of these."""

# ---- tensors ---------------------------------------------------------------------------------------------------------


class HostSnapshot:
    """Copies of tensors in host memory, for successive saves.

    Each snapshot overwrites the memory of the previous one, because writing to new memory takes several times as long.
    The previous snapshot must no longer be in use.
    """

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies with the same sharing of memory as the originals."""
        copies: dict[tuple[int, str], Tensor] = {}
        result = {}
        for name, tensor in tensors.items():
            tensor = tensor.detach()
            storage = tensor.untyped_storage()
            place = (address_of(tensor, of_storage=True), str(tensor.device))
            if tensor.numel() == 0 or storage.nbytes() != tensor.numel() * tensor.element_size():
                result[name] = self._copy(name, tensor)  # a view of a larger storage: copy only its elements
                continue
            if place not in copies:
                copies[place] = self._copy(name, tensor)
            same = copies[place]
            result[name] = same if _alike(same, tensor) else self._copy(name, tensor)
        return result

    @property
    def size(self) -> int:
        """Bytes held for reuse."""
        return sum(copy.numel() * copy.element_size() for copy in self._last.values())

    def clear(self) -> None:
        """Release the memory."""
        self._last = {}

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        last = self._last.get(name)
        if last is not None and _alike(last, tensor):
            last.copy_(tensor)
        else:
            last = self._last[name] = tensor.to("cpu", copy=True)
        return last


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()


def host_copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, with the same sharing of memory as the originals."""
    return HostSnapshot()(tensors)


def copied(value: Any, snapshot: HostSnapshot) -> Any:
    """A copy of nested values, with all tensors copied to host memory by the snapshot."""
    tensors: dict[str, Tensor] = {}
    _map_tensors(value, "", tensors.setdefault)
    copies = snapshot(tensors)
    return _map_tensors(value, "", lambda place, _: copies[place])


def _map_tensors(value: Any, place: str, change: Callable[[str, Tensor], Any]) -> Any:
    """A copy of nested values in which every tensor is what `change` returns for its place and itself."""
    if isinstance(value, Tensor):
        return change(place, value)
    if isinstance(value, dict):
        return {name: _map_tensors(each, f"{place}/{name}", change) for name, each in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_map_tensors(each, f"{place}/{index}", change) for index, each in enumerate(value))
    return copy.copy(value)


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], *, keep_aliases: bool = True
) -> dict[str, str]:
    """Write tensors to a safetensors file; tied weights are written once.

    Returns the aliases, which the file's metadata holds too unless `keep_aliases` is False.
    """
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_at: dict[Any, str] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        place = (address_of(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and place in first_at:
            aliases[name] = first_at[place]
            continue
        first_at[place] = name
        stored[name] = tensor.cpu().contiguous()
    # Different views of one storage are written as separate tensors, so none may share memory in the file.
    owners: set[int] = set()
    for name, tensor in stored.items():
        pointer = tensor.untyped_storage().data_ptr()
        if tensor.numel() and pointer in owners:
            stored[name] = tensor.clone()
        owners.add(pointer)
    # One entry only: safetensors writes several in random order, but equal tensors should give equal files.
    metadata = {"aliases": json.dumps(aliases)} if aliases and keep_aliases else {"format": "pt"}
    save_file(stored, str(path), metadata=metadata)
    return aliases


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """All tensors of a safetensors file, including aliases."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
        return {**tensors, **{name: tensors[target] for name, target in aliases.items()}}
    except Exception as error:  # a damaged file fails in many ways
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


# ---- model -----------------------------------------------------------------------------------------------------------


def copy_into(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the model's memory; a tied weight may be given under any of its names."""
    own = model.state_dict(keep_vars=True)
    check_fit(own, {name: tuple(each.shape) for name, each in tensors.items()}, strict=True, source="memory")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in own:
                own[name].copy_(tensor)


def check_fit(
    own: Mapping[str, Any], saved: Mapping[str, tuple[int, ...]], *, strict: bool, source: str, optional: str = ""
) -> None:
    """Raise unless the saved shapes fit the model; names that match the pattern `optional` may be missing."""
    unexpected = [name for name in saved if name not in own]
    given = {_place(own[name]) for name in saved if name in own}
    missing = [name for name, value in own.items() if name not in saved and _place(value) not in given]
    missing = [name for name in missing if not (optional and re.search(optional, name))]
    wrong = [
        f"{name}: {shape} saved, {tuple(own[name].shape)} in the model"
        for name, shape in saved.items()
        if name in own and shape != tuple(own[name].shape)
    ]
    if wrong or (strict and (missing or unexpected)):
        parts = [("missing", missing), ("unexpected", unexpected), ("with a different shape", wrong)]
        listed = "; ".join(f"{what}: {some(names)}" for what, names in parts if names)
        raise CheckpointError(f"the weights in {source} do not fit the model. {listed}")


def _place(tensor: Any) -> Any:
    """A key that is equal for all names of one tensor."""
    if hasattr(tensor, "device_mesh"):
        return id(tensor)
    return (address_of(tensor), tuple(tensor.shape)) if tensor.numel() else object()


# ---- optimizer -------------------------------------------------------------------------------------------------------


def encode_optimizer(optimizer: Any, model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The optimizer's state by parameter name: a JSON description and the tensors it refers to."""
    names = parameter_names(optimizer, model)
    owner = owner_of(optimizer, names)
    saved = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    state = {}
    for index, slots in saved["state"].items():
        name = names[index] if isinstance(index, int) else str(index)
        state[name] = {slot: encode_value(value, f"{name}/{slot}", tensors, owner) for slot, value in slots.items()}
    groups = []
    for number, group in enumerate(saved["param_groups"]):
        options = {
            key: encode_value(value, f"group {number}/{key}", tensors, owner)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        groups.append({"params": [names[index] for index in group["params"]], "options": options})
    rest = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    extra = {key: encode_value(value, key, tensors, owner) for key, value in rest.items()}
    return {"groups": groups, "state": state, "extra": extra}, tensors


def rehearsed(optimizer: Any) -> Any:
    """A copy of the optimizer after one step on tiny parameters, which shows the kinds of state it will have.

    Returns the optimizer itself if such a step is not possible.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or optimizer.state:
        return optimizer
    shadow = copy.copy(optimizer)  # without hooks and, by torch, without what a subclass adds
    vars(shadow).update({name: value for name, value in vars(optimizer).items() if name not in vars(shadow)})
    shadow.state = defaultdict(dict)
    shadow.param_groups = [{**_plain_options(group), "params": [_tiny()]} for group in optimizer.param_groups]
    try:
        with torch.random.fork_rng(devices=[]):
            shadow.step()
    except Exception:  # an optimizer that needs its real parameters
        return optimizer
    return shadow


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group without mappings, in which an optimizer may keep its state."""
    return {name: value for name, value in group.items() if not isinstance(value, Mapping)}


def _tiny() -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(64, 64))  # torchao quantizes the state of 4,096 elements and more
    parameter.grad = torch.ones(64, 64)
    return parameter


def decode_optimizer(
    described: dict[str, Any], tensors: Mapping[str, Tensor], optimizer: Any, model: nn.Module
) -> None:
    """Load a described state into the optimizer, matching parameters by name."""
    names = parameter_names(optimizer, model)
    owner = owner_of(optimizer, names)
    current = optimizer.state_dict()
    by_parameter, options = [], []
    for group in described["groups"]:
        values = {key: decode_value(value, tensors, owner) for key, value in group["options"].items()}
        apart = {key for key, value in group["options"].items() if isinstance(value, dict) and "parameters" in value}
        by_parameter.append({key: values[key] for key in apart})
        options.append({key: value for key, value in values.items() if key not in apart})
    check_groups(current["param_groups"], options, described)
    groups = [{**group, **saved} for group, saved in zip(current["param_groups"], options, strict=True)]
    state = {}
    for index, name in names.items():
        device, slots = owner.parameters[name].device, described["state"].get(name)
        if slots is not None:
            state[index] = {slot: decode_value(value, tensors, owner, device) for slot, value in slots.items()}
    extra = {key: decode_value(value, tensors, owner) for key, value in described.get("extra", {}).items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups, **extra})
    for group, values in zip(optimizer.param_groups, by_parameter, strict=True):
        group.update(values)  # torch copies the options, and a copy of a parameter is another key


def write_optimizer(folder: Path, described: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    write_tensors(folder / f"{OPTIMIZER}.safetensors", tensors)
    write_json(folder / f"{OPTIMIZER}.json", described)


def read_optimizer(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = read_tensors(folder / f"{OPTIMIZER}.safetensors")
    return read_description(folder, tensors), tensors


def read_description(folder: Path, tensors: Iterable[str]) -> dict[str, Any]:
    """optimizer.json, which must name every tensor once, at its place."""
    path = folder / f"{OPTIMIZER}.json"
    described: dict[str, Any] = read_json(path, DESCRIPTION)
    places = {"": described["extra"], **{f"{name}/": slots for name, slots in described["state"].items()}}
    places.update({f"group {number}/": each["options"] for number, each in enumerate(described["groups"])})
    named = [key for prefix, values in places.items() for name, one in values.items()
             for key in tensors_in(one, f"{prefix}{name}", path)]  # fmt: skip
    missing = sorted(set(tensors) - set(named))
    unknown = sorted(set(named) - set(tensors))
    if missing or unknown:
        problem = f"does not name the tensor {missing[0]!r}" if missing else f"names a tensor {unknown[0]!r}"
        raise CheckpointError(
            f"{label(path)} {problem} of {OPTIMIZER}.safetensors. The file was damaged or changed; resume from another "
            "checkpoint"
        )
    return described


def parameter_names(optimizer: Any, model: nn.Module) -> dict[int, str]:
    """The name of each parameter by its index in the optimizer's state dict."""
    known = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    names: dict[int, str] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            names[len(names)] = known.get(id(parameter), f"parameter {len(names)}")
    return names


def encode_schedule(state: Any) -> Any:
    """A scheduler's state as JSON, preserving non-string keys and Counters."""
    if isinstance(state, Mapping):
        values = [[name, encode_schedule(each)] for name, each in state.items()]
        if all(isinstance(name, str) for name, _ in values):
            return dict(values)
        return {"pairs": values, "counter": isinstance(state, Counter)}
    if isinstance(state, (list, tuple)):
        return [encode_schedule(each) for each in state]
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    raise CheckpointError(
        f"the scheduler's state holds a {type(state).__name__}, which cannot be saved without pickle; give the "
        "scheduler plain numbers, or set save_only_model=True"
    )


def decode_schedule(value: Any) -> Any:
    """The inverse of `encode_schedule`."""
    if isinstance(value, list):
        return [decode_schedule(each) for each in value]
    if not isinstance(value, dict):
        return value
    if set(value) != {"pairs", "counter"}:
        return {name: decode_schedule(each) for name, each in value.items()}
    pairs = {name: decode_schedule(each) for name, each in value["pairs"]}
    return Counter(pairs) if value["counter"] else pairs


def plain_module(model: nn.Module) -> nn.Module:
    """The module whose state dict is saved, without wrappers that prefix names; PEFT is kept."""
    while hasattr(model, "_orig_mod") or type(model).__name__ == "DistributedDataParallel":
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model
