"""Formatting of metrics: prefixes, plain numbers, tables, result files."""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...args.problems import short
from ...errors import MetricError
from ..logs.json_values import DEEPEST


def with_prefix(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The metrics with `prefix_` before every name that does not have it; these are last, and win."""
    has = {name: value for name, value in metrics.items() if name.startswith(f"{prefix}_")}
    return {**has, **{f"{prefix}_{name}": value for name, value in metrics.items() if name not in has}}


def checked_metrics(metrics: Any) -> dict[str, Any]:
    """The result of a metrics function: a dict of names and values."""
    if not isinstance(metrics, Mapping):
        raise MetricError(
            f"compute_metrics returned {short(metrics)}, not a dict; return a dict of names and numbers, such as "
            '{"accuracy": 0.9}'
        )
    names = [name for name in metrics if not isinstance(name, str)]
    if names:
        raise MetricError(
            f"compute_metrics returned a metric named {short(names[0])}, a {type(names[0]).__name__}; use text as names"
        )
    return dict(metrics)


def full_name(metric: str) -> str:
    """The logged name of a metric: `loss` is `eval_loss`."""
    return metric if metric.startswith("eval_") else f"eval_{metric}"


def plain_numbers(value: Any, levels: int = DEEPEST) -> Any:
    """Convert numpy and other one-element values to Python numbers, for printing and JSON."""
    if levels == 0:
        raise MetricError(f"a metric has more than {DEEPEST} levels, or contains itself; return numbers")
    if isinstance(value, Mapping):
        return {name: plain_numbers(each, levels - 1) for name, each in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain_numbers(each, levels - 1) for each in value]
    if isinstance(value, (str, bytes, int, float, bool)) or value is None or np.ma.is_masked(value):
        return value
    return _listed(value)


def _listed(value: Any) -> Any:
    """The number or list in an array or tensor; other objects, and tensors without values, as they are."""
    try:
        if getattr(value, "size", None) == 1 or (callable(getattr(value, "numel", None)) and value.numel() == 1):
            return value.item()
        return value.tolist() if hasattr(value, "tolist") else value
    except RuntimeError:  # on torch's meta device
        return value


def readable(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics with times as clock times, memory in MB, operations in GF and floats rounded."""
    return {name: _readable(name, value) for name, value in metrics.items()}


def _readable(name: str, value: Any) -> Any:
    if "_mem_" in name:
        return f"{int(value) >> 20}MB"
    if "_runtime" in name:
        return f"{datetime.timedelta(seconds=int(value))}.{int(abs(value - int(value)) * 100):02d}"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value


def table(split: str, metrics: Mapping[str, Any]) -> str:
    """The metrics as lines of aligned names and values under a heading."""
    shown = readable(metrics)
    names = max((len(name) for name in shown), default=0)
    values = max((len(str(value)) for value in shown.values()), default=0)
    lines = [f"  {name: <{names}} = {str(shown[name]):>{values}}" for name in sorted(shown)]
    return "\n".join([f"***** {split} metrics *****", *lines])


def write_results(folder: str | os.PathLike[str], split: str, metrics: Mapping[str, Any], *, combined: bool) -> None:
    """Write {split}_results.json and, when combined, add the metrics to all_results.json."""
    _write_json(os.path.join(folder, f"{split}_results.json"), dict(metrics))
    if not combined:
        return
    path = os.path.join(folder, "all_results.json")
    known: dict[str, Any] = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            known = json.load(file)
    _write_json(path, {**known, **metrics})


def _write_json(path: str, values: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(values, file, indent=4, sort_keys=True)


def better(new: float, best: float | None, *, greater_is_better: bool) -> bool:
    """Whether a metric is better than the best one so far. NaN is never better, and any number is better than NaN."""
    if math.isnan(new):
        return False
    if best is None or math.isnan(best):
        return True
    return new > best if greater_is_better else new < best
