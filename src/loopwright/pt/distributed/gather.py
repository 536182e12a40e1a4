"""Gathering nested tensors of any shapes: shapes through the host, contents through the device's process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .process_group import Host

ALIGNED = 16
"""Alignment of packed tensors in bytes, so that any dtype can be viewed in place."""


def gather_nested(value: Any, host: Host, device: torch.device, group: Any = None) -> list[Any]:
    """The values of all ranks, by rank: structure, shapes and plain values via the host, tensors via the device.

    Tensors are sent in torch's default group unless `group` is given.
    """
    tensors: list[Tensor] = []
    outline = _outline(value, tensors)
    outlines = host.gather((outline, [(tuple(each.shape), each.dtype) for each in tensors]))
    layouts = [_layout(shapes) for _, shapes in outlines]
    longest = max(size for _, size in layouts)
    if not longest:
        return [
            _filled(outline, [torch.empty(s, dtype=d, device=device) for s, d in shapes])
            for outline, shapes in outlines
        ]
    packed = torch.zeros(longest, dtype=torch.uint8, device=device)
    for tensor, (start, size) in zip(tensors, layouts[host.rank][0], strict=True):
        packed[start : start + size] = tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
    received = [torch.empty_like(packed) for _ in range(host.world_size)]
    dist.all_gather(received, packed, group=group)
    found = []
    for (outline, shapes), (places, _), content in zip(outlines, layouts, received, strict=True):
        parts = [
            content[start : start + size].view(dtype).reshape(shape)
            for (shape, dtype), (start, size) in zip(shapes, places, strict=True)
        ]
        found.append(_filled(outline, parts))
    return found


def _layout(shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> tuple[list[tuple[int, int]], int]:
    """Offset and size in bytes of each tensor, and the total size."""
    places, end = [], 0
    for shape, dtype in shapes:
        size = int(torch.Size(shape).numel()) * dtype.itemsize
        places.append((end, size))
        end += -(-size // ALIGNED) * ALIGNED
    return places, end


class _Slot:
    """Placeholder of a tensor in an outline."""

    def __init__(self, number: int) -> None:
        self.number = number


def _outline(value: Any, tensors: list[Tensor]) -> Any:
    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return _Slot(len(tensors) - 1)

    return map_leaves(placed, value)


def _filled(outline: Any, tensors: list[Tensor]) -> Any:
    return map_leaves(lambda leaf: tensors[leaf.number] if isinstance(leaf, _Slot) else leaf, outline)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Nested dicts, lists and tuples (also named ones), with the function applied to everything in them."""
    if isinstance(value, dict):
        return {name: map_leaves(function, each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [map_leaves(function, each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return function(value)
