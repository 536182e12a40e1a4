"""Memory estimates from one or two small forward passes: what to recompute, and how many tokens fit.

Hooks measure what autograd saves, for each block and at two sizes, to separate what grows with the tokens from what
does not (half-precision copies of weights, tables).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .recompute import is_kept

POLICIES = ("none", "selective", "full")
"""Which activations inside blocks are recomputed, from none to all."""
USABLE = 0.92
"""Fraction of a device's memory that is used; the rest is for the framework, kernels and fragmentation."""


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes that one forward saves for the backward pass."""

    tokens: int
    outside: int = 0
    """Outside the blocks: embeddings, head, loss."""
    blocks: int = 0
    """Inside all blocks, if nothing is recomputed."""
    matmuls: int = 0
    """Inside all blocks: results of matmuls and attention, which selective checkpointing keeps."""
    inputs: int = 0
    """Inputs of the blocks, which full checkpointing keeps."""
    largest_block: int = 0


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a training step: a fixed part and a part per token of a micro-batch."""

    fixed: int
    per_token: dict[str, float]
    """By recomputation policy: none, selective, full."""

    def at(self, tokens: int, policy: str = "none") -> int:
        """Bytes of a step with micro-batches of this many tokens."""
        return int(self.fixed + tokens * self.per_token[policy])


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure_activations(
    forward: Callable[[], int], *, model: nn.Module, blocks: Sequence[nn.Module]
) -> ActivationBytes:
    """Bytes that one forward saves, measured by hooks; `forward` returns its number of tokens. No backward is run."""
    watch = _Watch(model)
    with watch.over(blocks), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(watch.pack, watch.unpack):
        tokens = forward()
    return ActivationBytes(
        tokens=tokens,
        outside=watch.saved.get(None, 0),
        blocks=sum(size for block, size in watch.saved.items() if block is not None),
        matmuls=watch.matmuls,
        inputs=watch.inputs,
        largest_block=max((size for block, size in watch.saved.items() if block is not None), default=0),
    )


def measure_twice(
    forward: Callable[[int], int],
    *,
    sizes: tuple[int, int],
    model: nn.Module,
    blocks: Sequence[nn.Module],
    sandbox: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[ActivationBytes, ActivationBytes]:
    """Measure a forward at two sizes; `forward(size)` returns its number of tokens.

    `sandbox` is entered around both; it must restore random states and buffers.
    """
    with sandbox():
        small, large = (measure_activations(partial(forward, size), model=model, blocks=blocks) for size in sizes)
    return small, large


class _Watch(TorchDispatchMode):
    """Records what autograd saves in each block, and the results of matmuls and attention there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.saved: dict[nn.Module | None, int] = {}
        self.matmuls = self.inputs = 0
        self._block: nn.Module | None = None
        # Weights and buffers are not counted: they exist anyway.
        self._seen = {_place(each) for each in [*model.parameters(), *model.buffers()]}
        self._entered: set[int] = set()
        self._alive: list[Tensor] = []  # addresses identify storages only while the tensors are alive

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._block is not None and is_kept(function):
            self.matmuls += sum(_size(each) for each in _tensors(result))
        return result

    def pack(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # otherwise it would be kept alive by its own graph
        place = _place(tensor)
        if place not in self._seen:
            self._seen.add(place)
            self._alive.append(tensor)
            self.saved[self._block] = self.saved.get(self._block, 0) + tensor.untyped_storage().nbytes()
        return tensor

    @staticmethod
    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    @contextmanager
    def over(self, blocks: Iterable[nn.Module]) -> Iterator[None]:
        """Track which block is running."""
        handles = []
        for block in blocks:
            handles.append(block.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave, always_call=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._alive.clear()

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        self._block = block
        for tensor in _tensors([args, kwargs]):
            if _place(tensor) not in self._entered:
                self._entered.add(_place(tensor))
                self._alive.append(tensor)
                self.inputs += tensor.untyped_storage().nbytes()

    def _leave(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._block = None


def _place(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage().data_ptr()
    return place


def _size(tensor: Tensor) -> int:
    size: int = tensor.numel() * tensor.element_size()
    return size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


# ---- estimating -----------------------------------------------------------------------------------------------------


def model_bytes(parameters: Iterable[Tensor], *, states: float = 2.0) -> int:
    """Bytes of weights, gradients and optimizer states; `states` is the number of optimizer tensors per weight."""
    total = 0.0
    for parameter in parameters:
        total += _size(parameter) * (2 + states if parameter.requires_grad else 1)
    return int(total)


def estimate_memory(small: ActivationBytes, large: ActivationBytes | None = None, *, model: int) -> MemoryEstimate:
    """The memory of a step, from one or two measured forwards; `model` is the memory of weights and optimizer."""
    slopes = {policy: _line(small, large, policy)[1] for policy in POLICIES}
    # What does not grow with the tokens is needed under every policy.
    constant = max(0.0, _line(small, large, "none")[0])
    return MemoryEstimate(fixed=int(model + constant), per_token=slopes)


def _line(small: ActivationBytes, large: ActivationBytes | None, policy: str) -> tuple[float, float]:
    """Bytes at zero tokens, and bytes per token."""
    first = _bytes_with(small, policy)
    if large is None or large.tokens == small.tokens:
        return 0.0, first / small.tokens
    slope = (_bytes_with(large, policy) - first) / (large.tokens - small.tokens)
    return first - slope * small.tokens, slope


def _bytes_with(kept: ActivationBytes, policy: str) -> int:
    # The backward pass begins outside the blocks, where logits are largest: in addition to the saved part there are the
    # logits themselves, referenced by the output, and their gradient. Later, one block at a time is recomputed.
    if policy == "none":
        return kept.blocks + 3 * kept.outside
    inside = kept.inputs + (kept.matmuls if policy == "selective" else 0)
    return min(kept.blocks, inside) + max(3 * kept.outside, kept.outside + kept.largest_block)


# ---- deciding -------------------------------------------------------------------------------------------------------


def usable_bytes(total: int) -> int:
    """The memory to plan with: a fraction of the total, not what is free now, so that plans are reproducible."""
    return int(total * USABLE)


def tokens_that_fit(estimate: MemoryEstimate, usable: int, policy: str = "none") -> int:
    """The largest token budget of a micro-batch: a power of two, or 0 if not even one token fits."""
    room = usable - estimate.fixed
    per_token = estimate.per_token[policy]
    tokens = int(room / per_token) if per_token > 0 else 0
    return 1 << (tokens.bit_length() - 1) if room > 0 and tokens > 0 else 0
