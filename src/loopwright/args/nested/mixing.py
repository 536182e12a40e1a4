"""The argument `train_dataset_weights`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def mixture_weights(value: Any) -> str | None:
    """A dict of names with a weight each, or a list of [step, weight] each."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) for name in value):
        return "must be a dict such as {'web': 0.7, 'code': [[0, 0.1], [1000, 0.3]]}, or JSON text of one"
    problem = next((each for name, weight in value.items() if (each := _problem(name, weight))), None)
    if problem is not None:
        return problem
    points = [[(0, weight)] if _is_weight(weight) else weight for weight in value.values()]
    # Weights are linear between the steps of a schedule, so their sum is smallest at one of these steps.
    for step in sorted({step for each in points for step, _ in each}):
        if not any(_is_above_zero(each, step) for each in points):
            return f"all weights are 0 at step {step}; at least one must be above 0 at any step"
    return None


def _problem(name: str, weight: Any) -> str | None:
    if _is_weight(weight):
        return None
    if not isinstance(weight, (list, tuple)) or not weight:
        return f"{name}={weight!r} must be a number of at least 0, or a list of [step, weight]"
    steps = []
    for point in weight:
        if not isinstance(point, (list, tuple)) or len(point) != 2 or not all(map(_is_weight, point)):
            return f"{name}: {point!r} must be [step, weight], two numbers of at least 0"
        steps.append(point[0])
    if steps != sorted(set(steps)):
        return f"{name}: the steps {steps!r} must increase"
    return None


def _is_weight(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_above_zero(points: Any, step: float) -> bool:
    """Whether a weight is above 0 at a step."""
    before = [weight for at, weight in points if at <= step]
    after = [weight for at, weight in points if at > step]
    if any(at == step for at, _ in points) or not after or not before:
        return bool(before[-1] if before else after[0])
    return bool(before[-1] or after[0])
