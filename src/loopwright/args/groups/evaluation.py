"""When and how to evaluate."""

from __future__ import annotations

from dataclasses import dataclass

from ..field import Group, arg, names_in, non_negative, positive, steps_or_share
from ..names import IntervalStrategy


@dataclass
class EvaluationArgs(Group):
    """When and how to evaluate."""

    title = "Evaluation"

    eval_strategy: IntervalStrategy | str = arg("no", "When to evaluate: no, steps or epoch.")
    eval_steps: float | None = arg(
        None,
        "Steps between two evaluations; below 1, a fraction of all steps; defaults to logging_steps.",
        check=steps_or_share,
    )
    eval_delay: float = arg(0, "Epochs or steps (by eval_strategy) before the first evaluation.", check=non_negative)
    per_device_eval_batch_size: int = arg(8, "Samples per device in one forward pass of evaluation.", check=positive)
    prediction_loss_only: bool = arg(False, "Compute the loss only and discard predictions.")
    eval_on_start: bool = arg(False, "Evaluate before the first step.")
    eval_do_concat_batches: bool = arg(
        True, ("Concatenate predictions of all batches; otherwise keep a list of batches.")
    )
    eval_use_gather_object: bool = arg(False, "All-gather predictions that are not tensors.")
    eval_accumulation_steps: int | None = arg(
        None, "Batches of predictions kept on the device before they move to the host.", check=positive
    )
    eval_loss_reduction: str = arg(
        "item_mean",
        "The evaluation loss: the mean over items, or batch_mean, the mean over batches that transformers reports.",
        choices=("item_mean", "batch_mean"),
    )
    include_for_metrics: list[str] = arg(
        [], "What compute_metrics receives besides predictions and labels.", check=names_in("inputs", "loss")
    )
    batch_eval_metrics: bool = arg(
        False, "Call compute_metrics on every batch, with compute_result=True on the last one."
    )
