"""Checks before the first step that a save can be loaded: names, shapes, dtypes and a sample of values."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from ...errors import CheckpointError
from ..devices import address_of
from .conversion import export_trouble, is_pretrained
from .shards import save_config
from .tensors import some
from .weights import is_adapter


def check_checkpoint(module: nn.Module) -> None:
    """Raise if a checkpoint of the module could not be written, or would lack trained parameters."""
    own = module.state_dict(keep_vars=True)
    for name, value in own.items():
        if not isinstance(value, Tensor) and not is_adapter(module):  # the frozen base of an adapter is not saved
            raise CheckpointError(
                f"{name} in the model's state_dict() is a {type(value).__name__}, but checkpoints can only hold "
                "tensors. Return a tensor from get_extra_state, or keep the value in a buffer"
            )
    tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    _check_kinds(tensors)
    _check_coverage(module, tensors)


def _check_kinds(own: Mapping[str, Tensor]) -> None:
    """Write one number of each dtype."""
    first: dict[torch.dtype, str] = {}
    for name, tensor in own.items():
        first.setdefault(tensor.dtype, name)
    for dtype, name in first.items():
        try:
            save({"one": torch.zeros(1, dtype=torch.uint8).expand(16).clone().view(dtype)})
        except Exception as error:  # the exceptions of safetensors are not documented
            raise CheckpointError(
                f"{name} has dtype {dtype}, which safetensors does not support ({error}); convert it, or exclude it "
                "from the state dict (persistent=False)"
            ) from error


def _check_coverage(module: nn.Module, own: Mapping[str, Tensor]) -> None:
    """Every trained parameter must be in the state dict, not as a copy: loading writes into those tensors."""
    held: set[Any] = {id(value) for value in own.values()}
    held |= {_address(value) for value in own.values() if value.numel()} - {None}
    lost = [
        name
        for name, each in module.named_parameters(remove_duplicate=False)
        if each.requires_grad and each.numel() and id(each) not in held and _address(each) not in held
    ]
    if lost:
        raise CheckpointError(
            f"trainable parameters are missing from the model's state_dict(), or are copies there: {some(lost)}. "
            "Return them from state_dict(), or set save_only_model=True if the run will not be resumed"
        )


def _address(tensor: Any) -> Any:
    return None if hasattr(tensor, "device_mesh") else (address_of(tensor), str(tensor.device))


def check_companions(module: nn.Module) -> None:
    """Raise if the configuration of a transformers model cannot be written."""
    if not is_pretrained(module) or is_adapter(module):
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_config(module, Path(folder))
        except Exception as error:  # save_pretrained is code of the model
            raise CheckpointError(
                f"the configuration of {type(module).__name__} cannot be saved, so no checkpoint can be: {error}. "
                "Fix model.config or model.generation_config"
            ) from error


def export_warning(module: nn.Module) -> str | None:
    """A warning about what is lost in the files `save_model` writes, with a remedy; None if nothing is lost."""
    if not is_pretrained(module) or is_adapter(module) or getattr(module, "hf_quantizer", None) is not None:
        return None
    trouble = export_trouble(module, module.state_dict())
    if trouble is None:
        return None
    return (
        f"save_pretrained of {type(module).__name__} writes files that transformers cannot load into this model: "
        f'{trouble}. save_model() and checkpoint_format="transformers" are affected, native checkpoints are not; check '
        "for tied, added or replaced modules, or load checkpoints with loopwright.load_model"
    )
