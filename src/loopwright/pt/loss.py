"""Who divides the loss by what: counting targets, finding out how a loss is scaled, label smoothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .columns import innermost
from .devices import is_lazy
from .seeding import untouched_rng
from .shapes import IGNORED, Static


class LossKind(Enum):
    """What a loss function returns for a micro-batch."""

    MEAN = "the mean over the micro-batch's own targets"
    SCALED = "a sum already divided by num_items_in_batch"
    MIXED = "one part divided by num_items_in_batch and another that is not"
    SUM = "a (sum, count) pair"


def find_targets(batch: Any, label_names: list[str]) -> Tensor | None:
    """The tensor of targets the loss will use, if the batch names one."""
    if not isinstance(batch, Mapping):
        return None
    for name in ("shift_labels", "labels", *label_names, "label", "label_ids"):
        value = batch.get(name)
        if isinstance(value, Tensor):
            return value
    return None


def count_targets(batch: Any, label_names: list[str], *, shifted: bool) -> Any:
    """How many targets the loss of this batch counts; None when the batch has no labels.

    A whole number when the labels are in host memory; a device scalar otherwise, since reading it would wait.
    """
    targets = find_targets(batch, label_names)
    if targets is None:
        return None
    if targets.is_floating_point() or targets.dtype is torch.bool:
        return targets.numel()
    if shifted and targets.dim() > 1 and batch.get("shift_labels") is None:
        targets = targets[..., 1:]
    count = (targets != IGNORED).sum()
    return int(count) if targets.device.type == "cpu" else count


def count_samples(batch: Any) -> int:
    """The size of a batch: the first dimension of its first tensor, without rows that were added."""
    if isinstance(batch, Static):
        return batch.rows
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else [batch]
    for value in values:
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape[0]
    return 1


def predicts_next_token(model: nn.Module) -> bool:
    """Whether the model's own loss leaves out the first target: causal language models of transformers do."""
    model = innermost(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    name = type(model).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return True
    return getattr(model, "loss_type", None) == "ForCausalLM"


def check_loss(loss: Any) -> Tensor:
    """The loss as a scalar, or an error that says what it is instead."""
    if not isinstance(loss, Tensor):
        raise ModelError(f"the loss must be a scalar tensor, but it is {type(loss).__name__}: {str(loss)[:80]}")
    if loss.dim() == 0:
        return loss
    if loss.numel() == 1:
        return loss.reshape(())
    raise ModelError(
        f"the loss must be a scalar, but its shape is {tuple(loss.shape)}; reduce it with .mean(), "
        "or return (loss.sum(), number_of_targets)"
    )


def check_has_gradient(loss: Tensor) -> None:
    """Raise if nothing trainable took part in the loss."""
    if not loss.requires_grad:
        raise ModelError(
            "the loss has no gradient: nothing trainable took part in it, or it was detached on the way (.detach(), "
            ".item(), torch.no_grad()); compute it from the model's outputs"
        )


ComputeLoss = Callable[[dict[str, Any], Any], Any]
"""The trainer's whole loss computation: inputs and num_items_in_batch to a loss."""


class LossProbe:
    """Finds out how a loss is scaled by computing it again; leaves random states and buffers as they were."""

    def __init__(self, compute: ComputeLoss, model: nn.Module, *, tolerance: float = 1e-5) -> None:
        self._compute = compute
        self._model = model
        self._tolerance = tolerance

    def kind(self, inputs: dict[str, Any], items: int) -> LossKind | None:
        """How the loss uses num_items_in_batch: computed with k and with 2k. None if this batch cannot tell."""
        loss = self._loss(inputs, items)
        if isinstance(loss, (tuple, list)):
            return LossKind.SUM
        once, twice = _number(loss), _number(self._loss(inputs, 2 * items))
        if not abs(once) > 0 or once != once or twice != twice:
            return None
        if self._close(once, twice):
            return LossKind.MEAN
        return LossKind.SCALED if self._close(once, 2 * twice) else LossKind.MIXED

    def shifted(self, inputs: dict[str, Any], label_names: list[str]) -> bool | None:
        """Whether the loss ignores the first target of each row: computed with other ones there.

        None if this batch cannot tell.
        """
        targets = find_targets(inputs, label_names)
        if targets is None or "shift_labels" in inputs or targets.dim() < 2 or targets.shape[-1] < 2:
            return False
        if targets.is_floating_point() or targets.dtype is torch.bool:
            return False
        first = torch.zeros_like(targets, dtype=torch.bool)
        first[..., 0] = True
        others = _other_classes(targets)
        if others is None or bool((targets[first] == IGNORED).all()):
            return None
        name = next(name for name, value in inputs.items() if value is targets)
        # The count is the batch's own, and the same each time, for losses that cannot do without one.
        items = count_targets(inputs, label_names, shifted=False)

        def value(labels: Tensor) -> float:
            return _number(self._loss({**inputs, name: labels}, items))

        plain = value(targets)
        if plain == 0 or plain != plain:
            return None
        without = value(torch.where(first, others, targets))
        if without != without:
            return None
        # A loss that ignores every target, not just the first ones, is not shifted.
        return plain == without and plain != value(torch.where(first, targets, others))

    def _close(self, a: float, b: float) -> bool:
        return abs(a - b) <= self._tolerance * max(abs(a), abs(b))

    def _loss(self, inputs: dict[str, Any], items: Any) -> Any:
        with torch.no_grad(), untouched_rng(), untouched_buffers(self._model):
            return self._compute(dict(inputs), items)


def _number(loss: Any) -> float:
    """A loss, or the sum of a (sum, count) pair, as a host number."""
    return check_loss(loss[0] if isinstance(loss, (tuple, list)) else loss).double().item()


def _other_classes(targets: Tensor) -> Tensor | None:
    """Another class for every target that counts; None if no target counts.

    Not every loss can take a class that does not exist, or an ignored target: the classes are those of the batch or,
    where it has only one, 0 and 1, which exist wherever the loss is not 0.
    """
    counted = targets[targets != IGNORED]
    if counted.numel() == 0:
        return None
    low, high = counted.min(), counted.max()
    if bool(low == high):
        low = (high == 0).to(high.dtype)
    return torch.where(targets == IGNORED, targets, torch.where(targets == high, low, high))


@contextmanager
def untouched_buffers(model: nn.Module) -> Iterator[None]:
    """Put every buffer (running statistics, counters) back as it was."""
    saved = [(buffer, buffer.clone()) for buffer in model.buffers() if not is_lazy(buffer.device)]
    # On a lazy device even putting back what is there is work, so copies stand in and the originals stay out.
    lazy = [
        (module._buffers, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and is_lazy(buffer.device)
    ]
    for place, name, buffer in lazy:
        place[name] = buffer.clone()
    try:
        yield
    finally:
        for place, name, buffer in lazy:
            place[name] = buffer
        with torch.no_grad():
            for buffer, value in saved:
                buffer.copy_(value)


class LabelSmoother:
    """Cross entropy with smoothed labels over the targets that count.

    `(1 - epsilon) * nll + epsilon * mean over classes`; divided by `num_items_in_batch` if given, else by the targets.
    """

    def __init__(self, epsilon: float = 0.1, ignore_index: int = IGNORED) -> None:
        self.epsilon, self.ignore_index = epsilon, ignore_index

    def __call__(
        self, model_output: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        logits = model_output["logits"] if isinstance(model_output, Mapping) else model_output[0]
        if logits.dim() == 0:  # (loss, logits)
            logits = model_output[1]
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        total = torch.nn.functional.cross_entropy(
            logits, labels, ignore_index=self.ignore_index, label_smoothing=self.epsilon, reduction="sum"
        )
        if num_items_in_batch is None:
            num_items_in_batch = (labels != self.ignore_index).sum()
        return total / num_items_in_batch
