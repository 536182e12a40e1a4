"""The parameters that weight decay applies to, and the resulting two parameter groups."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch import nn

from ....args.groups.optimizer import OptimizerArgs
from ....errors import ModelError
from .options import OptimizerSpec

# Names that transformers excludes, so that runs are comparable: a bias, or a path element that is a norm.
UNDECAYED_NAME = re.compile(r"bias|layernorm|rmsnorm|(?:^|[._])norm(?:\.|$)")
# Norms with other names, such as `ln_f` or `bn1`, are recognised by their class.
NORM_CLASS = re.compile(r"norm(?:\dd)?$", re.IGNORECASE)
NO_CLASS = re.compile(r"(?!)")


def decay_parameter_names(model: nn.Module, norms: re.Pattern[str] = NORM_CLASS) -> list[str]:
    """Names of the parameters that weight decay applies to: neither biases nor parameters of norms."""
    names: list[str] = []
    inside_layer_norms: tuple[str, ...] = ()
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if isinstance(module, nn.LayerNorm):
            inside_layer_norms += (prefix,)
        if norms.search(type(module).__name__) or (path and prefix.startswith(inside_layer_norms)):
            continue
        names += [prefix + own for own in module._parameters if not UNDECAYED_NAME.search((prefix + own).lower())]
    return names


def groups_of_transformers(model: nn.Module) -> list[list[str]]:
    """The names in transformers' two groups, where norms such as BatchNorm decay unless their name says norm."""
    decayed = set(decay_parameter_names(model, norms=NO_CLASS))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [[name for name in names if (name in decayed) is wanted] for wanted in (True, False)]


def parameter_groups(
    model: nn.Module, args: OptimizerArgs | OptimizerSpec, decay_names: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Two groups of the trainable parameters, in the model's order: with and without weight decay."""
    decayed = set(decay_parameter_names(model) if decay_names is None else decay_names)
    with_decay: list[nn.Parameter] = []
    without: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (with_decay if name in decayed else without).append(parameter)
    return [
        {"params": with_decay, "weight_decay": args.weight_decay},
        {"params": without, "weight_decay": 0.0},
    ]


def check_trainable(model: nn.Module) -> None:
    """Raise unless the model has trainable parameters."""
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    total = sum(1 for _ in model.parameters())
    raise ModelError(
        f"{type(model).__name__} has {total} parameters, but none of them requires a gradient. Unfreeze some with "
        "requires_grad_(True), or add an adapter, before creating the trainer."
    )
