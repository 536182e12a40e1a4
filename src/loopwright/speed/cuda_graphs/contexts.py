"""Contexts for capturing a CUDA graph: streams, synchronization, the autocast cache."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..attention.needless_masks import without_needless_masks

MOST_DRAWS = 512


class HostStreams(NamedTuple):
    """The states of the host's random generators."""

    others: tuple[Any, ...]
    """Of Python and numpy."""
    torch: bytes
    """Of torch; empty if the host is the device."""


def host_streams(device: torch.device) -> HostStreams:
    """The states of the host's random generators, in a form that can be compared."""
    _, keys, *rest = np.random.get_state(legacy=True)
    own = b"" if device.type == "cpu" else bytes(torch.get_rng_state().numpy())
    return HostStreams((random.getstate(), bytes(np.asarray(keys)), *rest), own)


def draws_between(before: HostStreams, after: HostStreams) -> int | None:
    """How many numbers `torch.rand` drew on the host between two states; None if something else was drawn."""
    if before.others != after.others or not before.torch:
        return None
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(before.torch), dtype=torch.uint8))
    for count in range(MOST_DRAWS):
        if bytes(generator.get_state().numpy()) == after.torch:
            return count
        torch.rand((), generator=generator)
    return None


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run on another stream, ordered after earlier work and before later work of the current stream."""
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
    """Pretend that a capture is running, so that models use the kernels for it and do not synchronize."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        with without_needless_masks():
            yield
    finally:
        torch.cuda.is_current_stream_capturing = before


@contextmanager
def no_wait(device: torch.device) -> Iterator[None]:
    """Make every synchronization with the device an error."""
    if device.type != "cuda":
        yield
        return
    with _sync_debug_mode("error"):
        yield


@contextmanager
def any_wait_is_fine() -> Iterator[None]:
    """Allow synchronization where a run forbids it: capturing and checking synchronize, a few times per run."""
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
    """Disable autocast's cache of casts: a cached tensor would be memory of the capture that is used outside it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def buffers_of(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """The location of every buffer: the dict that holds it and its name there."""
    return [(m._buffers, name) for m in model.modules() for name, buffer in m._buffers.items() if buffer is not None]
