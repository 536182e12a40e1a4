"""Builders of optimizers from other packages: OptimizerSpec and the model -> (class, keyword arguments).

They run only if the package named in their row is installed, and import it then.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from ....args.groups.optimizer import why_refused
from ....errors import ArgumentsError, MissingPackage
from .decay import parameter_groups
from .options import OptimizerSpec, optional, to_bool, to_float, to_floats, to_int, to_text, to_torch_dtype
from .targets import check_targets, target_linear_weights

Built = tuple[Any, dict[str, Any]]


def _class(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


# ------------------------------------------------------------------------------------------------ other AdamWs


def plain_adamw(args: OptimizerSpec, model: nn.Module | None, *, module: str, name: str) -> Built:
    """An AdamW with only torch's parameters (torch_xla, torch_npu, Apex)."""
    return _class(module, name), args.adam | args.given(betas=to_floats, eps=to_float, weight_decay=to_float)


def adamw_anyprecision(args: OptimizerSpec, model: nn.Module | None) -> Built:
    """AnyPrecisionAdamW of torchdistx."""
    defaults = {
        "use_kahan_summation": False,
        "momentum_dtype": torch.float32,
        "variance_dtype": torch.float32,
        "compensation_buffer_dtype": torch.bfloat16,
    }
    given = args.given(
        use_kahan_summation=to_bool,
        momentum_dtype=to_torch_dtype,
        variance_dtype=to_torch_dtype,
        compensation_buffer_dtype=to_torch_dtype,
    )
    return _class("torchdistx.optimizers", "AnyPrecisionAdamW"), args.adam | defaults | given


def torchao_adamw(args: OptimizerSpec, model: nn.Module | None, *, name: str) -> Built:
    """torchao's AdamW with a 4-bit or 8-bit state."""
    defaults = {"block_size": 256, "bf16_stochastic_round": False}
    given = args.given(block_size=to_int, bf16_stochastic_round=to_bool, amsgrad=to_bool)
    try:
        cls = _class("torchao.optim", name)
    except ModuleNotFoundError:  # its module before torchao 0.11
        cls = _class("torchao.prototype.low_bit_optim", name)
    return cls, args.adam | defaults | given


def stable_adamw(args: OptimizerSpec, model: nn.Module | None) -> Built:
    """StableAdamW of torch-optimi."""
    defaults = {"weight_decay": args.weight_decay, "decouple_lr": False, "max_lr": None, "kahan_sum": None}
    given = args.given(
        decouple_lr=to_bool, max_lr=optional(to_float), kahan_sum=optional(to_bool), weight_decay=to_float
    )
    return _class("optimi", "StableAdamW"), args.adam | defaults | given


def grokadamw(args: OptimizerSpec, model: nn.Module | None) -> Built:
    """GrokAdamW."""
    defaults = {"alpha_init": 0.98, "lamb": 2.0, "gamma": 0.1, "grokking_signal_decay_rate": 0.1}
    defaults["gradient_clipping"] = 1.0
    return _class("grokadamw", "GrokAdamW"), args.adam | defaults | args.given(**dict.fromkeys(defaults, to_float))


# ------------------------------------------------------------------------------------------------ schedule-free


def schedule_free(args: OptimizerSpec, model: nn.Module | None, *, name: str, warms_up: bool, is_adam: bool) -> Built:
    """A schedule-free optimizer; those with their own warm-up get it in updates."""
    cls = getattr(import_module("schedulefree"), name, None)
    if cls is None:  # RAdam was added in a later version
        raise MissingPackage("schedulefree>=1.4.0", needed_for=f"optim='{args.name}'", install="-U schedulefree")
    kwargs = dict(args.adam) if is_adam else {"lr": args.learning_rate}
    kwargs |= {"weight_decay": args.weight_decay, "weight_lr_power": 2.0, "r": 0.0}
    if warms_up:
        kwargs["warmup_steps"] = args.warmup_updates()
    accepted = {"weight_lr_power": to_float, "r": to_float, "weight_decay": to_float}
    return cls, kwargs | args.given(**accepted if is_adam else accepted | {"momentum": to_float})


# ------------------------------------------------------------------------------------------------ bitsandbytes


def bnb(args: OptimizerSpec, model: nn.Module | None, *, name: str, bits: int, paged: bool = False) -> Built:
    """An optimizer of bitsandbytes."""
    options = BNB_OPTIONS[name](args) | {"optim_bits": bits}
    if name != "RMSprop":  # the only one without a paged form
        options["is_paged"] = paged
    return _class("bitsandbytes.optim", name), {"lr": args.learning_rate} | options


