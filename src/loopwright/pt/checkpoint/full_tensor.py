"""Full tensors from shards, gathered one at a time, so that no device ever holds more than one of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .shards import NAMES, is_distributed, like, local_part


def whole_of(tensor: Any) -> Tensor:
    """The full tensor; a collective that all ranks holding a shard must call."""
    tensor = tensor.detach()
    if not is_distributed(tensor):
        return tensor
    local = tensor.to_local()
    if local.device.type != tensor.device_mesh.device_type:  # shards in host memory are gathered through the device
        tensor = like(local.to(tensor.device_mesh.device_type), tensor)
    return tensor.full_tensor()


def whole_tensors(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """All tensors in full, in host memory; ranks without `keep` only send their shards."""
    found: dict[str, Tensor] = {}
    same: dict[Any, Tensor] = {}
    for name, tensor in tensors.items():
        place = _place(tensor)
        if place not in same:
            whole = whole_of(tensor)
            same[place] = whole.cpu() if keep else torch.empty(0)
        if keep:
            found[name] = same[place]
    return found


def _place(tensor: Any) -> Any:
    """A key that is equal for all names of one tensor, on every rank."""
    box = local_part(tensor)
    return (box.values.data_ptr(), box.shape) if box.values.numel() else object()


def stream_tensors(path: Path | None, tensors: Mapping[str, Tensor]) -> None:
    """Write full tensors to a safetensors file, one at a time; ranks without a path only send their shards."""
    aliases, stored = _second_names(tensors)
    header: dict[str, Any] = {"__metadata__": {"aliases": json.dumps(aliases)} if aliases else {"format": "pt"}}
    end = 0
    for name in stored:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if path is None:
        for name in stored:
            whole_of(tensors[name])
        return
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in stored:
            content = whole_of(tensors[name]).cpu().contiguous().reshape(-1)
            file.write(content.view(torch.uint8).numpy().data if content.numel() else b"")


def _second_names(tensors: Mapping[str, Tensor]) -> tuple[dict[str, str], list[str]]:
    """Aliases of tied weights, and the names to write, which are the same on every rank."""
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        storage = (tensor._local_tensor if is_distributed(tensor) else tensor).untyped_storage()
        key = hash((storage.data_ptr(), tuple(tensor.shape))) if storage.nbytes() else hash(name)
        if key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
    # A shard may be empty on some ranks, so only names that are tied on every rank are left out.
    return aliases, [name for name in tensors if name not in aliases]
