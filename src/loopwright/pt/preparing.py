"""Switching on what the arguments ask of a model before training: checkpointed activations, compiled blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..core.overrides import adapt
from ..errors import ModelError
from ..notices import Notices


def checkpoint_activations(model: nn.Module, options: dict[str, Any] | None) -> None:
    """Recompute activations in the backward pass instead of keeping them."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ModelError(
            f"gradient_checkpointing=True, but {type(model).__name__} has no gradient_checkpointing_enable(); "
            "wrap its blocks with torch.utils.checkpoint yourself, or leave the argument out"
        )
    options = dict(options or {})
    extra = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
    options.setdefault("use_reentrant", False)
    adapt(enable, "gradient_checkpointing_kwargs", *extra)(gradient_checkpointing_kwargs=options, **extra)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks a model repeats: members of lists of two or more modules of one class, outermost lists only."""
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or module in inside or len(module) < 2:
            continue
        if len({type(child) for child in module}) == 1:
            blocks.extend(module)
            inside.update(child for block in module for child in block.modules())
    return blocks


def compile_blocks(model: nn.Module, *, backend: str | None, mode: str | None, notices: Notices) -> None:
    """Compile each repeated block in place (the whole model if nothing repeats); names in its state stay."""
    options = {"backend": backend or "inductor", "mode": mode}
    blocks = repeated_blocks(model)
    if not blocks:
        notices.tell_once("torch_compile: the model has no repeated blocks, so it is compiled whole")
    for block in blocks or [model]:
        block.compile(**options)


def buffers_and_parameters_on(model: nn.Module) -> set[torch.device]:
    """Every device the model has tensors on."""
    return {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
