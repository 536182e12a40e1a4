"""Cross-entropy of a chunk of logits: the loss of every row, and the gradient in place of the logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

EXACT = (torch.float32, torch.float64)  # dtypes of the softmax; narrower ones are converted to float32
# Set when the kernel is built: Triton resolves the names in a kernel from the globals of its module.
tl: Any = None
tanh: Any = None


@dataclass(frozen=True)
class LogitMap:
    """An elementwise map of logits: after * tanh(before * x), or before * x without the tanh."""

    before: float = 1.0
    tanh: bool = False
    after: float = 1.0

    @classmethod
    def of(cls, scale: float = 1.0, softcap: float | None = None, after: float = 1.0) -> LogitMap:
        """Scale, then softcap * tanh(x / softcap), then scale again."""
        if softcap is None:
            return cls(before=scale * after)
        return cls(before=scale / softcap, tanh=True, after=softcap * after)

    def times(self, number: float) -> LogitMap:
        """This map followed by a multiplication."""
        if self.tanh:
            return replace(self, after=self.after * number)
        return replace(self, before=self.before * number)

    def capped(self) -> LogitMap | None:
        """This map followed by a tanh; None if it already has one."""
        return None if self.tanh else replace(self, tanh=True)

    def apply(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """The mapped logits, and the tanh that the gradient needs."""
        scaled = logits if self.before == 1.0 else logits * self.before
        if not self.tanh:
            return scaled, None
        capped = torch.tanh(scaled)
        return capped * self.after, capped

    def push_back_(self, gradient: Tensor, capped: Tensor | None) -> Tensor:
        """Convert the gradient of the mapped logits to that of the original ones, in place."""
        if capped is not None:
            gradient.addcmul_(gradient * capped, capped, value=-1.0)
        slope = self.before * self.after
        return gradient if slope == 1.0 else gradient.mul_(slope)


IDENTITY = LogitMap()


def softmax_loss_and_gradient_(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_map: LogitMap = IDENTITY,
    with_gradient: bool = True,
    all_counted: bool = False,
) -> Tensor:
    """The loss of each row of [rows, classes] logits, which are overwritten by the gradient of the sum of losses.

    Rows whose target is `ignore_index` have zero loss and gradient; `all_counted` asserts that there are none. Without
    a gradient, their final contents are undefined. Losses are float32, or float64 for float64 logits.
    """
    if has_kernel(logits):
        return _run_kernel(logits, targets, ignore_index, label_smoothing, logit_map, with_gradient)
    return plain_loss_and_gradient_(
        logits,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        logit_map=logit_map,
        with_gradient=with_gradient,
        all_counted=all_counted,
    )


def plain_loss_and_gradient_(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_map: LogitMap = IDENTITY,
    with_gradient: bool = True,
    all_counted: bool = False,
) -> Tensor:
    """`softmax_loss_and_gradient_` by torch's operations, for devices without the kernel and for tests."""
    ignored = None if all_counted else targets == ignore_index
    column = (targets if ignored is None else targets.masked_fill(ignored, 0)).unsqueeze(1)
    work = logits if logits.dtype in EXACT else logits.float()
    mapped, capped = logit_map.apply(work)
    log_p = torch.log_softmax(mapped, dim=1)
    losses = _losses(log_p, column, label_smoothing)
    if ignored is not None:
        losses.masked_fill_(ignored, 0.0)
    if not with_gradient:
        return losses
    gradient = torch.exp(log_p, out=logits) if work is logits else log_p.exp_()
    if label_smoothing:
        gradient.sub_(label_smoothing / logits.shape[1])
    gradient.scatter_add_(1, column, gradient.new_full((1, 1), label_smoothing - 1.0).expand_as(column))
    logit_map.push_back_(gradient, capped)
    if ignored is not None:
        gradient.masked_fill_(ignored.unsqueeze(1), 0.0)
    if gradient is not logits:
        logits.copy_(gradient)
    return losses


def _losses(log_p: Tensor, column: Tensor, label_smoothing: float) -> Tensor:
    losses = log_p.gather(1, column).squeeze(1).neg_()
    return torch.lerp(losses, -log_p.mean(dim=1), label_smoothing) if label_smoothing else losses


# ---- Triton ----------------------------------------------------------------------------------------------------------


