"""Checks and defaults of a trainer's constructor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..args.base import BaseArguments
from ..args.groups.distributed import read_accelerator_config
from ..args.problems import short
from ..core.user_code.constructor import kind_of, problems_of_arguments
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
    callbacks: Any = None,
    functions: dict[str, Any] | None = None,
) -> None:
    """Raise one error that lists all problems of the constructor's arguments."""
    _check_kinds(args, optimizers, callbacks, functions or {})
    train, evaluation = datasets
    problems = []
    if (model is None) == (model_init is None):
        problems.append("pass exactly one of model and model_init")
    elif model is not None and not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}; create it first" if isinstance(model, type) else type(model).__name__
        problems.append(f"model must be a torch.nn.Module, not {kind}")
    if model_init is not None and any(part is not None for part in optimizers):
        problems.append(
            "optimizers= holds parameters of one model and cannot be combined with model_init; override "
            "create_optimizer"
        )
    if optimizer_cls_and_kwargs is not None and optimizers[0] is not None:
        problems.append("pass optimizers= or optimizer_cls_and_kwargs=, not both")
    wrong_class = None if optimizer_cls_and_kwargs is None else problem_of_class(optimizer_cls_and_kwargs)
    problems += [wrong_class] if wrong_class else []
    problems += problems_of_optimizers(optimizers, model if isinstance(model, nn.Module) else None)
    problems += problems_of_arguments(
        args,
        train_length=train is None or has_length(train),
        has_eval_dataset=evaluation is not None,
        compute_metrics=compute_metrics,
    )
    problems += _two_accumulations(args)
    if problems:
        raise ArgumentsError(problems)


def _two_accumulations(args: BaseArguments) -> list[str]:
    """The problem of two different numbers of micro-batches per step, if any."""
    options = read_accelerator_config(args.accelerator_config).gradient_accumulation_kwargs or {}
    steps, given = options.get("num_steps"), args.gradient_accumulation_steps
    if steps is None or steps == given:
        return []
    problem = (
        f"The `AcceleratorConfig`'s `num_steps` is set but so is gradient_accumulation_steps: {short(steps)} and "
        f"{given}; set only gradient_accumulation_steps"
    )
    return [problem]


def _check_kinds(args: object, optimizers: Any, callbacks: Any, functions: dict[str, Any]) -> None:
    """Refuse arguments of types that the other checks cannot handle."""
    problems = []
    if not isinstance(args, BaseArguments):
        advice = "pass arguments by name" if isinstance(args, nn.Module) else "import it from loopwright too"
        problems.append(f"args must be a loopwright.TrainingArguments, not {kind_of(args)}; {advice}")
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        kind = type(optimizers).__name__
        problems.append(f"optimizers must be a pair (optimizer, scheduler), either of which may be None, not {kind}")
    if callbacks is not None and not isinstance(callbacks, list | tuple):
        problems.append(f"callbacks must be a list of callbacks, not {kind_of(callbacks)}; pass [callback]")
    for name, function in functions.items():
        if function is not None and not callable(function):
            advice = "; pass the datasets by name" if hasattr(function, "__getitem__") else ""
            problems.append(f"{name} must be callable, not {kind_of(function)}{advice}")
    if problems:
        raise ArgumentsError(problems)


def problem_of_class(given: Any) -> str | None:
    """What is wrong with optimizer_cls_and_kwargs."""
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    if is_pair and callable(given[0]) and isinstance(given[1], Mapping):
        return None
    return "optimizer_cls_and_kwargs must be a pair of an optimizer class and a dict of its options"


def problems_of_optimizers(optimizers: tuple[Any, Any], model: nn.Module | None) -> list[str]:
    """What is wrong with a given optimizer and a given schedule."""
    optimizer, scheduler = optimizers
    problems = []
    if optimizer is not None and not (
        callable(getattr(optimizer, "step", None)) and hasattr(optimizer, "param_groups")
    ):
        problems.append(
            f"optimizers[0] must be an optimizer, an object with step and param_groups, not {kind_of(optimizer)}"
        )
    elif optimizer is not None:
        problems += problems_of_optimizer(optimizer, model)
    if scheduler is not None and (isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None))):
        problems.append(
            f"optimizers[1] must be a learning-rate scheduler, an object with step, not {kind_of(scheduler)}"
        )
    elif getattr(scheduler, "optimizer", optimizer) is not optimizer:
        problems.append(
            "optimizers[1] is the schedule of another optimizer and would not change this one; pass "
            "(optimizer, scheduler) with scheduler.optimizer is optimizer"
        )
    return problems


def problems_of_optimizer(optimizer: Any, model: nn.Module | None) -> list[str]:
    """What is wrong with an optimizer for this model."""
    name = type(optimizer).__name__
    if isinstance(optimizer, type):
        return [f"optimizers[0] must be an optimizer, not the class {optimizer.__name__}; use optimizer_cls_and_kwargs"]
    if _needs_closure(optimizer.step):
        text = f"{name}.step needs a closure that computes the loss again, which a trainer does not have"
        return [f"{text}; use an optimizer whose step needs no argument"]
    own = {id(each) for each in model.parameters()} if model is not None else set()
    held = [each for group in optimizer.param_groups for each in group["params"]]
    if own and held and not any(id(each) in own for each in held):
        text = f"the optimizer {name} holds {len(held)} parameters and none of them is the model's"
        return [f"{text}; create it with model.parameters() of the model that is trained"]
    return []


def _needs_closure(step: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.default is parameter.empty


def default_collator(processing_class: Any) -> Callable[[Any], Any]:
    """Padding for tokenizers and sequence feature extractors, stacking for other processing classes."""
    if callable(getattr(processing_class, "pad", None)):
        return DataCollatorWithPadding(processing_class)
    return default_data_collator
