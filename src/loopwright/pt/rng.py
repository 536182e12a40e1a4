"""Random number generators: seeding, and their states as JSON."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch

from ..core.checkpoint.schema import count, list_of, record
from ..core.randomness import NUMPY_RNG, PYTHON_RNG, decode_numpy, decode_python, encode_numpy, encode_python
from ..snapshot import MORE_STREAMS

# cuBLAS reads this when it starts; without it some matrix products differ between runs.
_DETERMINISTIC_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}


_BYTES = list_of(count(most=255))
SAVED_RNG = record({"python": PYTHON_RNG, "numpy": NUMPY_RNG, "torch": _BYTES}, {"accelerator": list_of(_BYTES)})
"""rng.json; streams of other devices are integers."""


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch on every device; `deterministic` also refuses nondeterministic operations."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # covers all accelerators, also those initialized later
    for _, put in MORE_STREAMS.values():
        put(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed everything and make torch use only deterministic operations."""
    set_seed(seed)
    for name, value in _DETERMINISTIC_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def rng_to_json(states: dict[str, Any]) -> dict[str, Any]:
    """A snapshot as JSON values with integers only, so that no precision is lost."""
    return {name: _ENCODERS.get(name, int)(state) for name, state in states.items()}


def rng_from_json(encoded: dict[str, Any]) -> dict[str, Any]:
    """The snapshot that `rng_to_json` wrote."""
    known = {**dict.fromkeys(MORE_STREAMS, int), **_DECODERS}
    return {name: known[name](state) for name, state in encoded.items() if name in known}


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
