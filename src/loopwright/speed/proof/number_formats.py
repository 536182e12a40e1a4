"""Which number formats a computation uses, and computing in single precision instead of half."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class NumberFormats(TorchDispatchMode):
    """Records whether any operation returns less than double precision."""

    coarse = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        self.coarse |= any(isinstance(each, Tensor) and each.dtype in _COARSE_FORMATS for each in outputs)
        return result


_COARSE_FORMATS = (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def whole_precision(model: nn.Module) -> Iterator[None]:
    """Temporarily convert half-precision weights and buffers to float32; the original tensors are restored at exit."""
    half = [t for t in [*model.parameters(), *model.buffers()] if t.dtype in (torch.float16, torch.bfloat16)]
    kept = [tensor.data for tensor in half]
    try:
        for tensor in half:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, data in zip(half, kept, strict=True):
            tensor.data = data
