"""Running code and restoring random states, buffers, gradients and modes."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def undone(model: nn.Module, parameters: list[nn.Parameter], device: torch.device) -> Iterator[None]:
    """Random states, buffers and gradients after the block are those from before it."""
    gradients = [p.grad for p in parameters]
    # Recorded gradient tensors are written to by replays, so their contents count, not only who they are.
    kept = [None if gradient is None else gradient.clone() for gradient in gradients]
    buffers = [(place, name, place[name], place[name].clone()) for place, name in buffers_of(model)]
    host, on_device = (random.getstate(), np.random.get_state(), torch.get_rng_state()), _device_state(device)
    try:
        yield
    finally:
        random.setstate(host[0])
        np.random.set_state(host[1])
        torch.set_rng_state(host[2])
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
        with torch.no_grad():
            for place, name, buffer, value in buffers:
                place[name] = buffer.copy_(value)
            for parameter, gradient, value in zip(parameters, gradients, kept, strict=True):
                parameter.grad = gradient if gradient is None else gradient.copy_(value)


def host_streams(device: torch.device) -> tuple[Any, ...]:
    """Where the random streams of the host stand, in a form that can be compared."""
    _, keys, *rest = np.random.get_state(legacy=True)
    own = () if device.type == "cpu" else (bytes(torch.get_rng_state().numpy()),)
    return (random.getstate(), bytes(np.asarray(keys)), *rest, *own)


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Work on another stream, ordered after what came before and before what comes after."""
    if device.type != "cuda":
        yield
        return
    current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


@contextmanager
def as_if_recording(device: torch.device) -> Iterator[None]:
    """Let models that ask whether they are recorded go the way they go then: it has other kernels, and no waits."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = before


@contextmanager
def no_wait(device: torch.device) -> Iterator[None]:
    """Make every wait of the host for the device an error."""
    if device.type != "cuda":
        yield
        return
    with _sync_debug_mode("error"):
        yield


@contextmanager
def any_wait_is_fine() -> Iterator[None]:
    """Allow waiting where a run otherwise forbids it: recording and checking wait, a few times per run."""
    if not torch.cuda.is_available():
        yield
        return
    with _sync_debug_mode("default"):
        yield


@contextmanager
def _sync_debug_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # torch warns that this mode is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def autocast_without_cache() -> Iterator[None]:
    """Autocast contexts inside keep no casts: a cached one would be memory of the recording, used outside of it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def buffers_of(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """The place of every buffer: the dict that holds it and its name there."""
    return [(m._buffers, name) for m in model.modules() for name, buffer in m._buffers.items() if buffer is not None]


def _device_state(device: torch.device) -> Tensor | None:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None
