"""Random number generators: seeding, saving and restoring their states."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..core.randomness import decode_numpy, decode_python, encode_numpy, encode_python

# cuBLAS reads this when it starts; without it some matrix products differ from run to run.
_DETERMINISTIC_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}


MORE_STREAMS: dict[str, tuple[Callable[[], int], Callable[[int], None]]] = {}
"""Random streams torch does not know of, by name: how to ask where one stands (a whole number), how to put it there."""


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch on every device; `deterministic` also refuses nondeterministic operations."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # covers all accelerators, also those that start later
    for _, put in MORE_STREAMS.values():
        put(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed everything and make torch use only operations that give the same result every time."""
    set_seed(seed)
    for name, value in _DETERMINISTIC_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


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


def rng_to_json(states: dict[str, Any]) -> dict[str, Any]:
    """A snapshot as JSON values that hold only integers, so that nothing is lost to decimal rounding."""
    return {name: _ENCODERS.get(name, int)(state) for name, state in states.items()}


def rng_from_json(encoded: dict[str, Any]) -> dict[str, Any]:
    """The snapshot that `rng_to_json` wrote."""
    known = {**dict.fromkeys(MORE_STREAMS, int), **_DECODERS}
    return {name: known[name](state) for name, state in encoded.items() if name in known}


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


def _encode_tensor(state: torch.Tensor) -> list[int]:
    return state.tolist()


def _decode_tensor(encoded: list[int]) -> torch.Tensor:
    return torch.tensor(encoded, dtype=torch.uint8)


_ENCODERS: dict[str, Any] = {
    "python": encode_python,
    "numpy": encode_numpy,
    "torch": _encode_tensor,
    "accelerator": lambda states: [_encode_tensor(state) for state in states],
}
_DECODERS: dict[str, Any] = {
    "python": decode_python,
    "numpy": decode_numpy,
    "torch": _decode_tensor,
    "accelerator": lambda states: [_decode_tensor(state) for state in states],
}
