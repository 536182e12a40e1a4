"""The position bias of a T5, computed before its first block is called where blocks are compiled.

The first block of a stack computes the bias, and the others get it as an argument: for torch, these are two variants of
one function, and each is compiled. With the bias as an argument of the first block too, there is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..memory.recompute import is_recomputing
from ..model_stamp import HOOKS

BLOCKS = ("T5Block", "MT5Block")
BIASES = ("position_bias", "encoder_decoder_position_bias")
"""Arguments of a block: the bias of its attention, and that of its cross-attention if it has one."""


class FirstBlocks:
    """Passes the position bias to the first blocks of a T5 that are compiled, within a context."""

    def __init__(self, model: nn.Module) -> None:
        self._found = {block: found for block in model.modules() if (found := _attentions_of(block))}

    @contextmanager
    def given_bias(self, computing: Mapping[nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
        """The context; `computing` has a function for each attention, which computes its bias for any lengths."""
        changed = []
        for block, attentions in self._found.items():
            call = block._compiled_call_impl
            if call is None or not computing.keys() >= set(attentions) or _is_changed(block, attentions):
                continue
            mine = _giving(block, call, [computing[attention] for attention in attentions])
            block._compiled_call_impl = mine
            changed.append((block, call, mine))
        try:
            yield
        finally:
            for block, call, mine in changed:
                if block._compiled_call_impl is mine:  # otherwise it has fallen back and runs eagerly
                    block._compiled_call_impl = call


def _attentions_of(block: nn.Module) -> list[nn.Module]:
    """The attentions of the first block of a stack, in the order of `BIASES`; none for other modules."""
    kind = type(block)
    if kind.__name__ not in BLOCKS or not kind.__module__.startswith("transformers."):
        return []
    found: list[Any] = [part for part in block.modules() if hasattr(part, "has_relative_attention_bias")]
    is_known = 0 < len(found) <= len(BIASES) and set(BIASES) <= set(_arguments(block))
    return found if is_known and found[0].has_relative_attention_bias else []


def _arguments(block: nn.Module) -> list[str]:
    return list(inspect.signature(type(block).forward).parameters)[1:]


def _is_changed(block: Any, attentions: list[nn.Module]) -> bool:
    """Whether a hook or a replaced forward gets the arguments of the block, or prepares its weights for the call."""
    if any(getattr(part, name) for part in block.modules() for name in HOOKS):
        return True
    around = [*([] if is_recomputing(block) else [block]), *getattr(block, "layer", ()), *attentions]
    return any("forward" in vars(part) for part in around)


def _giving(block: nn.Module, call: Callable[..., Any], computing: list[Callable[..., Tensor]]) -> Callable[..., Any]:
    places = [_arguments(block).index(name) for name in BIASES]

    def given(*args: Any, **kwargs: Any) -> Any:
        filled = list(args)
        for place, compute in zip(places, computing, strict=False):
            if place < len(args) and args[place] is None:
                filled[place] = compute(device=args[0].device)
        return call(*filled, **kwargs)

    return given
