"""Which device, and what it can do: asked of the device itself where that is possible."""

from __future__ import annotations

import functools
from typing import Any

import torch


def choose_device(use_cpu: bool, local_rank: int) -> torch.device:
    """The accelerator torch finds (CUDA, ROCm, MPS, XPU, ...) for this process, else the CPU."""
    if use_cpu or not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    count = torch.accelerator.device_count()
    return torch.device(kind.type, local_rank % max(count, 1))


@functools.cache
def supports_bf16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16 itself."""
    if device.type == "cuda":  # a matrix product would succeed by emulation on cards without it
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return _works(
        lambda: torch.ones(2, 2, dtype=torch.bfloat16, device=device) @ torch.ones(2, 2).to(device, torch.bfloat16)
    )


@functools.cache
def supports_fused_optimizer(device: torch.device) -> bool:
    """Whether torch's fused AdamW runs on the device."""

    def step() -> None:
        parameter = torch.zeros(2, device=device, requires_grad=True)
        parameter.grad = torch.zeros_like(parameter)
        torch.optim.AdamW([parameter], fused=True).step()

    return _works(step)


@functools.cache
def can_pin_memory(device: torch.device) -> bool:
    """Whether copies to the device gain from pinned memory."""
    return device.type != "cpu" and _works(lambda: torch.empty(1).pin_memory())


def _works(attempt: Any) -> bool:
    """Whether a small attempt on the device succeeds."""
    try:
        attempt()
    except (RuntimeError, TypeError, NotImplementedError, AssertionError):
        return False
    return True


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Give memory that torch holds and does not use back to the device."""
    if device.type != "cpu":
        _backend(device).empty_cache()


def memory_figures(device: torch.device) -> dict[str, int]:
    """Bytes in use, at most in use since the last reset, and reserved; only what the device can tell."""
    if device.type == "cpu":
        return {}
    questions = {
        "allocated": ("memory_allocated", "current_allocated_memory"),
        "peak": ("max_memory_allocated",),
        "reserved": ("memory_reserved", "driver_allocated_memory"),
    }
    figures = {}
    for name, functions in questions.items():
        found = [getattr(_backend(device), function) for function in functions if hasattr(_backend(device), function)]
        if found:
            figures[name] = int(found[0](*_at(device)))
    return figures


def total_memory(device: torch.device) -> int | None:
    """Bytes of memory this process may use of a GPU, whoever uses some of it now; None for what has none of its own."""
    if device.type == "cpu" or not hasattr(_backend(device), "get_device_properties"):
        return None
    total = getattr(_backend(device).get_device_properties(device), "total_memory", None)
    share = getattr(_backend(device), "get_per_process_memory_fraction", lambda device: 1.0)
    return None if total is None else int(total * share(device))


def reset_peak_memory(device: torch.device) -> None:
    """Start measuring the peak anew, where the device measures it."""
    if hasattr(_backend(device), "reset_peak_memory_stats"):
        _backend(device).reset_peak_memory_stats(*_at(device))


def rng_state(device: torch.device) -> torch.Tensor:
    """The state of the device's random number generator."""
    state: torch.Tensor = (
        torch.get_rng_state() if device.type == "cpu" else _backend(device).get_rng_state(*_at(device))
    )
    return state


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Put the device's random number generator into a state it had before."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        _backend(device).set_rng_state(state, *_at(device))


def _backend(device: torch.device) -> Any:
    """torch's module for this kind of device: torch.cuda, torch.mps, torch.xpu, ..."""
    return getattr(torch, device.type)


def _at(device: torch.device) -> tuple[torch.device, ...]:
    """The device as an argument, for backends that have several."""
    return () if device.type == "mps" else (device,)
