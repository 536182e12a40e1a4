"""What a device sustains: matrix products of one size, repeated long enough to heat the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ...notices import logger

SECONDS = 1.0
"""How long products are repeated; a GPU reaches its limit of power within a fraction of it."""
SIZE = 8192
SIZE_ON_CPU = 512
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
WARM_UP = 3


def sustained_operations(device: torch.device, number_format: str, seconds: float = SECONDS) -> float | None:
    """Operations per second of square matrix products on this device; None if they cannot be measured.

    Random numbers come from a generator of their own, and memory is released afterwards.
    """
    wait = _wait(device)
    if wait is None:
        return None
    size = SIZE_ON_CPU if device.type == "cpu" else SIZE
    try:
        generator = torch.Generator(device).manual_seed(0)
        shape, dtype = (size, size), FORMATS[number_format]
        a, b = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            return 2 * size**3 * _rate(a, b, wait, seconds)
    except (RuntimeError, NotImplementedError) as error:  # out of memory, or a format without such a product
        logger.info(f"matrix products could not be measured on {device}: {error}")
        return None


def _rate(a: torch.Tensor, b: torch.Tensor, wait: Callable[[], None], seconds: float) -> float:
    """Products per second."""
    for _ in range(WARM_UP):
        a @ b
    wait()
    begin = time.perf_counter()
    count, many, taken = 0, 1, 0.0
    while not count or taken < seconds:
        for _ in range(many):
            a @ b
        wait()
        before, taken, count = taken, time.perf_counter() - begin, count + many
        if taken - before < seconds / 20:
            many *= 2  # few waits, and no more than a moment too long
    return count / taken


def _wait(device: torch.device) -> Callable[[], None] | None:
    """A function that waits for the device; None if it has none."""
    if device.type == "cpu":
        return lambda: None
    found = getattr(getattr(torch, device.type, None), "synchronize", None)
    return found if callable(found) else None
