"""Training without dropout: modules stay in train mode, so that their other training behaviour is compared too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Shapes = list[tuple[int, ...]]

OF_CHANNELS = ("dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
"""Functions of torch.nn.functional that drop more than single elements, or draw random numbers differently."""
_OFF = [0]
"""Number of active `without_dropout` contexts; attention kernels with their own dropout check `dropout_is_off`."""


def dropout_is_off() -> bool:
    return _OFF[0] > 0


@contextmanager
def without_dropout(*, channels: bool = False) -> Iterator[Shapes]:
    """Disable dropout; yields the shapes to which dropout of single elements would have been applied.

    By default only dropout of single elements is disabled: it is equivalent in every layout. Functions that drop whole
    samples, channels or layers still draw random numbers, which the proof detects; `channels` disables `OF_CHANNELS`.
    """
    shapes: Shapes = []
    functional, attention = F.dropout, F.scaled_dot_product_attention

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training and p > 0:
            shapes.append(tuple(input.shape))
        return input if p < 1 or not training else functional(input, p, training, inplace)

    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *a: Any, **k: Any):  # type: ignore[no-untyped-def]
        return attention(query, key, value, attn_mask, 0.0, *a, **k)

    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (F, "dropout", dropout),
        (torch, "dropout", lambda input, p, train: dropout(input, p, train)),
        (F, "scaled_dot_product_attention", attend),
    ]
    if channels:
        patches += [(F, name, lambda input, *args, **kwargs: input) for name in OF_CHANNELS]
    before = [(place, name, getattr(place, name)) for place, name, _ in patches]
    for place, name, function in patches:
        setattr(place, name, function)
    _OFF[0] += 1
    try:
        yield shapes
    finally:
        _OFF[0] -= 1
        for place, name, function in before:
            setattr(place, name, function)


def per_sample(shapes: Shapes, rows: set[int]) -> tuple[int, ...] | None:
    """The shape of a dropout mask without a token dimension, which would treat a row of many samples as one sample."""
    return next((shape for shape in shapes if shape[:1] == (1,) and not rows & set(shape[1:])), None)
