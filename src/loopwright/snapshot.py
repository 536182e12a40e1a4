"""Snapshots of RNG states, buffers and gradients, and how to restore them.

Used for everything that is undone: an update interrupted by a signal, a loss that is computed only to find out how it
is scaled (`pt/restoring/sandbox.py`, which restores plain Python state too), the recording of a CUDA graph, counting
FLOPs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MORE_STREAMS: dict[str, tuple[Callable[[], int], Callable[[int], None]]] = {}
"""RNG states that torch does not manage, by name: a function that reads one as an integer, and one that sets it."""


class Snapshot:
    """RNG states and the buffers of modules at one moment, and the gradients of some parameters."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        parameters: Sequence[nn.Parameter] = (),
        *,
        keeps: Callable[[Tensor], bool] = lambda buffer: True,
        copies: Callable[[Tensor], bool] = lambda gradient: True,
    ) -> None:
        """`keeps` chooses buffers, `copies` the gradients whose contents may change: all others are only put back."""
        self.rng = snapshot_rng()
        # The place of each, because a module may put another tensor there.
        self._buffers = [
            (module._buffers, name, buffer, buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and keeps(buffer)
        ]
        # Their contents too: a graph writes to the gradient tensors it was recorded with.
        self._gradients = [
            (p, p.grad, None if p.grad is None or not copies(p.grad) else p.grad.clone()) for p in parameters
        ]

    def restore(self) -> None:
        """Restore all of it; may be called again."""
        restore_rng(self.rng)
        with torch.no_grad():
            for place, name, buffer, value in self._buffers:
                buffer.data.copy_(value)
                place[name] = buffer
            for parameter, gradient, value in self._gradients:
                parameter.grad = gradient if gradient is None or value is None else gradient.copy_(value)


@contextmanager
def restored(
    model: nn.Module,
    parameters: Sequence[nn.Parameter] = (),
    *,
    copies: Callable[[Tensor], bool] = lambda gradient: True,
) -> Iterator[None]:
    """RNG states, buffers, and the gradients of `parameters` are afterwards what they were before.

    Contents of a gradient for which `copies` is false must not be changed meanwhile.
    """
    before = Snapshot(model.modules(), parameters, copies=copies)
    try:
        yield
    finally:
        before.restore()


def snapshot_rng() -> dict[str, Any]:
    """The RNG states of Python, numpy, torch and the accelerator."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
    }
    accelerator = _started_accelerator()
    if accelerator is not None:
        states["accelerator"] = _accelerator_states(accelerator)
    for name, (ask, _) in MORE_STREAMS.items():
        states[name] = ask()
    return states


def restore_rng(states: dict[str, Any]) -> None:
    """Restore the RNG states of a `snapshot_rng`.

    Devices that are gone are skipped; RNG states that the snapshot does not have are not changed.
    """
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if states.get("accelerator"):
        _set_accelerator_states(states["accelerator"])
    for name, (_, put) in MORE_STREAMS.items():
        if name in states:
            put(states[name])


@contextmanager
def untouched_rng() -> Iterator[None]:
    """Leave every random stream as it was before."""
    states = snapshot_rng()
    try:
        yield
    finally:
        restore_rng(states)


def _started_accelerator() -> Any | None:
    """The module of the accelerator in use (`torch.cuda`, `torch.mps` ...), or None; never starts one."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    # Reading the RNG state of a device initializes it, and a run on the CPU should not take memory on a GPU.
    started = getattr(module, "is_initialized", None)
    tells = any(hasattr(module, name) for name in ("get_rng_state", "get_rng_state_all"))
    return module if tells and (started is None or started()) else None


def _accelerator_states(module: Any) -> list[torch.Tensor]:
    if hasattr(module, "get_rng_state_all"):
        return list(module.get_rng_state_all())
    return [module.get_rng_state()]


def _set_accelerator_states(states: list[torch.Tensor]) -> None:
    if not torch.accelerator.is_available():
        return
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    if not hasattr(module, "set_rng_state"):
        return
    if not hasattr(module, "get_rng_state_all"):
        module.set_rng_state(states[0])
        return
    for index, state in enumerate(states[: module.device_count()]):
        module.set_rng_state(state, index)
