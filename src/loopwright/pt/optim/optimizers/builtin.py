"""Builders of the optimizers that need only torch: OptimizerSpec and the model -> (class, keyword arguments)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ....errors import ArgumentsError
from .adafactor import Adafactor
from .decay import parameter_groups
from .muon import Muon, muon_groups
from .options import OptimizerSpec, optional, to_bool, to_float, to_floats, to_int, to_text

Built = tuple[Any, dict[str, Any]]

ADAMW_OPTIONS = {
    "betas": to_floats,
    "eps": to_float,
    "weight_decay": to_float,
    "amsgrad": to_bool,
    "maximize": to_bool,
    "foreach": optional(to_bool),
    "capturable": to_bool,
}


def adamw_torch(args: OptimizerSpec, model: nn.Module | None) -> Built:
    """torch's AdamW."""
    return torch.optim.AdamW, args.adam | args.given(**ADAMW_OPTIONS, fused=optional(to_bool))


def adamw_torch_fused(args: OptimizerSpec, model: nn.Module | None) -> Built:
    """torch's AdamW in one kernel if the model's devices support it, else the plain one."""
    options = args.adam | args.given(**ADAMW_OPTIONS)
    refusal = None if model is None else _fused_refusal(model)
    if refusal is None:
        return torch.optim.AdamW, options | {"fused": True}
    args.tell(f"optim='adamw_torch_fused' is not supported here ({refusal}); using adamw_torch instead")
    return torch.optim.AdamW, options


def _fused_refusal(model: nn.Module) -> str | None:
    """Why the fused kernel cannot be used for this model, or None; tests it with one number per device and dtype."""
    kinds = {(p.device.type, p.dtype): p.device for p in model.parameters() if p.requires_grad}
    for (_, dtype), device in kinds.items():
        probe = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
        probe.grad = torch.zeros_like(probe)
        try:
            torch.optim.AdamW([probe], fused=True).step()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
    return None


def adamw_hf(args: OptimizerSpec, model: nn.Module | None) -> Built:
    """The name of AdamW in transformers before version 5."""
    args.tell("optim='adamw_hf' was removed from transformers; using adamw_torch, its replacement, instead")
    return adamw_torch(args, model)


def sgd(args: OptimizerSpec, model: nn.Module | None) -> Built:
    """torch's SGD; momentum is 0 unless optim_args sets it."""
    options = args.given(
        momentum=to_float, dampening=to_float, weight_decay=to_float, nesterov=to_bool, foreach=optional(to_bool)
    )
    return torch.optim.SGD, {"lr": args.learning_rate} | options


def adagrad(args: OptimizerSpec, model: nn.Module | None) -> Built:
    """torch's Adagrad."""
    options = args.given(lr_decay=to_float, weight_decay=to_float, eps=to_float, initial_accumulator_value=to_float)
    return torch.optim.Adagrad, {"lr": args.learning_rate} | options


def rmsprop(args: OptimizerSpec, model: nn.Module | None) -> Built:
    """torch's RMSprop."""
    options = args.given(momentum=to_float, alpha=to_float, eps=to_float, weight_decay=to_float, centered=to_bool)
    return torch.optim.RMSprop, {"lr": args.learning_rate} | options


def adafactor(args: OptimizerSpec, model: nn.Module | None) -> Built:
    """Adafactor under the trainer's learning rate and schedule."""
    options = args.given(
        eps=to_floats, clip_threshold=to_float, decay_rate=to_float, beta1=optional(to_float), weight_decay=to_float
    )
    return Adafactor, {"lr": args.learning_rate, "scale_parameter": False, "relative_step": False} | options


def muon(args: OptimizerSpec, model: nn.Module | None) -> Built:
    """Muon for hidden matrices, AdamW for the rest."""
    if model is None:
        raise ArgumentsError(
            "optim='muon' needs the model, to distinguish hidden matrices from embeddings, head and norms."
        )
    options = args.given(
        momentum=to_float,
        nesterov=to_bool,
        ns_steps=to_int,
        adjust_lr=to_text,
        betas=to_floats,
        eps=to_float,
        weight_decay=to_float,
        adamw_lr=to_float,
    )
    adamw_options = {"lr": options.pop("adamw_lr")} if "adamw_lr" in options else {}
    groups = parameter_groups(model, args, args.decay_names)
    groups = muon_groups(groups, model, args.target_modules, **adamw_options)
    if not any(group["algorithm"] == "muon" for group in groups):
        args.tell("optim='muon' found no hidden matrix in the model; all parameters are updated by AdamW")
    return Muon, args.adam | {"params": groups} | options
