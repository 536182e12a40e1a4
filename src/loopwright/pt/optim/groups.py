"""Groups of parameters by patterns of their names: scaled learning rates, weight decay, and frozen parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...args.field import advised
from ...errors import ArgumentsError

Groups = Mapping[str, Mapping[str, Any]]


def parameters_by_pattern(model: nn.Module, groups: Groups) -> dict[str, list[nn.Parameter]]:
    """The parameters of each pattern: those with a match in one of their names, and in no earlier pattern's."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    found: dict[str, list[nn.Parameter]] = {pattern: [] for pattern in groups}
    for key, own in names.items():
        pattern = next((each for each in groups if any(re.search(each, name) for name in own)), None)
        if pattern is not None:
            found[pattern].append(parameters[key])
    every = [name for own in names.values() for name in own]
    for pattern, chosen in found.items():
        if not chosen:
            matches = [name for name in every if re.search(pattern, name)]
            problem, advice = f"param_groups: the pattern {pattern!r} has no effect", "correct or remove it"
            if matches:
                example = f"all its {len(matches)} matches, such as {matches[0]}, belong to earlier patterns"
                raise ArgumentsError(f"{problem}: {example}; {advice}")
            missed = f"{problem}: it matches no parameter of {type(model).__name__}"
            raise ArgumentsError(advised(missed, pattern, every, advice))
    return found


class Frozen:
    """Parameters that are frozen for a run."""

    def __init__(self, model: nn.Module, groups: Groups) -> None:
        chosen = parameters_by_pattern(model, groups)
        self._parameters = [
            parameter
            for pattern, options in groups.items()
            if options.get("freeze")
            for parameter in chosen[pattern]
            if parameter.requires_grad
        ]
        for parameter in self._parameters:
            parameter.requires_grad_(False)

    def remove(self) -> None:
        """Make the parameters trainable again."""
        for parameter in self._parameters:
            parameter.requires_grad_(True)


def split_groups(optimizer: Optimizer, model: nn.Module, groups: Groups) -> None:
    """Move the parameters of each pattern into groups of their own, with its learning rate and weight decay."""
    chosen = parameters_by_pattern(model, groups)
    original = list(optimizer.param_groups)
    for pattern, options in groups.items():
        own = {id(parameter) for parameter in chosen[pattern]}
        for group in original:
            moved = [each for each in group["params"] if id(each) in own]
            if not moved or options.get("freeze"):
                continue
            changed = _changed(group, options, pattern, type(optimizer).__name__)
            group["params"] = [each for each in group["params"] if id(each) not in own]
            optimizer.add_param_group({**changed, "params": moved})


def _changed(group: dict[str, Any], options: Mapping[str, Any], pattern: str, optimizer: str) -> dict[str, Any]:
    changed = dict(group)
    if "lr_scale" in options:
        if group.get("lr") is None:
            raise ArgumentsError(
                f"param_groups: {pattern!r} has lr_scale={options['lr_scale']}, but {optimizer} chooses its own "
                "learning rate; remove lr_scale, or set a learning rate"
            )
        changed["lr"] = group["lr"] * options["lr_scale"]
    if "weight_decay" in options:
        if "weight_decay" not in group:
            raise ArgumentsError(
                f"param_groups: {pattern!r} has weight_decay={options['weight_decay']}, but {optimizer} has no weight "
                "decay; remove it, or use another optimizer"
            )
        changed["weight_decay"] = options["weight_decay"]
    return changed
