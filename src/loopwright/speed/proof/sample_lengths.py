"""Longer and shorter samples made from existing ones, so that lengths are compared before they occur."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..layouts.positions import takes_any_length
from ..layouts.samples import IGNORED, Axis, NoSamples, Samples

POSITIONS = "position_ids"


def stretched(sample: Samples, times: int, most: int | None) -> Samples:
    """One sample with its tokens repeated up to `times` times its length, but at most `most` tokens."""
    lengths = _lengths(sample).items()
    return _with_lengths(sample, {key: min(times * n, max(most or times * n, n)) for key, n in lengths})


def shortened_to(sample: Samples, tokens: int) -> Samples:
    """One sample truncated to its last `tokens` tokens, which contain the answer."""
    return _with_lengths(sample, {key: min(n, tokens) for key, n in _lengths(sample).items()})


def _lengths(sample: Samples) -> dict[str, int]:
    return {key: int(axis.lengths[0]) for key, axis in sample.axes.items()}


def _with_lengths(sample: Samples, wanted: Mapping[str, int]) -> Samples:
    tensors, axes = dict(sample.tensors), {}
    for key, axis in sample.axes.items():
        start, end, length = int(axis.starts[0]), int(axis.ends[0]), wanted[key]
        for name in axis.names:
            real = tensors[name][:, start:end]
            tensors[name] = _counted(real, length) if name == POSITIONS else _repeated(real, length)
        axes[key] = Axis(axis.names, np.zeros(1, dtype=np.int64), np.array([length]), length)
    return Samples(tensors, axes, sample.constants)


def _repeated(real: Tensor, length: int) -> Tensor:
    """Repeat the tokens as often as necessary and keep the last `length` of them."""
    times = -(-length // real.shape[1])
    return torch.cat([real] * times, dim=1)[:, -length:]


def _counted(positions: Tensor, length: int) -> Tensor:
    if positions.dim() != 2 or bool((positions[:, 1:] - positions[:, :-1] != 1).any()):
        raise NoSamples("positions do not increase by one")
    return positions[:, :1] + torch.arange(length, dtype=positions.dtype)


def joined(parts: Sequence[Samples], paddings: Mapping[str, float], *, on_left: bool) -> Samples:
    """Several sets of samples as one, padded with the collator's values."""
    first = parts[0]
    axes: dict[str, Axis] = {}
    tensors: dict[str, Tensor] = {}
    for key in first.axes:
        members = [part.axes[key] for part in parts]
        width = max(axis.width for axis in members)
        for name in members[0].names:
            value = paddings.get(name, IGNORED if "label" in name else 0)
            tensors[name] = torch.cat([_padded(part.tensors[name], width, value, on_left) for part in parts])
        shifts = [width - axis.width if on_left else 0 for axis in members]
        starts = np.concatenate([axis.starts + shift for axis, shift in zip(members, shifts, strict=True)])
        ends = np.concatenate([axis.ends + shift for axis, shift in zip(members, shifts, strict=True)])
        axes[key] = Axis(members[0].names, starts, ends, width)
    for name in first.tensors:
        if name not in tensors:
            tensors[name] = torch.cat([part.tensors[name] for part in parts])
    return Samples({name: tensors[name] for name in first.tensors}, axes, first.constants)


def _padded(values: Tensor, width: int, value: float, on_left: bool) -> Tensor:
    missing = width - values.shape[1]
    if not missing:
        return values
    filling = values.new_full((values.shape[0], missing, *values.shape[2:]), value)
    return torch.cat([filling, values] if on_left else [values, filling], dim=1)


UNLIMITED = 1 << 30
LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


def longest_possible(model: nn.Module) -> int | None:
    """Largest number of tokens per sample, from the configuration and the position tables; None if unknown."""
    if takes_any_length(model):
        return UNLIMITED  # some of their configurations have a number of positions, which nothing reads
    config = getattr(model, "config", None)
    named = [getattr(config, name, None) for name in LIMITS]
    known = [value for value in named if isinstance(value, int) and value > 0]
    offset = 2 + (getattr(config, "pad_token_id", None) or 0)  # some models start positions after the padding index
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if "pos" in name.rpartition(".")[2] and isinstance(module, nn.Embedding) and isinstance(weight, Tensor):
            known.append(max(1, weight.shape[0] - offset))
    return min(known) if known else None
