"""Models of tables: any module with a loss, and a multilayer perceptron."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...args.field import nearest
from ...errors import ArgumentsError, DataError
from ..request import Request

OPTIONS: dict[str, Any] = {"hidden": [64, 64], "dropout": 0.0}


class TableModel(nn.Module):
    """Standardizes the inputs, calls a module on them, and computes the loss of its outputs."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, body: nn.Module, inputs: np.ndarray | None, *, classes: int) -> None:
        """`classes`: their number; 0 for a regression."""
        super().__init__()
        self.body, self.classes = body, classes
        mean, deviation = (np.zeros(()), np.ones(())) if inputs is None else statistics(inputs)
        self.register_buffer("mean", torch.as_tensor(mean, dtype=torch.float32))
        self.register_buffer("deviation", torch.as_tensor(deviation, dtype=torch.float32))

    def forward(self, features: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        outputs = self.body((features - self.mean) / self.deviation)
        self._check(outputs, len(features))
        if not self.classes:
            outputs = outputs.reshape(len(features))
        if labels is None:
            return {"logits": outputs}
        if self.classes:
            loss = nn.functional.cross_entropy(outputs, labels)
        else:
            loss = nn.functional.mse_loss(outputs, labels.to(outputs.dtype))
        return {"loss": loss, "logits": outputs}

    def _check(self, outputs: Any, rows: int) -> None:
        """Raise unless the module made what the loss needs: a loss of other shapes may be computed, but wrongly."""
        wanted = [(rows, self.classes)] if self.classes else [(rows, 1), (rows,)]
        if isinstance(outputs, Tensor) and tuple(outputs.shape) in wanted:
            return
        found = f"outputs of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        task = f"{self.classes} classes" if self.classes else "a regression"
        raise DataError(
            f"the module {type(self.body).__name__} returned {found} for {rows} rows; for {task} it must return a "
            f"tensor of shape {wanted[0]}"
        )


def statistics(inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each column; a constant column has the deviation 1.

    In 64 bits: sums of 32 bits lose the deviation of a column far from zero, and invent one for a constant column.
    """
    mean, deviation = inputs.mean(axis=0, dtype=np.float64), inputs.std(axis=0, dtype=np.float64)
    is_constant = inputs.min(axis=0) == inputs.max(axis=0)
    return mean, np.where(is_constant, 1.0, deviation)


def multilayer_perceptron(inputs: int, outputs: int, request: Request) -> nn.Module:
    """Linear layers with ReLU between them; `hidden` are their sizes."""
    given = request.model.options or {}
    place = request.place("model.options")
    for name in given:
        if name not in OPTIONS:
            raise ArgumentsError(f"{place}: 'mlp' has no option {name!r}{nearest(name, OPTIONS)}")
    options = {**OPTIONS, **given}
    sizes = options["hidden"]
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise ArgumentsError(f"{place}: hidden={sizes!r} must be a list of integers above 0")
    layers: list[nn.Module] = [nn.Flatten()]
    for size in sizes:
        layers += [nn.Linear(inputs, size), nn.ReLU(), nn.Dropout(float(options["dropout"]))]
        inputs = size
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))
