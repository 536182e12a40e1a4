"""Constructor checks and defaults of Keras trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.user_code.constructor import adopt_tokenizer, kind_of, problems_of_arguments
from ..errors import ArgumentsError
from ..notices import logger
from .arguments import KerasTrainingArguments
from .data.sources import has_length

PARAMETERS = (
    "model", "args", "train_dataset", "eval_dataset", "compute_metrics", "tb_writer", "optimizers", "data_collator",
    "callbacks", "model_init", "compute_loss_func", "preprocess_logits_for_metrics", "processing_class", "tokenizer",
)  # fmt: skip


def old_names(
    trainer: str, arguments: type[KerasTrainingArguments], processing_class: Any, others: dict[str, Any]
) -> tuple[Any, bool | None]:
    """Handle `tokenizer=` and `prediction_loss_only=`, old parameters of the constructor."""
    loss_only = others.pop("prediction_loss_only", None)
    if loss_only is not None:
        logger.warning(f"{trainer}(prediction_loss_only=...) is deprecated; set it in {arguments.__name__}(...)")
    return adopt_tokenizer(trainer, PARAMETERS, processing_class, others), loss_only


def check_constructor(
    model: Any,
    model_init: Callable[..., Any] | None,
    optimizers: Any,
    args: object,
    datasets: tuple[Any, Any],
    compute_metrics: Any,
    *,
    arguments: type[KerasTrainingArguments],
) -> None:
    """Raise one error with all problems of the constructor's arguments."""
    if not isinstance(args, arguments):
        raise ArgumentsError(f"args must be a loopwright.{arguments.__name__}, not {kind_of(args)}")
    train, evaluation = datasets
    problems = []
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        problems.append(f"optimizers must be a pair (optimizer, schedule), not {type(optimizers).__name__}")
    elif model_init is not None and any(part is not None for part in optimizers):
        problems.append("optimizers= belongs to one model and cannot be combined with model_init")
    if (model is None) == (model_init is None):
        problems.append("pass exactly one of model and model_init")
    if isinstance(compute_metrics, Mapping):
        problems.append("compute_metrics must be a function; metric objects need PyTorch tensors")
    problems += problems_of_arguments(
        args,
        train_length=train is None or has_length(train),
        has_eval_dataset=evaluation is not None,
        compute_metrics=compute_metrics,
    )
    if problems:
        raise ArgumentsError(problems)
