"""What the constructor of the trainer checks and fills in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from ..args.field import nearest
from ..core.evaluation.loop import needs_compute_result
from ..core.events import TrainerCallback
from ..errors import ArgumentsError, UnknownArgument
from ..notices import logger
from .arguments import TFTrainingArguments
from .sources import is_columns, is_map_style, is_tf_data

PARAMETERS = (
    "model", "args", "train_dataset", "eval_dataset", "compute_metrics", "tb_writer", "optimizers", "data_collator",
    "callbacks", "model_init", "compute_loss_func", "preprocess_logits_for_metrics", "processing_class", "tokenizer",
)  # fmt: skip


def old_names(processing_class: Any, others: dict[str, Any]) -> tuple[Any, bool | None]:
    """`tokenizer=` and `prediction_loss_only=`, which the constructor took before."""
    tokenizer, loss_only = others.pop("tokenizer", None), others.pop("prediction_loss_only", None)
    if others:
        raise UnknownArgument([f"TFTrainer has no argument {name!r}{nearest(name, PARAMETERS)}" for name in others])
    if tokenizer is not None and processing_class is not None:
        raise ArgumentsError("tokenizer= and processing_class= are the same thing; give one of them")
    if tokenizer is not None:
        logger.warning("TFTrainer(tokenizer=...) is now TFTrainer(processing_class=...)")
    if loss_only is not None:
        logger.warning("TFTrainer(prediction_loss_only=...) is now an argument: TFTrainingArguments(...)")
    return tokenizer if processing_class is None else processing_class, loss_only


def check_constructor(
    model: Any,
    model_init: Callable[..., Any] | None,
    optimizers: Any,
    args: Any,
    datasets: tuple[Any, Any],
    compute_metrics: Any,
) -> None:
    """Everything that is wrong with the constructor's arguments, at once."""
    if not isinstance(args, TFTrainingArguments):
        kind = f"{type(args).__module__}.{type(args).__qualname__}".removeprefix("builtins.")
        raise ArgumentsError(f"args must be a loopwright.TFTrainingArguments, not {kind}")
    train, evaluation = datasets
    problems = []
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        problems.append(f"optimizers must be a pair (optimizer, schedule), not {type(optimizers).__name__}")
    elif model_init is not None and any(part is not None for part in optimizers):
        problems.append("optimizers= holds variables of one model and cannot go with model_init")
    if (model is None) == (model_init is None):
        problems.append("give exactly one of model and model_init")
    if args.eval_strategy != "no" and evaluation is None:
        problems.append(f"eval_strategy={str(args.eval_strategy)!r} needs an eval_dataset, or set eval_strategy='no'")
    if train is not None and args.max_steps <= 0 and not _has_length(train):
        problems.append("the train_dataset has no length, so max_steps must say how long to train")
    if isinstance(compute_metrics, Mapping):
        problems.append("compute_metrics must be a function: metric objects are fed tensors of PyTorch")
    if args.batch_eval_metrics and inspect.isroutine(compute_metrics) and not needs_compute_result(compute_metrics):
        problems.append(
            "batch_eval_metrics=True calls compute_metrics(prediction, compute_result=...) for every batch, but this "
            "compute_metrics has no parameter compute_result; add it, or set batch_eval_metrics=False"
        )
    if problems:
        raise ArgumentsError(problems)


def _has_length(dataset: Any) -> bool:
    if is_tf_data(dataset):
        return int(dataset.cardinality()) >= 0
    return is_columns(dataset) or is_map_style(dataset)


def takes_trial(model_init: Callable[..., Any]) -> bool:
    """Whether a model factory takes the trial of a hyper-parameter search."""
    parameters = inspect.signature(model_init).parameters
    if len(parameters) > 1:
        raise ArgumentsError("model_init takes no argument, or one (the trial)")
    return len(parameters) == 1


class SummaryWriterCallback(TrainerCallback):
    """Writes what is logged through a tf.summary writer the user made."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        with self.writer.as_default():
            for name, value in logs.items():
                if isinstance(value, (int, float)):
                    tf.summary.scalar(name, value, step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.writer.flush()
