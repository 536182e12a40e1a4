"""Counting targets, the kinds of losses, label smoothing."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ModelError
from ..data.columns import innermost
from ..data.static_shapes import IGNORED, Static


class LossKind(Enum):
    """The reduction of the loss of a micro-batch."""

    MEAN = "the mean over the micro-batch's own targets"
    SAMPLES = "the mean over the micro-batch's own samples"
    TOTAL = "a sum over the micro-batch"
    SCALED = "a sum already divided by num_items_in_batch"
    MIXED = "one part divided by num_items_in_batch and another that is not"
    SUM = "a (sum, count) pair"
    OTHER = "not a combination of the losses of a batch's parts"


USES_ITEMS = (LossKind.SCALED, LossKind.MIXED, None)
"""Kinds of losses that receive num_items_in_batch; None: the kind is unknown."""


def find_targets(batch: Any, label_names: list[str]) -> Tensor | None:
    """The tensor of targets for the loss, if the batch has one."""
    if not isinstance(batch, Mapping):
        return None
    for name in ("shift_labels", "labels", *label_names, "label", "label_ids"):
        value = batch.get(name)
        if isinstance(value, Tensor):
            return value
    return None


def count_targets(batch: Any, label_names: list[str], *, shifted: bool) -> Any:
    """Number of targets that the loss of this batch counts; None if the batch has no labels.

    An integer if the labels are in host memory; otherwise a device scalar, because reading it would synchronize.
    """
    targets = find_targets(batch, label_names)
    if targets is None:
        return None
    if targets.is_floating_point() or targets.dtype in (torch.bool, torch.uint8):
        return targets.numel()  # unsigned values cannot be -100
    if shifted and targets.dim() > 1 and batch.get("shift_labels") is None:
        targets = targets[..., 1:]
    count = (targets != IGNORED).sum()
    return int(count) if targets.device.type == "cpu" else count


def count_samples(batch: Any) -> int:
    """The size of a batch without added rows: that of its token ids, or of its first tensor."""
    if isinstance(batch, Static):
        return batch.rows
    if isinstance(batch, Mapping) and "input_ids" in batch:  # images may come first, with a different number of rows
        ids = batch["input_ids"]
        if isinstance(ids, Tensor) and ids.dim() > 1:
            return ids.shape[0]
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else [batch]
    for value in values:
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape[0]
    return 1


def predicts_next_token(model: nn.Module) -> bool:
    """Whether the model's loss ignores the first target, like causal language models of transformers."""
    model = innermost(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    name = type(model).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return True
    return getattr(model, "loss_type", None) == "ForCausalLM"


def is_mean_over_samples(model: nn.Module) -> bool:
    """Whether the loss is that of a CTC model of transformers with the reduction "mean".

    It divides the loss of each sample by the sample's targets, and their sum by the samples. A test with samples that
    have as many targets would not show that.
    """
    config = getattr(model, "config", None)
    return type(model).__name__.endswith("ForCTC") and getattr(config, "ctc_loss_reduction", None) == "mean"


def check_loss(loss: Any) -> Tensor:
    """The loss as a scalar; raises an error that describes any other value."""
    if loss is None:
        raise ModelError("the loss is None: return it at the end of compute_loss, compute_loss_func or the forward")
    if not isinstance(loss, Tensor):
        raise ModelError(f"the loss must be a scalar tensor, but it is a {type(loss).__name__}: {str(loss)[:80]}")
    if loss.dim() == 0:
        return loss
    if loss.numel() == 1:
        return loss.reshape(())
    raise ModelError(
        f"the loss must be a scalar, but its shape is {tuple(loss.shape)}; reduce it with .mean(), or return "
        "(loss.sum(), number_of_targets)"
    )


def check_has_gradient(loss: Tensor) -> None:
    """Raise if the loss depends on no trainable parameter."""
    if not loss.requires_grad:
        raise ModelError(
            "the loss has no gradient: it uses no trainable parameter, or it was detached (.detach(), .item(), "
            "torch.no_grad()). Compute it from the model's outputs"
        )


class LabelSmoother:
    """Cross entropy with smoothed labels over the targets that are not ignored.

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
