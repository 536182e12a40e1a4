"""What a model returns: without its loss, detached, as numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.evaluation.predictions import map_nested


def logits_of(outputs: Any, ignored: list[str], loss: Tensor | None) -> Any:
    """The outputs without the loss and the ignored ones; the first of a tuple may only be a loss if there is one."""
    if isinstance(outputs, Mapping):
        return tuple(value for name, value in outputs.items() if name not in ignored and name != "loss")
    if hasattr(outputs, "__dataclass_fields__"):
        named = {name: getattr(outputs, name) for name in outputs.__dataclass_fields__}
        return logits_of(named, ignored, loss)
    if isinstance(outputs, (tuple, list)):
        return tuple(outputs[1:] if loss is not None and outputs and _is_loss(outputs[0], loss) else outputs)
    return (outputs,)


def _is_loss(output: Any, loss: Tensor) -> bool:
    """Whether an output is the loss, which may have the shape (1,)."""
    return isinstance(output, Tensor) and (not output.dim() or output.data_ptr() == loss.data_ptr())


def single(values: Any) -> Any:
    """The value of a tuple that has one."""
    return values[0] if isinstance(values, tuple) and len(values) == 1 else values


def detached(value: Any) -> Any:
    """Nested tensors without their graphs."""
    return map_nested(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def to_numpy(value: Any) -> Any:
    """Nested tensors as nested numpy arrays; dtypes that numpy lacks become float32."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach()
        known = not leaf.is_floating_point() or leaf.dtype in (torch.float16, torch.float32, torch.float64)
        return (leaf if known else leaf.float()).cpu().numpy()

    return map_nested(convert, value)
