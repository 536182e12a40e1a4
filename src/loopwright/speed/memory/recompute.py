"""Selective activation checkpointing: results of matmuls and attention are kept, cheap operations are recomputed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

MATMULS = frozenset(
    {
        "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "linear", "matmul",
        "convolution", "_convolution", "mkldnn_linear", "linear_pointwise",
    }
)  # fmt: skip
"""Names of operations whose results cost more to recompute than to keep."""
ATTENTION = ("attention", "attn")
"""Common parts of the names of attention kernels, including registered ones."""


def is_kept(operation: Any) -> bool:
    """Whether the results of an operation are kept for the backward pass."""
    name = str(getattr(operation, "__name__", operation)).split(".")[0]
    packet = getattr(operation, "overloadpacket", None)
    if packet is not None:
        name = packet.__name__
    return name in MATMULS or any(word in name for word in ATTENTION)


def keep_matmuls(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy function for torch's selective checkpointing."""
    return CheckpointPolicy.MUST_SAVE if is_kept(operation) else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_selectively(blocks: Sequence[nn.Module]) -> Recomputing:
    """Make each block recompute what is cheap; returns an object that undoes it. Names in state dicts are unchanged."""
    recomputing = Recomputing()
    for block in blocks:
        recomputing.put_on(block)
    return recomputing


class Recomputing:
    """The blocks that recompute, and their previous `forward` attributes."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, Any]] = []

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks that recompute."""
        return [block for block, _ in self._before]

    def put_on(self, block: nn.Module) -> None:
        """Wrap the forward of one block, unless it is already wrapped."""
        if is_recomputing(block):
            return
        self._before.append((block, block.__dict__.get("forward")))
        # A partial of the bound method: copying the model copies both, and the copy calls its own block.
        block.forward = functools.partial(_recomputed, block.forward)

    def remove(self) -> None:
        """Restore the blocks' own forward."""
        while self._before:
            block, forward = self._before.pop()
            if forward is None:
                block.__dict__.pop("forward", None)
            else:
                block.forward = forward


def is_recomputing(block: nn.Module) -> bool:
    """Whether a block's forward is wrapped."""
    forward = block.__dict__.get("forward")
    return isinstance(forward, functools.partial) and forward.func is _recomputed


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts, **kwargs)


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(keep_matmuls)
