"""Nested values of `trainer.accelerator`: parts of them, and their sums over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..distributed.gather import map_leaves


def first_samples(values: Any, number: int) -> Any:
    """The first samples of nested tensors."""
    return map_leaves(lambda each: each[:number] if isinstance(each, Tensor) and each.dim() else each, values)


def has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(has_tensors, value.values()))
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(map(has_tensors, value)))


def scaled(value: Any, scale: float) -> Any:
    return map_leaves(lambda each: each * scale if isinstance(each, Tensor) and scale != 1 else each, value)


def combined(each: list[Any], factor: float) -> Any:
    """The sum of the ranks' values, times a factor."""
    first = each[0]
    if isinstance(first, dict):
        return {name: combined([value[name] for value in each], factor) for name in first}
    if isinstance(first, list | tuple):
        return type(first)(combined(list(values), factor) for values in zip(*each, strict=True))
    if not isinstance(first, Tensor):
        return first
    total = torch.stack(each).sum(0)
    return total * factor if factor != 1 else total


def part_of(inputs: Any, rank: int, world: int, padded: bool) -> Any:
    if world == 1:
        return inputs
    if isinstance(inputs, dict):
        return {name: part_of(value, rank, world, padded) for name, value in inputs.items()}
    size, rest = divmod(len(inputs), world)
    start = rank * size + min(rank, rest)
    own = inputs[start : start + size + (rank < rest)]
    missing = (size + bool(rest) - len(own)) if padded else 0
    if not missing:
        return own
    last = inputs[-1:]
    return torch.cat([own, *[last] * missing]) if isinstance(own, Tensor) else own + last * missing
