"""Attention masks that transformers makes only while it is traced or captured, although nothing is masked.

With such a mask torch cannot use its fast attention kernels. While it is traced or captured, transformers does not read
values, and some versions then make a mask even where no padding mask was given, so that there is no value to read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MASKING = "transformers.masking_utils"


@contextmanager
def without_needless_masks() -> Iterator[None]:
    """Have transformers make no mask where all tokens are seen, or all earlier ones, and no padding mask was given."""
    masking: Any = sys.modules.get(MASKING)
    originals = {name: getattr(masking, name, None) for name in _PLAIN}
    for name, original in originals.items():
        if original is not None:
            setattr(masking, name, _changed(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            if original is not None:
                setattr(masking, name, original)


def _is_plain_causal(padding_mask: Any, q_length: Any, kv_length: Any, *rest: Any, **named: Any) -> bool:
    # transformers 5 passes two offsets and the window, 4.57 one offset and the window.
    offsets = (*rest[:-1], named.get("q_offset", 0), named.get("kv_offset", 0))
    window = named.get("local_attention_size", rest[-1] if rest else None)
    is_plain = padding_mask is None and q_length == kv_length
    return is_plain and all(type(each) is int and each == 0 for each in offsets) and _sees_all(window, kv_length)


def _is_plain_bidirectional(padding_mask: Any, kv_length: Any, local_attention_size: Any = None) -> bool:
    return padding_mask is None and _sees_all(local_attention_size, kv_length)


def _sees_all(window: Any, length: Any) -> bool:
    return window is None or bool(window > length)


_PLAIN: dict[str, Callable[..., bool]] = {
    "_ignore_causal_mask_sdpa": _is_plain_causal,
    "_ignore_bidirectional_mask_sdpa": _is_plain_bidirectional,
}
"""Functions of transformers that say whether a mask is left out, and what decides it without reading values."""
_CHANGED: dict[Any, Any] = {}


def _changed(name: str, original: Any) -> Any:
    """One function for each original, because compiled code checks that it is the same."""
    if original not in _CHANGED:
        is_plain = _PLAIN[name]

        def may_ignore(*args: Any, **kwargs: Any) -> bool:
            return is_plain(*args, **kwargs) or bool(original(*args, **kwargs))

        _CHANGED[original] = may_ignore
    return _CHANGED[original]
