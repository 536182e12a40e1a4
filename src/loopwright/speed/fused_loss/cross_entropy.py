"""Cross-entropy from hidden states and the head's weight: logits exist for one chunk of tokens at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import ArgumentsError
from .loss_kernel import LogitMap, softmax_loss_and_gradient_

# Bytes of one chunk of logits. Large chunks make matmuls efficient and reduce how often the weight's gradient is read
# and written; a CPU gains nothing beyond its caches.
GPU_CHUNK_BYTES = 1 << 30
CPU_CHUNK_BYTES = 32 << 20
LEAST_TOKENS, MOST_TOKENS = 1024, 16384
LEAST_TOKENS_ON_CPU = 128
ALIGNED = {"cuda": 64}
"""Number of classes of which a half-precision matrix has a multiple: others are several times slower on the device."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    logit_map: LogitMap | None = None,
    count: int | None = None,
    chunk_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    logits: StandIn | None = None,
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)`, without keeping the logits.

    Required gradients are computed in the forward; a backward that is itself differentiated (`create_graph=True`)
    computes them again from real logits. `logits` represents the logits in the graph. Before the softmax they are
    multiplied by `scale` and capped as `softcap * tanh(logits / softcap)`, or mapped by `logit_map`, which replaces
    both.

    Tokens whose target is `ignore_index` are removed before the matmul. On a GPU that requires `count`, the number of
    counted targets, from the host, to avoid a synchronization. A count that is too large only costs time; one that is
    too small makes loss and gradients NaN (on a CPU it raises an error). Matmuls run in `dtype`, by default the one
    `F.linear` would use here; softmax, loss and the weight's gradient over all chunks in float32, or in float64 for
    float64.
    """
    if reduction not in ("mean", "sum"):
        raise ArgumentsError(f"reduction={reduction!r} must be 'mean' or 'sum'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ArgumentsError(f"label_smoothing={label_smoothing} must be between 0 and 1")
    job = _Job(
        ignore_index=ignore_index,
        is_mean=reduction == "mean",
        label_smoothing=label_smoothing,
        logit_map=LogitMap.of(scale, softcap) if logit_map is None else logit_map,
        count=count,
        chunk_tokens=chunk_tokens,
        dtype=matmul_dtype(hidden) if dtype is None else dtype,
        with_gradient=torch.is_grad_enabled(),
        logits_dtype=None if logits is None else logits.tensor.dtype,
        is_wanted=None if logits is None else logits.is_wanted,
    )
    flat = hidden.reshape(-1, hidden.shape[-1])
    in_graph = (None, None) if logits is None else (logits.tensor, _witness()[0])
    return _LinearCrossEntropy.apply(flat, weight, bias, targets.reshape(-1).long(), job, *in_graph)


@dataclass(frozen=True)
class StandIn:
    """The tensor that represents the logits in the graph, (rows, classes), so that it can receive their gradient."""

    tensor: Tensor
    is_wanted: Callable[[bool], bool]
    """Whether the gradient of the logits may be needed. The argument is whether the backward pass is for all leaves
    rather than for a few tensors. If it returns False, the gradient bypasses the logits.
    """


@cache
def _witness() -> tuple[Tensor, Any]:
    """A tensor whose gradient is never requested, and its node, which runs only in a backward for all leaves."""
    tensor = torch.zeros((), requires_grad=True)
    return tensor, torch.autograd.graph.get_gradient_edge(tensor).node


def _is_of_everything() -> bool:
    return bool(torch._C._will_engine_execute_node(_witness()[1]))


def matmul_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which `F.linear` would multiply `hidden` now; autocast does not change float64."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def tokens_per_chunk(tokens: int, classes: int, dtype: torch.dtype, device: torch.device) -> int:
    """Tokens per chunk: as many as fit the chunk's bytes, distributed evenly."""
    on_cpu = device.type == "cpu"
    row: int = max(1, classes) * dtype.itemsize
    most = (CPU_CHUNK_BYTES if on_cpu else GPU_CHUNK_BYTES) // row
    most = min(max(most, LEAST_TOKENS_ON_CPU if on_cpu else LEAST_TOKENS), MOST_TOKENS)
    even = math.ceil(tokens / max(1, math.ceil(tokens / most)))
    return min(most, math.ceil(max(1, even) / 128) * 128)


@dataclass(frozen=True)
class _Job:
    ignore_index: int
    is_mean: bool
    label_smoothing: float
    logit_map: LogitMap
    count: int | None
    chunk_tokens: int | None
    dtype: torch.dtype
    with_gradient: bool
    logits_dtype: torch.dtype | None
    is_wanted: Callable[[bool], bool] | None

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def from_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The logits as the caller of the loss would compute them, by differentiable operations."""
        z = F.linear(hidden.to(self.dtype), weight.to(self.dtype), None if bias is None else bias.to(self.dtype))
        return self.logit_map.apply(z)[0].to(self.logits_dtype or self.wide)

    def loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss by torch's own function."""
        wide = logits if logits.dtype == torch.float64 else logits.to(self.wide)
        return F.cross_entropy(
            wide, targets, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing,
            reduction="mean" if self.is_mean else "sum",
        )  # fmt: skip


# ---- which rows go through the head ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CountedRows:
    """The rows of hidden states to compute: all of them, or those of `index` (one past the last row is padding)."""

    targets: Tensor
    counted: Tensor  # number of counted targets, on the device
    index: Tensor | None = None
    all_counted: bool = False
    is_broken: Tensor | None = None  # whether there are more counted targets than `count`, on the device


def _choose_rows(targets: Tensor, ignore_index: int, count: int | None) -> _CountedRows:
    choose = _rows_on_host if targets.device.type == "cpu" else _rows_on_device
    return choose(targets, ignore_index, count)


def _rows_on_host(targets: Tensor, ignore_index: int, count: int | None) -> _CountedRows:
    """The counted rows, determined from the targets."""
    index = (targets != ignore_index).nonzero().squeeze(1)
    real = index.numel()
    if count is not None and count < real:
        raise ArgumentsError(f"count={count}, but {real} targets differ from {ignore_index}; pass the exact number")
    if real == targets.numel():
        return _CountedRows(targets, torch.tensor(real), all_counted=True)
    return _CountedRows(targets[index], torch.tensor(real), index, all_counted=True)


def _check_range(targets: Tensor, classes: int) -> None:
    """Raise torch's error for a target out of range on a CPU; on a device, loss and gradient become NaN."""
    if targets.device.type != "cpu" or not targets.numel():
        return
    low, high = (int(each) for each in targets.aminmax())
    if low < 0 or high >= classes:
        raise IndexError(f"Target {low if low < 0 else high} is out of bounds.")


def _rows_on_device(targets: Tensor, ignore_index: int, count: int | None) -> _CountedRows:
    """The counted rows if `count` is given, else all; no synchronization."""
    total = targets.numel()
    mask = targets != ignore_index
    counted = mask.sum()
    if count is None or count >= total:
        return _CountedRows(targets, counted)
    index = _find_true(mask, counted, count)
    chosen = targets.index_select(0, index.clamp(max=total - 1)).masked_fill(index == total, ignore_index)
    return _CountedRows(chosen, counted, index, is_broken=counted > count)


def _find_true(mask: Tensor, true: Tensor, size: int) -> Tensor:
    """The indices where `mask` is true, in order, padded with the length of the mask."""
    try:
        return torch.nonzero_static(mask, size=size, fill_value=mask.numel()).squeeze(1)
    except NotImplementedError:  # not implemented for this device
        return _sort_true(mask, true, size)


def _sort_true(mask: Tensor, true: Tensor, size: int) -> Tensor:
    order = torch.argsort(mask.to(torch.uint8), stable=True, descending=True)[:size]
    places = torch.arange(size, device=mask.device)
    return torch.where(places < true, order, mask.numel())


# ---- loss and gradients ----------------------------------------------------------------------------------------------


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, job: _Job, *in_graph: Any
    ) -> Tensor:
        needs = [needed and job.with_gradient for needed in ctx.needs_input_grad[:3]]
        with without_autocast(hidden.device.type):
            rows = _choose_rows(targets, job.ignore_index, job.count)
            if rows.all_counted:
                _check_range(rows.targets, weight.shape[0])
            total, gradients = _run_chunks(hidden, weight, bias, rows, job, needs)
        loss = total / rows.counted if job.is_mean else total
        divisor = rows.counted.clamp(min=1).to(total.dtype) if job.is_mean else torch.ones_like(total)
        if rows.is_broken is not None:
            loss = loss.masked_fill(rows.is_broken, math.nan)
            divisor = divisor.masked_fill(rows.is_broken, math.nan)
        inputs = (hidden, weight, bias)
        ctx.like = [(each.shape, each.dtype) if needed else None for each, needed in zip(inputs, needs, strict=True)]
        ctx.save_for_backward(*gradients, divisor, rows.index, *inputs, targets)
        ctx.job = job
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        is_wanted = ctx.job.is_wanted is not None and ctx.job.is_wanted(_is_of_everything())
        if is_wanted or torch.is_grad_enabled():
            return _backward_from_logits(ctx, gradient, is_wanted)
        hidden, weight, bias, divisor, index = ctx.saved_tensors[:5]
        factor = gradient / divisor
        like_hidden, like_weight, like_bias = ctx.like
        return (
            _scaled(hidden, factor, like_hidden) if index is None else _spread(hidden, factor, like_hidden, index),
            _scaled(weight, factor, like_weight),
            _scaled(bias, factor, like_bias),
            *(None, None, None, None),
        )


def _backward_from_logits(ctx: Any, gradient: Tensor, is_wanted: bool) -> tuple[Tensor | None, ...]:
    """The gradients from real logits: that of the logits if it is wanted; differentiable if a graph is created."""
    job, targets, tracked = ctx.job, ctx.saved_tensors[8], torch.is_grad_enabled()
    needs = [like is not None for like in ctx.like]
    given = ctx.saved_tensors[5:8]
    with torch.enable_grad(), without_autocast(targets.device.type):
        # Views: a weight that the hidden states also depend on gets that part of its gradient elsewhere.
        parts = [each if each is None else each.view_as(each) if tracked else each.detach() for each in given]
        for part, is_needed in zip(parts, needs, strict=True):
            if part is not None and is_needed and not tracked:
                part.requires_grad_()
        logits = job.from_logits(*parts)
        of = [logits] if is_wanted else [part for part, is_needed in zip(parts, needs, strict=True) if is_needed]
        found = iter(torch.autograd.grad(job.loss_of(logits, targets), of, gradient, create_graph=tracked))
    if is_wanted:
        return (*(None,) * 5, next(found), None)
    return (*(next(found) if is_needed else None for is_needed in needs), *(None,) * 4)


def _scaled(gradient: Tensor | None, factor: Tensor, like: Any) -> Tensor | None:
    """The gradient times a factor, in the dtype of its tensor; the saved gradient is unchanged."""
    if gradient is None:
        return None
    if gradient.dtype == like[1]:
        return gradient * factor
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=like[1]))


def _spread(gradient: Tensor | None, factor: Tensor, like: Any, index: Tensor) -> Tensor | None:
    """The gradient of the chosen rows at their indices among all rows; padding goes to an extra row, then removed."""
    scaled = _scaled(gradient, factor, like)
    if scaled is None:
        return None
    total, width = like[0]
    everywhere = scaled.new_zeros(total + 1, width)
    return everywhere.index_copy_(0, index, scaled)[:total]


def _run_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: _CountedRows, job: _Job, needs: list[bool]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The sum of the losses, and the required gradients of the chosen rows, the weight and the bias."""
    head, shift = _aligned(weight, job.dtype), None if bias is None else _aligned(bias, job.dtype)
    tokens, classes = rows.targets.numel(), weight.shape[0]
    wide = job.wide
    chunk = job.chunk_tokens or tokens_per_chunk(tokens, classes, job.dtype, hidden.device)
    logits = head.new_empty(min(chunk, tokens), head.shape[0])
    losses = head.new_zeros(tokens, dtype=wide)
    # Kept in the wide dtype until it is scaled: rounding twice would be less exact than a loss from logits.
    to_hidden = head.new_empty(tokens, weight.shape[1], dtype=wide) if needs[0] else None
    to_weight = None
    to_bias = head.new_zeros(classes, dtype=wide) if needs[2] else None
    for start in range(0, tokens, chunk):
        part = slice(start, min(start + chunk, tokens))
        taken = _take(hidden, rows.index, part).to(job.dtype)
        z = logits[: part.stop - start]
        torch.mm(taken, head.t(), out=z) if shift is None else torch.addmm(shift, taken, head.t(), out=z)
        losses[part] = softmax_loss_and_gradient_(
            z[:, :classes],  # logits and gradients of added classes remain 0
            rows.targets[part],
            ignore_index=job.ignore_index,
            label_smoothing=job.label_smoothing,
            logit_map=job.logit_map,
            with_gradient=any(needs),
            all_counted=rows.all_counted,
        )
        if to_hidden is not None:
            to_hidden[part] = add_product(None, z, head, wide)
        if needs[1]:
            to_weight = add_product(to_weight, z.t(), taken, wide)
        if to_bias is not None:
            to_bias += z[:, :classes].sum(dim=0, dtype=wide)
    if needs[1] and to_weight is None:
        to_weight = head.new_zeros(weight.shape, dtype=wide)
    return losses.sum(), (to_hidden, None if to_weight is None else to_weight[:classes], to_bias)


def _aligned(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight or bias in the dtype of the product, with zeros for classes that only align it."""
    classes, step = weight.shape[0], ALIGNED.get(weight.device.type, 1)
    if dtype.itemsize > 2 or classes % step == 0:
        return weight.to(dtype)
    found = weight.new_empty(math.ceil(classes / step) * step, *weight.shape[1:], dtype=dtype)
    found[:classes].copy_(weight)
    found[classes:].zero_()
    return found


def _take(hidden: Tensor, index: Tensor | None, part: slice) -> Tensor:
    if index is None:
        return hidden[part]
    return hidden.index_select(0, index[part].clamp(max=hidden.shape[0] - 1))


# ---- adding a product of narrow matrices to a wide one ---------------------------------------------------------------


def _add_alike(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mm(a, b) if total is None else total.addmm_(a, b)


def _add_wide(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if total is None:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.addmm(total, a, b, out_dtype=dtype, out=total)


def _add_wide_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    product = torch.mm(a, b, out_dtype=dtype)
    return product if total is None else total.add_(product)


def _add_narrow_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    product = torch.mm(a, b)
    return product.to(dtype) if total is None else total.add_(product)


# Implementations, best first; which of them works is determined once per device type and dtype.
_WAYS = (_add_wide, _add_wide_product, _add_narrow_product)
_FIRST_WAY: dict[tuple[str, torch.dtype], int] = {}


def add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a @ b, in place, accumulated in `dtype` if the device supports it; without a total, the product."""
    if a.dtype == dtype:
        return _add_alike(total, a, b, dtype)
    key = (a.device.type, a.dtype)
    for way in range(_FIRST_WAY.get(key, 0), len(_WAYS) - 1):
        try:
            result = _WAYS[way](total, a, b, dtype)
        except torch.OutOfMemoryError:
            raise
        except (NotImplementedError, RuntimeError, TypeError):  # not supported by the device or this torch
            continue
        _FIRST_WAY[key] = way
        return result
    result = _add_narrow_product(total, a, b, dtype)
    _FIRST_WAY[key] = len(_WAYS) - 1  # not if this fails too: then something else was wrong
    return result


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """A context in which autocast is off for a device type."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
