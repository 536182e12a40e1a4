"""Values that no argument, or hardly any, is made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


class Unprintable:
    """A value whose repr raises."""

    def __repr__(self) -> str:
        raise ValueError("no repr")


VALUES: dict[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    "0": 0,
    "1": 1,
    "-1": -1,
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "0.5": 0.5,
    "1e-300": 1e-300,
    "5e-324": 5e-324,
    "1e300": 1e300,
    "2**31": 2**31,
    "2**63": 2**63,
    "-2**63-1": -(2**63) - 1,
    "10**400": 10**400,
    "10**5000": 10**5000,
    "text 1": "1",
    "text 3.5": "3.5",
    "text 1e400": "1e400",
    "text yes": "yes",
    "text auto": "auto",
    "text all": "all",
    "text x": "x",
    "empty": "",
    "NUL": "a\0b",
    "newline": "a\nb",
    "surrogate": "\udcff",
    "long": "x" * 100_000,
    "long names": "?" * 20_000,
    "brace": "{",
    "brackets": "[]",
    "json": '{"a": [1, {"b": null}]}',
    "bytes": b"x",
    "path": Path("x"),
    "list": [],
    "[None]": [None],
    "[1]": [1],
    "['x']": ["x"],
    "nested": [[1]],
    "tuple": (1, 2),
    "set": {1},
    "dict": {},
    "deep dict": {"a": {"b": [1]}},
    "integer keys": {1: 2},
    "complex": 1j,
    "object": object(),
    "unprintable": Unprintable(),
    "class": int,
    "function": len,
    "array": np.ones(2),
    "numpy float": np.float32(2),
    "numpy int": np.int64(2),
}
