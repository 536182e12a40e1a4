"""Training arguments that follow from the rest of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..args.reading import read_bool
from ..core.measure.named_values import OF_EVALUATIONS
from ..tasks.declaration import Task
from ..tasks.fields import DataFields

GENERATED = {"exact_match", "rouge_l", "token_f1"}
"""Metrics that compare generated text, for tasks that generate."""
ERRORS = {"perplexity", "mse", "rmse", "mae", "wer", "cer"}
"""Metrics of the tasks that are better if they are smaller, besides those that end in 'loss'."""


def derived_arguments(
    path: Path, task: Task, data: DataFields, metrics: list[str], given: Mapping[str, Any]
) -> dict[str, tuple[Any, str]]:
    """Values of arguments that were not given, with the reason."""
    validates = data.validation is not None or bool(data.validation_share)
    found: dict[str, tuple[Any, str]] = {
        "output_dir": (str(path.parent / "runs" / path.stem), "the name of the configuration"),
        **{name: (value, f"the task {task.name}") for name, value in task.arguments.items()},
    }
    if is_on(given.get("enable_jit_checkpoint", True)):
        found["save_on_interrupt"] = (True, "the same command resumes")
    if validates:
        by_steps = given.get("eval_steps") is not None
        found["eval_strategy"] = ("steps", "eval_steps") if by_steps else ("epoch", "there is validation data")
    if task.generates and validates and GENERATED & {*metrics}:
        found["predict_with_generate"] = (True, f"the metric {min(GENERATED & {*metrics})}")
    chosen = given.get("metric_for_best_model")
    if isinstance(chosen, str) and is_error(chosen):
        found["greater_is_better"] = (False, f"the metric {chosen}")
    longest = getattr(data, "max_target_length", None)
    generates = is_on(given.get("predict_with_generate", "predict_with_generate" in found))
    if longest is not None and generates and "generation_config" not in given:
        found["generation_max_length"] = (longest, "data.max_target_length")
    is_empty = given.get("output_dir") in (None, "")
    return {name: value for name, value in found.items() if name not in given or (name == "output_dir" and is_empty)}


def is_error(metric: str) -> bool:
    """Whether a metric of a task, with or without the prefix of an evaluation, is better if it is smaller."""
    name = metric.removeprefix(OF_EVALUATIONS)
    return name in ERRORS or name.endswith("loss")


def is_on(value: Any) -> bool:
    """Whether the value of a boolean argument is true, however it was written."""
    try:
        return read_bool(value)
    except ValueError:
        return True  # refused by the check of the field
