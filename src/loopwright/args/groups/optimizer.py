"""Which optimizer, and its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..field import Group, arg, between, names_or_pattern, non_negative
from ..names import OptimizerNames
from ..nested.param_groups import group_options

STEP_IN_BACKWARD = {
    "galore_adamw_layerwise": "galore_adamw",
    "galore_adamw_8bit_layerwise": "galore_adamw_8bit",
    "galore_adafactor_layerwise": "galore_adafactor",
    "apollo_adamw_layerwise": "apollo_adamw",
    "lomo": "adafactor",
    "adalomo": "adafactor",
}
"""Optimizers that are refused, and what to use instead."""


def why_refused(optim: str) -> str | None:
    """Why an optimizer is refused, or None: what a step promises excludes one that updates during the backward."""
    if optim not in STEP_IN_BACKWARD:
        return None
    return (
        f"optim='{optim}' updates each weight during the backward pass: gradients cannot be accumulated, clipped by "
        "their global norm, checked or reduced over ranks, and an interrupted step cannot be undone. Use "
        f"optim='{STEP_IN_BACKWARD[optim]}' instead"
    )


@dataclass
class OptimizerArgs(Group):
    """Which optimizer, and its numbers."""

    title = "Optimizer"

    optim: OptimizerNames | str = arg("adamw_torch_fused", "The optimizer, by name; see OptimizerNames.")
    optim_args: str | None = arg(None, "Extra optimizer options, as 'key=value,key=value'.")
    learning_rate: float = arg(5e-5, "The peak learning rate of the schedule.", check=non_negative)
    weight_decay: float = arg(0.0, "Weight decay; biases and normalization layers are excluded.", check=non_negative)
    adam_beta1: float = arg(0.9, "Adam's beta1.", check=between(0, 1, below=True))
    adam_beta2: float = arg(0.999, "Adam's beta2.", check=between(0, 1, below=True))
    adam_epsilon: float = arg(1e-8, "Adam's epsilon.", check=non_negative)
    optim_target_modules: None | str | list[str] = arg(
        None,
        "Modules for low-rank optimizers (GaLore, APOLLO): names, a regular expression, or 'all-linear'.",
        check=names_or_pattern,
    )
    param_groups: dict[str, Any] | str | None = arg(
        None,
        "Options by patterns of parameter names: {'embed': {'lr_scale': 0.1, 'weight_decay': 0.0}}, or freeze.",
        check=group_options,
    )
    max_grad_norm: float = arg(1.0, "Maximum gradient norm for clipping; 0 disables it.", check=non_negative)
