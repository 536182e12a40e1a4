"""Which number formats a computation uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
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
