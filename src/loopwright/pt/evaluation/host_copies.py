"""Copies of predictions to the host while the device computes the next batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.evaluation.loop import EvalStep
from ...core.evaluation.predictions import map_nested
from ...speed.device.prefetch import leaves
from ..devices import copies_while_computing

MOST_BYTES = 2**30
"""Larger values are copied without pinned memory, when they are read."""


class HostCopy:
    """Nested tensors on their way from a device to pinned host memory; those of devices without it are kept."""

    def __init__(self, value: Any, *, moves: bool = True) -> None:
        moving = [leaf for leaf in leaves(value) if copies_while_computing(leaf.device)] if moves else []
        self._event: Any = None
        self._value = value
        if moving and sum(leaf.nbytes for leaf in moving) <= MOST_BYTES:
            self._value = map_nested(_sent, value)
            self._event = getattr(torch, moving[0].device.type).Event()
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
    if not isinstance(value, Tensor) or not copies_while_computing(value.device):
        return value
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return host.copy_(value.detach(), non_blocking=True)