@cache
def _triton() -> Any:
    """The triton module, or None if it is not installed."""
    try:
        import triton
    except ImportError:
        return None
    return triton


@cache
def _is_new_enough(index: int | None) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(index) >= (7, 0)


def has_kernel(logits: Tensor) -> bool:
    """Whether the Triton kernel supports these logits; float64 is computed by torch."""
    narrow = logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
    if not (logits.is_cuda and narrow and logits.stride(1) == 1):
        return False
    return _triton() is not None and _is_new_enough(logits.device.index)


@cache
def build_kernel() -> Any:
    """The kernel, which is compiled on first use."""
    global tl, tanh
    import triton
    import triton.language

    tl = triton.language
    tanh = triton.jit(_tanh)
    return triton.jit(_rows)


def launch_options(classes: int, block: int | None = None, warps: int | None = None) -> dict[str, int]:
    """Classes per block of a program, and the number of warps."""
    block = block or min(8192, max(64, 1 << (classes - 1).bit_length()))
    return {"BLOCK": block, "num_warps": warps or (16 if block >= 8192 else 8 if block >= 2048 else 4)}


def _run_kernel(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    logit_map: LogitMap,
    with_gradient: bool,
    **tuning: int,
) -> Tensor:
    rows, classes = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if not rows:
        return losses
    kernel = build_kernel()
    with torch.cuda.device_of(logits):
        kernel[(rows,)](
            logits,
            logits.stride(0),
            targets.contiguous(),
            losses,
            classes,
            ignore_index,
            float(logit_map.before),
            float(logit_map.after),
            float(label_smoothing),
            TANH=logit_map.tanh,
            SMOOTH=label_smoothing > 0.0,
            GRADIENT=with_gradient,
            **launch_options(classes, **tuning),
        )
    return losses


def _tanh(x):
    """Without libdevice, whose place differs between Triton's versions; cannot overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


def _rows(  # noqa: C901 - a kernel is one function
    logits,
    row_stride,
    targets,
    losses,
    classes,
    ignore_index,
    before,
    after,
    smoothing,
    TANH: tl.constexpr,
    SMOOTH: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program, one row: first the log of the sum of exponentials, then gradients in the place of logits."""
    row = tl.program_id(0).to(tl.int64)  # rows * classes exceeds 2**31
    logits += row * row_stride
    target = tl.load(targets + row)
    lanes = tl.arange(0, BLOCK)
    if target == ignore_index:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, classes, BLOCK):
                at = start + lanes
                tl.store(logits + at, tl.zeros([BLOCK], dtype=logits.dtype.element_ty), mask=at < classes)
        return

    # A target out of range reads nothing and makes loss and gradient NaN, instead of reading foreign memory.
    legal = (target >= 0) & (target < classes)
    chosen = tl.load(logits + target, mask=legal, other=float("nan")).to(tl.float32) * before
    if TANH:
        chosen = tanh(chosen) * after

    top = float("-inf")
    total = 0.0
    plain_sum = 0.0
    for start in range(0, classes, BLOCK):
        at = start + lanes
        inside = at < classes
        z = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32) * before
        if TANH:
            z = tanh(z) * after
        if SMOOTH:
            plain_sum += tl.sum(tl.where(inside, z, 0.0))
        z = tl.where(inside, z, float("-inf"))
        new_top = tl.maximum(top, tl.max(z))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(z - new_top))
        top = new_top
    log_sum = tl.where(legal, top + tl.log(total), float("nan"))

    loss = log_sum - (1.0 - smoothing) * chosen
    if SMOOTH:
        loss -= smoothing * (plain_sum / classes)
    tl.store(losses + row, loss)

    if GRADIENT:
        tl.debug_barrier()  # every warp has read the target's logit before any overwrites it
        for start in range(0, classes, BLOCK):
            at = start + lanes
            inside = at < classes
            z = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32) * before
            capped = z
            if TANH:
                capped = tanh(z)
                z = capped * after
            gradient = tl.exp(z - log_sum)
            if SMOOTH:
                gradient -= smoothing / classes
            gradient = tl.where(at == target, gradient - (1.0 - smoothing), gradient) * before
            if TANH:
                gradient *= after * (1.0 - capped * capped)
            tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=inside)
