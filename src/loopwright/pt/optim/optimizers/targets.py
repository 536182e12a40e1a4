"""The modules that `optim_target_modules` selects."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from ....errors import ArgumentsError


def is_target(path: str, targets: str | list[str]) -> bool:
    """Whether a module's path matches: a string is a pattern for the whole path; list entries may match a part."""
    if isinstance(targets, str):
        return re.fullmatch(targets, path) is not None
    return any(target in path or re.fullmatch(target, path) is not None for target in targets)


def is_all_linear(targets: Any) -> bool:
    """Whether every linear layer is selected."""
    return isinstance(targets, str) and targets.replace("_", "-") == "all-linear"


def check_targets(targets: Any, name: str) -> None:
    """Raise unless `optim_target_modules` is given and valid."""
    if targets is None:
        raise ArgumentsError(
            f"optim='{name}' works on selected linear layers: set optim_target_modules to a list of module names, to "
            "a pattern, or to 'all-linear'."
        )
    if not isinstance(targets, str | list | tuple) or not all(isinstance(target, str) for target in targets):
        raise ArgumentsError(
            f"optim_target_modules must be a list of module names, a pattern or 'all-linear', got {targets!r}."
        )


def target_linear_weights(model: nn.Module, targets: Any, *, name: str, tell: Callable[[str], None]) -> list[str]:
    """Names of the weights of the selected linear layers."""
    check_targets(targets, name)
    everything = is_all_linear(targets)
    names = []
    for path, module in model.named_modules():
        is_meant = everything or is_target(path, targets if isinstance(targets, str) else list(targets))
        if isinstance(module, nn.Linear) and is_meant:
            names.append(f"{path}.weight")
        elif is_meant and not everything and not any(True for _ in module.children()) and module._parameters:
            tell(f"optim_target_modules matches {path}, which is not a linear layer; optim='{name}' ignores it")
    if not names:
        raise ArgumentsError(f"optim='{name}': no linear layer of the model matches optim_target_modules={targets!r}.")
    return names
