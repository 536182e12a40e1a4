"""Copies of predictions to the host while the device computes the next batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.evaluation.loop import EvalStep
from ...core.evaluation.predictions import map_nested
from ...speed.device.prefetch import leaves

MOST_BYTES = 2**30
"""Larger values are copied without pinned memory, when they are read."""


class HostCopy:
    """Nested tensors on their way from a GPU to pinned host memory; tensors of other devices are kept."""

    def __init__(self, value: Any, *, moves: bool = True) -> None:
        moving = [leaf for leaf in leaves(value) if leaf.device.type == "cuda"] if moves else []
        self._event: Any = None
        self._value = value
        if moving and sum(leaf.nbytes for leaf in moving) <= MOST_BYTES:
            self._value = map_nested(_sent, value)
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> Any:
        """The values, when they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._value


def sent_ahead(steps: Iterable[EvalStep]) -> Iterator[EvalStep]:
    """The steps, one behind: each is returned with its predictions on the host after the next one was launched."""
    waiting: tuple[EvalStep, HostCopy] | None = None
    for step in steps:
        copy = HostCopy((step.logits, step.labels, step.inputs))
        if waiting is not None:
            yield _arrived(*waiting)
        waiting = (step, copy)
    if waiting is not None:
        yield _arrived(*waiting)


def _arrived(step: EvalStep, copy: HostCopy) -> EvalStep:
    step.logits, step.labels, step.inputs = copy.result()
    return step


def _sent(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.device.type != "cuda":
        return value
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return host.copy_(value.detach(), non_blocking=True)
