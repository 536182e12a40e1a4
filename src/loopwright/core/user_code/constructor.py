"""Checks and defaults shared by the constructors of all trainers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ...args.field import nearest
from ...errors import ArgumentsError, ModelError, UnknownArgument
from ...notices import logger
from ..evaluation.loop import needs_compute_result
from .error_notes import add_note, describe

if TYPE_CHECKING:
    from ...args.base import BaseArguments


def adopt_tokenizer(trainer: str, parameters: Iterable[str], processing_class: Any, others: dict[str, Any]) -> Any:
    """The processing class; accepts its old name `tokenizer=`, and raises for any other unknown name."""
    tokenizer = others.pop("tokenizer", None)
    if others:
        raise UnknownArgument([f"{trainer} has no argument {name!r}{nearest(name, parameters)}" for name in others])
    if tokenizer is None:
        return processing_class
    if processing_class is not None:
        raise ArgumentsError("tokenizer= and processing_class= are the same; pass only one of them")
    logger.warning(f"{trainer}(tokenizer=...) is now {trainer}(processing_class=...)")
    return tokenizer


def problems_of_arguments(
    args: BaseArguments, *, train_length: bool, has_eval_dataset: bool, compute_metrics: Any
) -> list[str]:
    """Conflicts between the arguments, the datasets and the metrics."""
    problems = []
    if args.eval_strategy != "no" and not has_eval_dataset:
        problems.append(f"eval_strategy={str(args.eval_strategy)!r} needs an eval_dataset, or set eval_strategy='no'")
    if args.save_strategy == "best" and args.metric_for_best_model is None and compute_metrics is not None:
        problems.append(
            "`args.metric_for_best_model` must be provided: save_strategy='best' with compute_metrics has several "
            "metrics. Name one of them, or 'loss'"
        )
    if not train_length and args.max_steps <= 0:
        problems.append("the train_dataset has no length, so max_steps must say how long to train")
    if args.batch_eval_metrics and inspect.isroutine(compute_metrics) and not needs_compute_result(compute_metrics):
        problems.append(
            "batch_eval_metrics=True calls compute_metrics(prediction, compute_result=...) for every batch, but this "
            "compute_metrics has no parameter compute_result; add it, or set batch_eval_metrics=False"
        )
    return problems


def kind_of(value: Any) -> str:
    """The full name of a value's class, for messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def make_model(model_init: Callable[..., Any], trial: Any = None) -> Any:
    """The model returned by a factory that takes no argument, or the trial of a hyper-parameter search."""
    parameters = inspect.signature(model_init).parameters
    if len(parameters) > 1:
        raise ArgumentsError("model_init takes no argument, or one (the trial)")
    try:
        model = model_init(trial) if parameters else model_init()
    except Exception as error:  # a function of the user's; re-raised with a note
        add_note(error, "model_init", given=f"the trial {describe(trial)}" if parameters else "")
        raise
    if model is None:
        raise ModelError("model_init() returned None; it must return the model")
    return model
