"""Objects of the user on their way to the process of a trial and back, through a pipe between the two.

The only file that pickles: nothing is read from a file or another machine, so there is nothing foreign to load.
"""

from __future__ import annotations

import pickle
from typing import IO, Any


def packed(value: Any) -> bytes:
    """A value as bytes; raises any error for one that cannot be packed, because its class defines how it is."""
    return pickle.dumps(value)


def unpacked(data: bytes) -> Any:
    """The value of `packed`."""
    return pickle.loads(data)


def next_value(stream: IO[bytes]) -> Any:
    """The next value of a pipe to which values of `packed` were written."""
    return pickle.load(stream)
