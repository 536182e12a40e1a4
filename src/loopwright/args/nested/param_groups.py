"""The argument `param_groups`: options for parameters by patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..field import advised

OPTIONS = ("lr_scale", "weight_decay", "freeze")


def group_options(value: Any) -> str | None:
    """A dict of patterns, each with options of the parameters whose names contain a match."""
    if not isinstance(value, Mapping) or not value:
        return "must be a dict such as {'embed': {'lr_scale': 0.1}}, or JSON text of one"
    return next((problem for pattern, given in value.items() if (problem := _problem(pattern, given))), None)


def _problem(pattern: Any, given: Any) -> str | None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        return f"{pattern!r} is not a regular expression ({error}); write '.*' for any text"
    if not isinstance(given, Mapping) or not given:
        return f"{pattern!r} needs a dict with {', '.join(OPTIONS[:-1])} or {OPTIONS[-1]}"
    for name, option in given.items():
        if name not in OPTIONS:
            problem = f"{pattern!r} has the option {name!r}"
            return advised(problem, str(name), OPTIONS, f"use {', '.join(OPTIONS)}")
        is_number = isinstance(option, (int, float)) and not isinstance(option, bool) and 0 <= option < float("inf")
        if name == "freeze" and not isinstance(option, bool):
            return f"{pattern!r}: freeze={option!r} must be True or False"
        if name != "freeze" and not is_number:
            return f"{pattern!r}: {name}={option!r} must be a number of at least 0"
    if given.get("freeze") and len(given) > 1:
        return f"{pattern!r}: a frozen parameter has no other option than freeze"
    return None
