"""Models of tables: any module with a loss, and a multilayer perceptron."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..args.field import nearest
from ..errors import ArgumentsError
from .request import Request

OPTIONS: dict[str, Any] = {"hidden": [64, 64], "dropout": 0.0}


class TableModel(nn.Module):
    """Standardizes the inputs, calls a module on them, and computes the loss of its outputs."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, body: nn.Module, inputs: np.ndarray | None, *, classes: bool) -> None:
        super().__init__()
        self.body, self.classes = body, classes
        mean = np.zeros(()) if inputs is None else inputs.mean(axis=0)
        deviation = np.ones(()) if inputs is None else inputs.std(axis=0)
        self.register_buffer("mean", torch.as_tensor(mean, dtype=torch.float32))
        self.register_buffer("deviation", torch.as_tensor(np.where(deviation > 0, deviation, 1), dtype=torch.float32))

    def forward(self, features: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        outputs = self.body((features - self.mean) / self.deviation)
        if not self.classes and outputs.ndim == features.ndim and outputs.shape[-1] == 1:
            outputs = outputs.squeeze(-1)
        if labels is None:
            return {"logits": outputs}
        if self.classes:
            loss = nn.functional.cross_entropy(outputs, labels)
        else:
            loss = nn.functional.mse_loss(outputs, labels.to(outputs.dtype))
        return {"loss": loss, "logits": outputs}


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
