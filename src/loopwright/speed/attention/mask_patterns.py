"""Patterns of attention masks besides padding: windows and chunks; unknown patterns are refused.

transformers describes a mask by a function of two positions. Functions that a few numbers can describe are supported;
others are refused, since ignoring them would change the model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

from torch import Tensor

from .document_mask import is_given, split_at_chunks, with_pattern

SOURCE = "transformers.masking_utils"


class AttentionRefused(Exception):
    """The model's attention is not supported."""


class Pattern(NamedTuple):
    """The positions of its document that a token sees."""

    causal: bool = False
    window: int | None = None
    """Number of positions back, including its own; the same number ahead if the mask is not causal."""
    chunk: int | None = None
    """Documents are split into pieces of this length."""
    only_back: bool = False
    """Whether the window extends backwards only, which is not supported without causality."""

    def and_also(self, other: Pattern) -> Pattern:
        """Both patterns combined."""
        if self.chunk is not None and other.chunk is not None:
            raise AttentionRefused("the model's mask has chunks of two lengths")
        windows = [each for each in (self.window, other.window) if each is not None]
        chunk = other.chunk if self.chunk is None else self.chunk
        only_back = self.only_back or other.only_back
        return Pattern(self.causal or other.causal, min(windows, default=None), chunk, only_back)


def pattern_of(function: Any) -> Pattern:
    """The pattern of a mask function of transformers; raises `AttentionRefused` if it is unknown."""
    found = _parsed(function)
    if found.only_back and not found.causal:
        raise AttentionRefused("the model's mask has a one-sided window")
    if any(each is not None and each < 1 for each in (found.window, found.chunk)):
        raise AttentionRefused("the model's mask has an empty window")
    return found


def _parsed(function: Any) -> Pattern:
    made_by, _, inner = getattr(function, "__qualname__", "").partition(".<locals>.")
    if getattr(function, "__module__", None) != SOURCE:
        raise AttentionRefused(f"the model's mask is built by {made_by or function!r}")
    if not inner and made_by in ("causal_mask_function", "bidirectional_mask_function"):
        return Pattern(causal=made_by == "causal_mask_function")
    if inner and made_by == "and_masks":
        return reduce(Pattern.and_also, map(_parsed, _closure_of(function)["mask_functions"]), Pattern())
    if inner and made_by in _OVERLAYS:
        return _OVERLAYS[made_by](_closure_of(function))
    raise AttentionRefused(f"the model's mask is built by {made_by}")


_OVERLAYS: dict[str, Callable[[dict[str, Any]], Pattern]] = {
    "sliding_window_overlay": lambda values: Pattern(window=int(values["sliding_window"]), only_back=True),
    "sliding_window_bidirectional_overlay": lambda values: Pattern(window=int(values["sliding_window"]) + 1),
    "chunked_overlay": lambda values: Pattern(chunk=int(values["chunk_size"])),
}


def _closure_of(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def mask_of_documents(
    *args: Any, mask_function: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """The documents of a row with the pattern the model requests; None if it was not given documents."""
    if attention_mask is None or not is_given(attention_mask):
        return None
    pattern = pattern_of(mask_function)
    if pattern.chunk is not None:
        tokens = kwargs["batch_size"] * kwargs["q_length"]
        attention_mask = split_at_chunks(attention_mask, pattern.chunk, tokens)
    return with_pattern(attention_mask, causal=pattern.causal, window=pattern.window)
