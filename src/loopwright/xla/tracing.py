"""Models must not look at values while a step is noted: each look is a graph of its own, and may choose another one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

MASKS = "transformers.masking_utils"


@contextmanager
def noting(inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Inside, transformers makes its masks as it does for a compiler: without asking whether they are needed."""
    masks = sys.modules.get(MASKS)
    before = getattr(masks, "is_tracing", None)
    if before is None:
        with inner:
            yield
        return
    masks.is_tracing = _always  # type: ignore[union-attr]
    try:
        with inner:
            yield
    finally:
        masks.is_tracing = before  # type: ignore[union-attr]


@contextmanager
def stepwise(model: nn.Module, device: torch.device, boundary: Callable[[], None]) -> Iterator[None]:
    """Inside, what the host gives to the model goes to the device, and each forward pass is computed when it is noted.

    Otherwise the caches of all tokens before would be part of the graph of the next one.
    """

    def move(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in kwargs.items()}

    def compute(module: Any, args: tuple[Any, ...], output: Any) -> None:
        boundary()

    find = getattr(model, "get_encoder", None)
    encoder = find() if find is not None and getattr(model.config, "is_encoder_decoder", False) else None
    handles = []
    for part in (model, encoder):
        if part is not None:
            handles += [part.register_forward_pre_hook(move, with_kwargs=True), part.register_forward_hook(compute)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _always(tensor: Any = None) -> bool:
    return True
