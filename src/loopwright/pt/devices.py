"""The device of a run, and its capabilities, queried from the device itself where possible."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from typing import Any

import torch

from .device_traits import LazyRuntime, kind_named

LAZY = "xla"
"""torch's type of the device of torch_xla."""


def choose_device(use_cpu: bool, local_rank: int, *, native_first: bool = False) -> torch.device:
    """torch_xla's device if PJRT_DEVICE is set, else the accelerator torch finds, else the CPU."""
    lazy = lazy_device()  # also for runs on the CPU: the lazy device must be started before the first backward
    if use_cpu:
        return torch.device("cpu")
    if lazy is not None and not (native_first and torch.accelerator.is_available()):
        return lazy
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    count = torch.accelerator.device_count()
    return torch.device(kind.type, local_rank % max(count, 1))


def lazy_device() -> torch.device | None:
    """The device of lazy torch_xla, started; None if it is not requested or not installed."""
    if not os.environ.get("PJRT_DEVICE") or find_spec("torch_xla") is None:
        return None
    return lazy_runtime().start()


def lazy_runtime() -> LazyRuntime:
    """The runtime of the lazy device."""
    load = kind_named(LAZY).runtime
    assert load is not None, "the package of the lazy device registers its runtime"
    runtime: LazyRuntime = load()
    return runtime


@functools.cache
def supports_bf16(device: torch.device) -> bool:
    """Whether the device supports bfloat16 natively."""
    if device.type == "cuda":  # on cards without it, a matrix product would succeed by emulation
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return _works(
        lambda: torch.ones(2, 2, dtype=torch.bfloat16, device=device) @ torch.ones(2, 2).to(device, torch.bfloat16)
    )


@functools.cache
def replaces_parameters(device: torch.device) -> bool:
    """Whether moving a parameter from the host to the device creates a new one, as on native devices."""
    if device.type in ("cpu", "meta"):
        return False
    return not torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device))


@functools.cache
def can_pin_memory(device: torch.device) -> bool:
    """Whether pinned memory speeds up copies to the device."""
    return device.type != "cpu" and _works(lambda: torch.empty(1).pin_memory())


def copies_while_computing(device: torch.device) -> bool:
    """Whether values of the device can be copied to the host while it computes."""
    return can_pin_memory(device) and hasattr(getattr(torch, device.type, None), "Event")


def _works(attempt: Any) -> bool:
    """Whether a small test on the device succeeds."""
    try:
        attempt()
    except (RuntimeError, TypeError, NotImplementedError, AssertionError):
        return False
    return True


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if is_lazy(device):
        lazy_runtime().wait()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


def address_of(tensor: torch.Tensor, *, of_storage: bool = False) -> int:
    """The address of a tensor or its storage: equal for tensors that share memory on their device."""
    if is_lazy(tensor.device):  # lazy tensors have no address
        return lazy_runtime().identity(tensor)
    return tensor.untyped_storage().data_ptr() if of_storage else tensor.data_ptr()


def is_lazy(device: torch.device) -> bool:
    """Whether the device executes operations lazily."""
    return device.type == LAZY


def empty_cache(device: torch.device) -> None:
    """Release cached device memory that torch does not use."""
    release = getattr(_backend(device), "empty_cache", None)
    if release is not None:
        release()


def memory_figures(device: torch.device) -> dict[str, int]:
    """Bytes in use, peak bytes since the last reset, and bytes reserved; only those the device reports."""
    backend = _backend(device)
    if device.type == "cpu":
        return {}
    questions = {
        "allocated": ("memory_allocated", "current_allocated_memory"),
        "peak": ("max_memory_allocated",),
        "reserved": ("memory_reserved", "driver_allocated_memory"),
    }
    figures = {}
    for name, functions in questions.items():
        found = [getattr(backend, function) for function in functions if hasattr(backend, function)]
        if found:
            figures[name] = int(found[0](*_at(device)))
    return figures


def total_memory(device: torch.device) -> int | None:
    """Total (not free) device memory usable by this process, or None if the device does not report it."""
    if device.type == "cpu" or not hasattr(_backend(device), "get_device_properties"):
        return None
    total = getattr(_backend(device).get_device_properties(device), "total_memory", None)
    share = getattr(_backend(device), "get_per_process_memory_fraction", lambda device: 1.0)
    return None if total is None else int(total * share(device))


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak measurement, if the device has one."""
    if hasattr(_backend(device), "reset_peak_memory_stats"):
        _backend(device).reset_peak_memory_stats(*_at(device))


def rng_state(device: torch.device) -> torch.Tensor:
    """The state of the device's random number generator."""
    state: torch.Tensor = (
        torch.get_rng_state() if device.type == "cpu" else _backend(device).get_rng_state(*_at(device))
    )
    return state


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of the device's random number generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        _backend(device).set_rng_state(state, *_at(device))


def _backend(device: torch.device) -> Any:
    """torch's module for this kind of device (torch.cuda, torch.mps, torch.xpu, ...); None if it has none."""
    return getattr(torch, device.type, None)


def _at(device: torch.device) -> tuple[torch.device, ...]:
    """The device as a positional argument, for backends that accept one."""
    return () if device.type == "mps" else (device,)
