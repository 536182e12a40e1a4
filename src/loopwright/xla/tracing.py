"""Models must not look at values while a step is noted: each look is a graph of its own, and may choose another one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

MASKS = "transformers.masking_utils"


@contextmanager
def noting(inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Inside, transformers makes its masks as it does for a compiler: without asking whether they are needed."""
    masks = sys.modules.get(MASKS)
    before = getattr(masks, "is_tracing", None)
    if before is None:
        with inner:
            yield
        return
    masks.is_tracing = _always  # type: ignore[union-attr]
    try:
        with inner:
            yield
    finally:
        masks.is_tracing = before  # type: ignore[union-attr]


def _always(tensor: Any = None) -> bool:
    return True
