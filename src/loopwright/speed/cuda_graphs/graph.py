"""A captured micro-batch: its static inputs, its loss, and the gradients it adds or writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CHECKS, LATER_CHECKS = 2, 1
"""Replays compared with an eager run: two for the first shape, the second on another batch; one for later shapes."""

Inputs = dict[str, Any]


@dataclass(eq=False)
class Graph:
    """One captured micro-batch with its static inputs, loss and gradients."""

    inputs: Inputs
    weight: Tensor
    loss: Tensor
    replay: Callable[[], Any]
    gradients: list[tuple[nn.Parameter, Tensor]]
    """Parameters that get a gradient, each with the tensor to which the graph adds it, or which it overwrites."""
    checks: int = CHECKS
    draws: int = 0
    """Random numbers that the forward pass draws on the host without effect; a replay draws as many."""
    overwrites: bool = False
    filled: float | None = None
    """The number in `weight`, if it was written by the host."""

    def load(self, inputs: Inputs, weight: Any) -> None:
        """Copy a batch of the same shapes to the static inputs."""
        for name, place in self.inputs.items():
            if isinstance(place, Tensor):
                place.copy_(inputs[name], non_blocking=True)
        if isinstance(weight, Tensor) and weight.device == self.weight.device:
            self.weight.copy_(weight)
            self.filled = None
        elif self.filled != float(weight):  # the share of most micro-batches is that of the one before
            self.filled = float(weight)
            self.weight.fill_(self.filled)

    def run(self) -> None:
        """Replay, and leave the sum of earlier gradients and those of the replay in the parameters."""
        earlier = self.place_gradients()
        self.replay()
        if earlier:
            places, gradients = zip(*earlier, strict=True)
            torch._foreach_add_(list(places), list(gradients))

    def place_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Make the captured tensors the parameters' gradients; returns what has to be added to them after a replay.

        A graph that adds gets accumulated gradients, or zeros, before the replay.
        """
        empty, earlier = [], []
        for parameter, place in self.gradients:
            gradient = parameter.grad
            if self.overwrites and gradient is not None:
                earlier.append((place, gradient.clone() if gradient is place else gradient))
            elif gradient is None:
                empty.append(place)
            elif gradient is not place:
                place.copy_(gradient)
            parameter.grad = place
        if empty and not self.overwrites:
            torch._foreach_zero_(empty)
        return earlier
