"""Recording a step without reading values: each read ends the graph, and a branch on it may change the next one."""

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
    """Context manager: transformers creates its masks as under a compiler, without checking values."""
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
    """Context manager: inputs are copied to the device, and each forward pass is run as a separate step.

    Otherwise the computation of all earlier tokens would be part of the graph of the next one.
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
