"""Checks and defaults of a trainer's constructor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..args.base import BaseArguments
from ..core.constructor import kind_of, problems_of_arguments
from ..errors import ArgumentsError
from .data.collators import DataCollatorWithPadding, default_data_collator
from .data.loaders import has_length

PARAMETERS = (
    "model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "model_init",
    "compute_loss_func", "compute_metrics", "callbacks", "optimizers", "optimizer_cls_and_kwargs",
    "preprocess_logits_for_metrics", "tokenizer",
)  # fmt: skip
"""All parameters of a trainer's constructor."""


def check_constructor(
    model: nn.Module | None,
    model_init: Callable[..., Any] | None,
    optimizers: tuple[Any, Any],
    optimizer_cls_and_kwargs: Any,
    args: Any,
    datasets: tuple[Any, Any],
    compute_metrics: Any = None,
) -> None:
    """Raise one error that lists all problems of the constructor's arguments."""
    _check_kinds(args, optimizers)
    train, evaluation = datasets
    problems = []
    if (model is None) == (model_init is None):
        problems.append("pass exactly one of model and model_init")
    elif model is not None and not isinstance(model, nn.Module):
        problems.append(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if model_init is not None and any(part is not None for part in optimizers):
        problems.append(
            "optimizers= holds parameters of one model and cannot be combined with model_init; override "
            "create_optimizer"
        )
    if optimizer_cls_and_kwargs is not None and optimizers[0] is not None:
        problems.append("pass optimizers= or optimizer_cls_and_kwargs=, not both")
    problems += problems_of_arguments(
        args,
        train_length=train is None or has_length(train),
        has_eval_dataset=evaluation is not None,
        compute_metrics=compute_metrics,
    )
    if problems:
        raise ArgumentsError(problems)


def _check_kinds(args: object, optimizers: Any) -> None:
    """Refuse arguments of types that the other checks cannot handle."""
    problems = []
    if not isinstance(args, BaseArguments):
        kind = kind_of(args)
        problems.append(f"args must be a loopwright.TrainingArguments, not {kind}; import it from loopwright too")
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        kind = type(optimizers).__name__
        problems.append(f"optimizers must be a pair (optimizer, scheduler), either of which may be None, not {kind}")
    if problems:
        raise ArgumentsError(problems)


def default_collator(processing_class: Any) -> Callable[[Any], Any]:
    """Padding for tokenizers and sequence feature extractors, stacking for other processing classes."""
    if callable(getattr(processing_class, "pad", None)):
        return DataCollatorWithPadding(processing_class)
    return default_data_collator
