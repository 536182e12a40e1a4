"""What a model puts into its attention masks besides padding: windows, chunks, and what nobody here knows.

transformers describes a mask by a function of two places. Of those it is made of, the ones that can be said in a few
numbers are known here; any other is refused, since leaving it out would be another model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from .documents import is_given, split_at_chunks, with_pattern

SOURCE = "transformers.masking_utils"


class AttentionRefused(Exception):
    """What a model asks of its attention is not what ours computes."""


class Pattern(NamedTuple):
    """Which places of its document a token sees."""

    causal: bool = False
    window: int | None = None
    """How many places back, its own included; the same ahead where it is not causal."""
    chunk: int | None = None
    """Documents are cut to this length."""

    def and_also(self, other: Pattern) -> Pattern:
        """Both at once."""
        if self.chunk is not None and other.chunk is not None:
            raise AttentionRefused("its mask has chunks of two lengths")
        windows = [each for each in (self.window, other.window) if each is not None]
        chunk = other.chunk if self.chunk is None else self.chunk
        return Pattern(self.causal or other.causal, min(windows, default=None), chunk)


def pattern_of(function: Any) -> Pattern:
    """What a mask function of transformers lets through; raises `AttentionRefused` for one that is not known."""
    made_by, _, inner = getattr(function, "__qualname__", "").partition(".<locals>.")
    if getattr(function, "__module__", None) != SOURCE:
        raise AttentionRefused(f"its mask is made by {made_by or function!r}")
    if not inner:
        return _plain(made_by)
    values = _closure_of(function)
    if made_by == "and_masks":
        return _all_of(values["mask_functions"])
    if made_by in _OVERLAYS:
        return _OVERLAYS[made_by](values)
    raise AttentionRefused(f"its mask is made by {made_by}")


def _plain(name: str) -> Pattern:
    if name not in ("causal_mask_function", "bidirectional_mask_function"):
        raise AttentionRefused(f"its mask is made by {name}")
    return Pattern(causal=name == "causal_mask_function")


def _all_of(functions: Any) -> Pattern:
    """What all of these let through. A window that looks ahead without end must be cut off by another part."""
    names = [each.__qualname__.partition(".<locals>.")[0] for each in functions]
    found = Pattern()
    for function in functions:
        found = found.and_also(pattern_of(function))
    if "sliding_window_overlay" in names and not found.causal:
        raise AttentionRefused("its mask has a window without an end")
    return found


_OVERLAYS: dict[str, Callable[[dict[str, Any]], Pattern]] = {
    "sliding_window_overlay": lambda values: Pattern(window=int(values["sliding_window"])),
    "sliding_window_bidirectional_overlay": lambda values: Pattern(window=int(values["sliding_window"]) + 1),
    "chunked_overlay": lambda values: Pattern(chunk=int(values["chunk_size"])),
}


def _closure_of(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def mask_of_documents(
    *args: Any, mask_function: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """The documents of a row with the pattern a model asks for; None where it was given no documents."""
    if attention_mask is None or not is_given(attention_mask):
        return None
    pattern = pattern_of(mask_function)
    if pattern.chunk is not None:
        tokens = kwargs["batch_size"] * kwargs["q_length"]
        attention_mask = split_at_chunks(attention_mask, pattern.chunk, tokens)
    return with_pattern(attention_mask, causal=pattern.causal, window=pattern.window)
