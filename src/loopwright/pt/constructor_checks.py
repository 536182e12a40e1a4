"""What the constructor of a trainer checks and fills in."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ..args.base import BaseArguments
from ..args.field import nearest
from ..core.evaluation.loop import needs_compute_result
from ..errors import ArgumentsError, UnknownArgument
from ..notices import logger
from .data.collators import DataCollatorWithPadding, default_data_collator
from .data.loaders import has_length

PARAMETERS = (
    "model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "model_init",
    "compute_loss_func", "compute_metrics", "callbacks", "optimizers", "optimizer_cls_and_kwargs",
    "preprocess_logits_for_metrics", "tokenizer",
)  # fmt: skip
"""Every name the constructor of a trainer takes."""


def old_tokenizer(processing_class: Any, old_names: dict[str, Any]) -> Any:
    """`tokenizer=` is what `processing_class=` was called before."""
    tokenizer = old_names.pop("tokenizer", None)
    if old_names:
        raise UnknownArgument([f"Trainer has no argument {name!r}{nearest(name, PARAMETERS)}" for name in old_names])
    if tokenizer is None:
        return processing_class
    if processing_class is not None:
        raise ArgumentsError("tokenizer= and processing_class= are the same; pass only one of them")
    logger.warning("Trainer(tokenizer=...) is now Trainer(processing_class=...)")
    return tokenizer


def check_constructor(
    model: nn.Module | None,
    model_init: Callable[..., Any] | None,
    optimizers: tuple[Any, Any],
    optimizer_cls_and_kwargs: Any,
    args: Any,
    datasets: tuple[Any, Any],
    compute_metrics: Any = None,
) -> None:
    """Everything that is wrong with the constructor's arguments, at once."""
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
    if args.eval_strategy != "no" and evaluation is None:
        problems.append(
            f"eval_strategy={str(args.eval_strategy)!r} needs an eval_dataset; pass one, or set eval_strategy='no'"
        )
    if train is not None and not has_length(train) and args.max_steps <= 0:
        problems.append("the train_dataset has no length, so set max_steps")
    if args.batch_eval_metrics and inspect.isroutine(compute_metrics) and not needs_compute_result(compute_metrics):
        problems.append(
            "batch_eval_metrics=True calls compute_metrics(prediction, compute_result=...) for every batch, but this "
            "compute_metrics has no parameter compute_result; add it, or set batch_eval_metrics=False"
        )
    if problems:
        raise ArgumentsError(problems)


def _check_kinds(args: Any, optimizers: Any) -> None:
    """Refuse what the other checks could not even read."""
    problems = []
    if not isinstance(args, BaseArguments):
        kind = f"{type(args).__module__}.{type(args).__qualname__}".removeprefix("builtins.")
        problems.append(f"args must be a loopwright.TrainingArguments, not {kind}; import it from loopwright too")
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        kind = type(optimizers).__name__
        problems.append(f"optimizers must be a pair (optimizer, scheduler), either of which may be None, not {kind}")
    if problems:
        raise ArgumentsError(problems)


def default_collator(processing_class: Any) -> Callable[[Any], Any]:
    """Padding for tokenizers and sequence feature extractors, stacking for everything else."""
    if callable(getattr(processing_class, "pad", None)):
        return DataCollatorWithPadding(processing_class)
    return default_data_collator


def takes_trial(model_init: Callable[..., Any]) -> bool:
    """Whether a model factory takes the trial of a hyper-parameter search."""
    parameters = inspect.signature(model_init).parameters
    if len(parameters) > 1:
        raise ArgumentsError("model_init takes no argument, or one (the trial)")
    return len(parameters) == 1
