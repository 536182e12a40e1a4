"""Preserving random states, and encoding those of Python and numpy as JSON values with integers only."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .strategy import Strategy


@contextmanager
def untouched_rng(strategy: Strategy) -> Iterator[None]:
    """Restore all random states on exit."""
    states = strategy.rng_state()
    try:
        yield
    finally:
        strategy.load_rng_state(states)


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")


def _unbits(value: int) -> float:
    return float(struct.unpack("<d", value.to_bytes(8, "little"))[0])


def encode_python(state: Any) -> dict[str, Any]:
    version, words, gauss = state
    return {"version": version, "words": list(words), "gauss": None if gauss is None else _bits(gauss)}


def decode_python(encoded: dict[str, Any]) -> Any:
    gauss = encoded["gauss"]
    return (encoded["version"], tuple(encoded["words"]), None if gauss is None else _unbits(gauss))


def encode_numpy(state: Any) -> dict[str, Any]:
    _, words, position, has_gauss, gauss = state
    return {
        "words": words.tolist(),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "gauss": _bits(gauss),
    }


def decode_numpy(encoded: dict[str, Any]) -> Any:
    words = np.array(encoded["words"], dtype=np.uint32)
    return ("MT19937", words, encoded["position"], encoded["has_gauss"], _unbits(encoded["gauss"]))
