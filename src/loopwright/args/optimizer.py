"""Which optimizer, and its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from .field import Group, arg, between, non_negative
from .names import OptimizerNames


@dataclass
class OptimizerArgs(Group):
    """Which optimizer, and its numbers."""

    title = "Optimizer"

    optim: OptimizerNames | str = arg("adamw_torch_fused", "The optimizer, by name; see OptimizerNames.")
    optim_args: str | None = arg(None, "Further options of the optimizer, as 'key=value,key=value'.")
    learning_rate: float = arg(5e-5, "The highest learning rate of the schedule.", check=non_negative)
    weight_decay: float = arg(0.0, "Weight decay; biases and normalisation layers are left out.", check=non_negative)
    adam_beta1: float = arg(0.9, "Decay rate of Adam's mean of gradients.", check=between(0, 1, below=True))
    adam_beta2: float = arg(0.999, "Decay rate of Adam's mean of squared gradients.", check=between(0, 1, below=True))
    adam_epsilon: float = arg(1e-8, "Added to Adam's denominator.", check=non_negative)
    optim_target_modules: None | str | list[str] = arg(
        None, "Modules to optimize in low rank (GaLore, APOLLO): names, a regular expression, or 'all-linear'."
    )
    max_grad_norm: float = arg(1.0, "Gradients are scaled down to this norm; 0 switches it off.", check=non_negative)
