"""Preserving random states, and encoding those of Python and numpy as JSON values with integers only."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .checkpoint.schema import count, list_of, maybe, one_of, record
from .strategy import Strategy

_WORD, _BITS = count(most=2**32 - 1), count(most=2**64 - 1)
PYTHON_RNG = record({"version": one_of(3), "words": list_of(_WORD, length=625), "gauss": maybe(_BITS)})
NUMPY_RNG = record(
    {"words": list_of(_WORD, length=624), "position": count(most=624), "has_gauss": count(most=1), "gauss": _BITS}
)


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
