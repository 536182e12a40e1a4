"""Leaving everything as it was: the RNG states, buffers and gradients of a moment, and how to restore them.

All that is tried out or undone goes through here: an update that a signal cuts short, a loss that is only computed to
see how it is scaled (`pt/sandbox.py`, which restores plain Python state too), a CUDA graph that is recorded, counted
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
"""Random streams torch does not know of, by name: how to ask where one stands (a whole number), how to put it there."""


class Snapshot:
    """RNG states and the buffers of modules at one moment, and the gradients of some parameters."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        parameters: Sequence[nn.Parameter] = (),
        *,
        keeps: Callable[[Tensor], bool] = lambda buffer: True,
    ) -> None:
        self.rng = snapshot_rng()
        # The place of each, because a module may put another tensor there.
        self._buffers = [
            (module._buffers, name, buffer, buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and keeps(buffer)
        ]
        # Their contents too: a graph writes to the gradient tensors it was recorded with.
        self._gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]

    def restore(self) -> None:
        """Restore all of it; may be called again."""
        restore_rng(self.rng)
        with torch.no_grad():
            for place, name, buffer, value in self._buffers:
                buffer.data.copy_(value)
                place[name] = buffer
            for parameter, gradient, value in self._gradients:
                parameter.grad = gradient if gradient is None else gradient.copy_(value)


@contextmanager
def restored(model: nn.Module, parameters: Sequence[nn.Parameter] = ()) -> Iterator[None]:
    """RNG states, buffers, and the gradients of `parameters` are afterwards what they were before."""
    before = Snapshot(model.modules(), parameters)
    try:
        yield
    finally:
        before.restore()


def snapshot_rng() -> dict[str, Any]:
    """Where the streams of Python, numpy, torch and the accelerator stand now."""
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
    """Put every stream back to where `snapshot_rng` found it.

    Devices that are no longer there are left out, and streams that the snapshot does not have stay as they are.
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
    # Asking a device for its stream starts it, and a run on the CPU should not take memory on a GPU.
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