def _bnb_adamw(args: OptimizerSpec) -> dict[str, Any]:
    return args.adam | args.given(min_8bit_size=to_int, weight_decay=to_float)


def _bnb_lion(args: OptimizerSpec) -> dict[str, Any]:
    return {"betas": args.betas} | args.given(min_8bit_size=to_int, weight_decay=to_float)


def _bnb_rmsprop(args: OptimizerSpec) -> dict[str, Any]:
    return args.given(
        alpha=to_float, eps=to_float, momentum=to_float, centered=to_bool, min_8bit_size=to_int, weight_decay=to_float
    )


def _bnb_ademamix(args: OptimizerSpec) -> dict[str, Any]:
    given = args.given(
        beta1=to_float,
        beta2=to_float,
        beta3=to_float,
        alpha=to_float,
        eps=to_float,
        t_alpha=to_int,
        t_beta3=to_int,
        min_8bit_size=to_int,
        weight_decay=to_float,
    )
    defaults = dict(zip(("beta1", "beta2", "beta3"), (*args.betas, 0.9999), strict=True))
    betas = tuple(given.pop(beta, default) for beta, default in defaults.items())
    return {"betas": betas, "alpha": 5.0, "eps": args.epsilon} | given


BNB_OPTIONS = {"AdamW": _bnb_adamw, "Lion": _bnb_lion, "RMSprop": _bnb_rmsprop, "AdEMAMix": _bnb_ademamix}


def keep_embeddings_in_32_bit(cls: Any, kwargs: dict[str, Any], model: nn.Module) -> None:
    """Make bitsandbytes keep the optimizer state of embeddings in 32 bit: it is too uneven for 8."""
    if not str(getattr(cls, "__module__", "")).startswith("bitsandbytes") or kwargs.get("optim_bits") != 8:
        return
    manager = _class("bitsandbytes.optim", "GlobalOptimManager").get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


# ------------------------------------------------------------------------------------------------ low rank


def galore(args: OptimizerSpec, model: nn.Module | None, *, name: str) -> Built:
    """A GaLore optimizer: the gradients of the target layers are projected to a low rank."""
    projection = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    projection |= args.given(rank=to_int, update_proj_gap=to_int, scale=to_float, proj_type=to_text)
    groups = _low_rank_groups(args, model, projection)
    if name == "GaLoreAdafactor":
        kwargs = {"lr": args.learning_rate, "scale_parameter": False, "relative_step": False}
    else:
        kwargs = args.adam
    return _class("galore_torch", name), kwargs | {"params": groups}


def apollo(args: OptimizerSpec, model: nn.Module | None) -> Built:
    """APOLLO: learning rates of the target layers from a low-rank projection."""
    projection = {"rank": 128, "proj": "random", "scale_type": "channel", "update_proj_gap": 200, "scale": 1.0}
    projection |= {"proj_type": "std"} | args.given(
        rank=to_int, proj=to_text, scale_type=to_text, update_proj_gap=to_int, scale=to_float, proj_type=to_text
    )
    return _class("apollo_torch", "APOLLOAdamW"), args.adam | {"params": _low_rank_groups(args, model, projection)}


def _low_rank_groups(args: OptimizerSpec, model: nn.Module | None, projection: dict[str, Any]) -> list[dict[str, Any]]:
    """The two usual groups without the target weights, and up to two with them and the projection's options."""
    check_targets(args.target_modules, args.name)
    if model is None:
        raise ArgumentsError(f"optim='{args.name}' needs the model, to find its target layers.")
    wanted = set(target_linear_weights(model, args.target_modules, name=args.name, tell=args.tell))
    targets = {id(parameter) for name, parameter in model.named_parameters() if name in wanted}
    groups = parameter_groups(model, args, args.decay_names)
    rest = [{**group, "params": [p for p in group["params"] if id(p) not in targets]} for group in groups]
    low_rank = [{**group, **projection, "params": [p for p in group["params"] if id(p) in targets]} for group in groups]
    return rest + [group for group in low_rank if group["params"]]


# ------------------------------------------------------------------------------------------------ not possible


def refused(args: OptimizerSpec, model: nn.Module | None) -> Built:
    """Raise for an optimizer that updates during the backward pass."""
    raise ArgumentsError(why_refused(args.name) or args.name)
