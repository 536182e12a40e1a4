"""All optimizers by name, and their construction.

A row has a function from the arguments and the model to a class and its keyword arguments, and the package it needs. To
add an optimizer: one function and one row, or `register_optimizer` from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ....args.field import unknown_name
from ....args.groups.optimizer import OptimizerArgs
from ....core.user_code.error_notes import add_note
from ....errors import ArgumentsError, MissingPackage
from . import builtin, packaged
from .decay import check_trainable, parameter_groups
from .options import OptimizerSpec

Builder = Callable[[OptimizerSpec, nn.Module | None], tuple[Any, dict[str, Any]]]
ClassAndKwargs = tuple[Any, dict[str, Any]]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class OptimizerRow:
    """One optimizer: its builder, the package it needs, and a short description."""

    builder: Builder
    needs: str | None = None
    help: str = ""


@dataclass(frozen=True)
class Package:
    """The module and the install command of a package, where they differ from its name."""

    module: str
    install: str


PACKAGES: dict[str, Package] = {
    "galore_torch": Package("galore_torch", "galore-torch"),
    "apollo_torch": Package("apollo_torch", "apollo-torch"),
    "torch-optimi": Package("optimi", "torch-optimi"),
    "apex": Package("apex", "git+https://github.com/NVIDIA/apex"),
    "torchdistx": Package("torchdistx", "git+https://github.com/pytorch/torchdistx"),
    "torch_xla": Package("torch_xla", "torch_xla"),
    "torch_npu": Package("torch_npu", "torch_npu"),
}


def optimizer_class_and_kwargs(
    args: OptimizerArgs,
    model: nn.Module | None = None,
    *,
    total_updates: int | None = None,
    decay_names: Collection[str] | None = None,
    tell: Tell | None = None,
) -> ClassAndKwargs:
    """The class and keyword arguments of `args.optim`, including `params` if the optimizer makes its own groups."""
    values = OptimizerSpec.of(args, total_updates=total_updates, decay_names=decay_names, tell=tell)
    row = OPTIMIZERS.get(values.name)
    if row is None:
        raise ArgumentsError(unknown_name("optimizer", values.name, OPTIMIZERS))
    _check_installed(row, values.name)
    cls, kwargs = row.builder(values, model)
    return cls, dict(kwargs)


def build_optimizer(
    model: nn.Module,
    args: OptimizerArgs,
    cls_and_kwargs: ClassAndKwargs | None = None,
    total_updates: int | None = None,
    *,
    decay_names: Collection[str] | None = None,
    tell: Tell | None = None,
) -> Optimizer:
    """The optimizer of the arguments, or that of `cls_and_kwargs`: (class or factory, keyword arguments).

    Anything but an optimizer class is a factory: it is called, and its result is called with (model, **kwargs).
    """
    check_trainable(model)
    if cls_and_kwargs is None:
        cls_and_kwargs = optimizer_class_and_kwargs(
            args, model, total_updates=total_updates, decay_names=decay_names, tell=tell
        )
    cls, kwargs = cls_and_kwargs[0], dict(cls_and_kwargs[1])
    if is_factory(cls):
        return _from_factory(cls, model, kwargs)
    # Third-party trainers name the groups "optimizer_dict", and optimizers of whole models "model".
    given = [kwargs.pop(name) for name in ("params", "model", "optimizer_dict") if name in kwargs]
    groups = given[-1] if given else None
    if groups is None:
        groups = parameter_groups(model, args, decay_names)
        groups[0]["weight_decay"] = kwargs.get("weight_decay", args.weight_decay)
    packaged.keep_embeddings_in_32_bit(cls, kwargs, model)
    try:
        return cls(groups, **kwargs)
    except Exception as error:  # the class and its options may be the user's; re-raised with a note
        options = ", ".join(f"{name}={value}" for name, value in kwargs.items())
        add_note(error, f"the constructor of the optimizer {cls.__name__}", given=options)
        raise


def register_optimizer(name: str, builder: Builder, *, needs: str | None = None, help: str = "") -> None:
    """Register a user-defined optimizer by name: builder(OptimizerSpec, model) -> (class, keyword arguments)."""
    OPTIMIZERS[name] = OptimizerRow(builder, needs, help)


def is_factory(cls: Any) -> bool:
    """Whether this is a factory that builds an optimizer from a model, not an optimizer class."""
    return not (isinstance(cls, type) and issubclass(cls, Optimizer))


def _from_factory(factory: Any, model: nn.Module, kwargs: dict[str, Any]) -> Optimizer:
    optimizer = factory()(model, **kwargs)
    if not hasattr(optimizer, "step") or not hasattr(optimizer, "param_groups"):
        raise ArgumentsError(
            f"The optimizer factory {getattr(factory, '__name__', factory)!r} returned a {type(optimizer).__name__}, "
            "which has no step and param_groups. It must return a torch optimizer."
        )
    return optimizer


def _check_installed(row: OptimizerRow, name: str) -> None:
    if row.needs is None:
        return
    package = PACKAGES.get(row.needs, Package(row.needs, row.needs))
    if find_spec(package.module) is None:
        raise MissingPackage(row.needs, needed_for=f"optim='{name}'", install=package.install)


def _bnb(name: str, bits: int, *, paged: bool = False) -> OptimizerRow:
    builder = partial(packaged.bnb, name=name, bits=bits, paged=paged)
    return OptimizerRow(builder, "bitsandbytes", f"{'paged ' * paged}{name} with a {bits}-bit state")


def _adamw_of(package: str, module: str, name: str) -> OptimizerRow:
    return OptimizerRow(partial(packaged.plain_adamw, module=module, name=name), package, f"{name} of {package}")


def _schedule_free(name: str, *, warms_up: bool, is_adam: bool) -> OptimizerRow:
    builder = partial(packaged.schedule_free, name=name, warms_up=warms_up, is_adam=is_adam)
    return OptimizerRow(builder, "schedulefree", f"{name}: no schedule needed")


def _galore(name: str) -> OptimizerRow:
    return OptimizerRow(partial(packaged.galore, name=name), "galore_torch", f"{name}: low-rank gradients")


def _torchao(name: str) -> OptimizerRow:
    return OptimizerRow(partial(packaged.torchao_adamw, name=name), "torchao", f"{name} of torchao")


_REFUSED = OptimizerRow(packaged.refused, help="refused: updates during the backward pass")

OPTIMIZERS: dict[str, OptimizerRow] = {
    "adamw_torch": OptimizerRow(builtin.adamw_torch, help="torch's AdamW"),
    "adamw_torch_fused": OptimizerRow(builtin.adamw_torch_fused, help="torch's AdamW in one kernel"),
    "adamw_hf": OptimizerRow(builtin.adamw_hf, help="old name of adamw_torch"),
    "adamw_torch_xla": _adamw_of("torch_xla", "torch_xla.amp.syncfree", "AdamW"),
    "adamw_torch_npu_fused": _adamw_of("torch_npu", "torch_npu.optim", "NpuFusedAdamW"),
    "adamw_apex_fused": _adamw_of("apex", "apex.optimizers", "FusedAdam"),
    "adamw_anyprecision": OptimizerRow(packaged.adamw_anyprecision, "torchdistx", "AdamW with configurable dtypes"),
    "adamw_torch_4bit": _torchao("AdamW4bit"),
    "adamw_torch_8bit": _torchao("AdamW8bit"),
    "adafactor": OptimizerRow(builtin.adafactor, help="factored second moments: little memory"),
    "muon": OptimizerRow(builtin.muon, help="Muon for hidden matrices, AdamW for the rest"),
    "sgd": OptimizerRow(builtin.sgd, help="torch's SGD; momentum through optim_args"),
    "adagrad": OptimizerRow(builtin.adagrad, help="torch's Adagrad"),
    "rmsprop": OptimizerRow(builtin.rmsprop, help="torch's RMSprop"),
    "adamw_bnb_8bit": _bnb("AdamW", 8),
    "adamw_8bit": _bnb("AdamW", 8),
    "paged_adamw_32bit": _bnb("AdamW", 32, paged=True),
    "paged_adamw_8bit": _bnb("AdamW", 8, paged=True),
    "ademamix": _bnb("AdEMAMix", 32),
    "ademamix_8bit": _bnb("AdEMAMix", 8),
    "paged_ademamix_32bit": _bnb("AdEMAMix", 32, paged=True),
    "paged_ademamix_8bit": _bnb("AdEMAMix", 8, paged=True),
    "lion_32bit": _bnb("Lion", 32),
    "lion_8bit": _bnb("Lion", 8),
    "paged_lion_32bit": _bnb("Lion", 32, paged=True),
    "paged_lion_8bit": _bnb("Lion", 8, paged=True),
    "rmsprop_bnb": _bnb("RMSprop", 32),
    "rmsprop_bnb_8bit": _bnb("RMSprop", 8),
    "rmsprop_bnb_32bit": _bnb("RMSprop", 32),
    "galore_adamw": _galore("GaLoreAdamW"),
    "galore_adamw_8bit": _galore("GaLoreAdamW8bit"),
    "galore_adafactor": _galore("GaLoreAdafactor"),
    "galore_adamw_layerwise": _REFUSED,
    "galore_adamw_8bit_layerwise": _REFUSED,
    "galore_adafactor_layerwise": _REFUSED,
    "apollo_adamw": OptimizerRow(packaged.apollo, "apollo_torch", "APOLLO: low-rank learning rates"),
    "apollo_adamw_layerwise": _REFUSED,
    "lomo": _REFUSED,
    "adalomo": _REFUSED,
    "grokadamw": OptimizerRow(packaged.grokadamw, "grokadamw", "GrokAdamW"),
    "stable_adamw": OptimizerRow(packaged.stable_adamw, "torch-optimi", "StableAdamW of torch-optimi"),
    "schedule_free_adamw": _schedule_free("AdamWScheduleFree", warms_up=True, is_adam=True),
    "schedule_free_radam": _schedule_free("RAdamScheduleFree", warms_up=False, is_adam=True),
    "schedule_free_sgd": _schedule_free("SGDScheduleFree", warms_up=True, is_adam=False),
}
