"""FSDP2: sharded parameters, gradients and optimizer state, gathered block by block (also HSDP, on a 2-d mesh)."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import checkpoint

from ...args.nested.sharding import FsdpOptions
from ...core.update import MicroBatch
from ...errors import ArgumentsError, ModelError
from ..checkpoint.shards import local_part
from ..devices import replaces_parameters
from ..distributed.process_group import Processes
from ..distributed.shared_devices import ACCELERATED, talks_by_gloo
from ..model.options import checkpoint_activations, move_model, repeated_blocks
from ..precision import Precision
from .base import ManyProcesses
from .sharded import Sharded


class FullySharded(Sharded):
    """Runs updates on several ranks that each hold a shard of the model."""

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        processes: Processes,
        *,
        options: FsdpOptions,
        replicas: int = 1,
        compute_dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> None:
        super().__init__(device, precision, processes, non_blocking=non_blocking)
        self.options, self._compute_dtype = options, compute_dtype
        self.saves_whole = options.whole_checkpoints
        self.makes_empty = options.cpu_ram_efficient_loading and self.rank > 0
        self.mesh = make_mesh(device, processes.world_size, replicas)

    def shard(self, model: nn.Module) -> None:
        shard_model(
            model, self.mesh, self.options, compute_dtype=self._compute_dtype, device=self.device, strategy=self
        )

    def micro_batch(self, micro: MicroBatch) -> AbstractContextManager[Any]:
        synchronize(self.model, is_last=micro.is_last)
        return super().micro_batch(micro)


def synchronize(model: Any, *, is_last: bool) -> None:
    """Reduce-scatter gradients only with the last micro-batch of an update."""
    model.set_requires_gradient_sync(is_last)
    model.set_is_last_backward(is_last)


def make_mesh(device: torch.device, world: int, replicas: int) -> DeviceMesh:
    """A 1-d mesh of all ranks or, with replicas, a 2-d mesh with a full model per row."""
    if replicas == 1:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    options: FsdpOptions,
    *,
    compute_dtype: torch.dtype | None,
    device: torch.device,
    strategy: ManyProcesses,
) -> None:
    """Shard the blocks of a model and then the rest, in place."""
    if device.type in ACCELERATED and talks_by_gloo(device):
        raise ArgumentsError(
            f"fsdp needs {ACCELERATED[device.type]}: over gloo, torch crashes with shards on a {device.type} device. "
            "Start one process per device and leave ddp_backend unset, or train without fsdp"
        )
    blocks = blocks_to_wrap(model, options)
    if options.activation_checkpointing:
        recompute(model, blocks)
    blocks = without_tied(model, blocks)
    empty = strategy.any_rank(any(p.is_meta for p in model.parameters()))
    whole = _on_first(model, strategy.rank) if empty else {}
    policy = MixedPrecisionPolicy(
        param_dtype=_dtype(options.param_dtype) or compute_dtype,
        # Reductions over many ranks lose too much precision in half precision.
        reduce_dtype=_dtype(options.reduce_dtype) or (torch.float32 if compute_dtype else None),
        output_dtype=_dtype(options.output_dtype),
    )
    given: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "reshard_after_forward": options.reshard_after_forward,
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu") if options.cpu_offload else OffloadPolicy(),
    }
    _check_dtypes(model, blocks)
    if not empty and not options.cpu_offload and replaces_parameters(device):
        move_model(model, device)  # otherwise sharding would use the device's memory for the host's parameters
    for block in blocks:
        fully_shard(block, **given)
    fully_shard(model, **given)
    if talks_by_gloo(device):
        for part in (*blocks, model):  # gloo has no means of tensors on a device in all versions of torch
            getattr(part, "set_force_sum_reduction_for_comms", lambda enable: None)(True)
    if callable(getattr(model, "generate", None)):  # it calls parts of the model directly
        register_fsdp_forward_method(model, "generate")
    if empty:
        fill_from_first(model, whole, torch.device("cpu") if options.cpu_offload else device, strategy.rank)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


# ---- selecting modules -----------------------------------------------------------------------------------------------


def blocks_to_wrap(model: nn.Module, options: FsdpOptions) -> list[nn.Module]:
    """The modules that are gathered one at a time, inner ones first; empty if the model is one unit."""
    if options.wrap == "NO_WRAP":
        return []
    if options.wrap == "SIZE_BASED_WRAP":
        return _by_size(model, options.min_num_params)
    names = list(options.layer_classes) or list(getattr(model, "_no_split_modules", None) or [])
    found = [each for each in reversed(list(model.modules())) if type(each).__name__ in names and each is not model]
    missing = [name for name in options.layer_classes if name not in {type(each).__name__ for each in found}]
    if missing:
        known = sorted({type(module).__name__ for module in model.modules() if list(module.children())})
        raise ModelError(
            f"fsdp_config['transformer_layer_cls_to_wrap'] names {missing[0]!r}, but the model has no such module; "
            f"it has {', '.join(known)}"
        )
    return found or repeated_blocks(model)


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Modules with at least `least` parameters outside the ones already selected, innermost first."""
    if least < 1:
        raise ModelError("fsdp_config['auto_wrap_policy']='SIZE_BASED_WRAP' needs min_num_params above 0")
    taken: set[nn.Parameter] = set()
    found = []
    for module in reversed(list(model.modules())):
        own = [p for p in module.parameters() if p not in taken]
        if module is not model and not isinstance(module, nn.ModuleList) and sum(p.numel() for p in own) >= least:
            found.append(module)
            taken.update(own)
    return found


def without_tied(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """The blocks that share no parameter with modules outside them: tied weights must be gathered together."""
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)

    def is_apart(block: nn.Module) -> bool:
        inside = set(block.modules())
        return all(owners[parameter] <= inside for parameter in block.parameters())

    return [block for block in blocks if is_apart(block)]


def _check_dtypes(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Raise if a unit has trainable parameters of several dtypes: torch reduces their gradients in one."""
    taken: set[nn.Parameter] = set()
    for unit in (*blocks, model):
        own = {name: p for name, p in unit.named_parameters() if p not in taken}
        taken.update(own.values())
        kinds = {p.dtype: name for name, p in own.items() if p.requires_grad}
        if len(kinds) > 1:
            listed = ", ".join(f"{name} is {str(kind).removeprefix('torch.')}" for kind, name in kinds.items())
            raise ModelError(
                f"fsdp reduces the gradients of {type(unit).__name__} together, so its trainable parameters must have "
                f"one dtype, but {listed}. Convert them to one dtype, freeze those of the other, or train without fsdp"
            )


def recompute(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Recompute the activations of each block in the backward pass."""
    if hasattr(model, "gradient_checkpointing_enable"):
        checkpoint_activations(model, None)
        return
    if not blocks:
        raise ModelError(
            "fsdp_config['activation_checkpointing']=True, but the model has no repeated blocks; set their class in "
            "transformer_layer_cls_to_wrap"
        )
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


# ---- weights that only rank 0 has ------------------------------------------------------------------------------------


def _on_first(model: nn.Module, rank: int) -> dict[str, Tensor]:
    if rank:
        return {}
    if any(p.is_meta for p in model.parameters()):
        raise ModelError("rank 0 has weights on the meta device too, so no rank can initialize them")
    return {name: tensor.detach().cpu() for name, tensor in _all_tensors(model).items()}


def _all_tensors(model: nn.Module) -> dict[str, Any]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def fill_from_first(model: nn.Module, whole: dict[str, Tensor], device: torch.device, rank: int) -> None:
    """Copy each rank's shards of the weights and buffers of rank 0, one tensor at a time."""
    if any(tensor.is_meta for tensor in _all_tensors(model).values()):
        model.to_empty(device=device)
    else:
        model.to(device)
    place = device if device.type != "cpu" or dist.get_backend() == "gloo" else torch.device("cpu")
    with torch.no_grad():
        for name, tensor in _all_tensors(model).items():
            full = whole[name].to(place) if rank == 0 else torch.empty(tensor.shape, dtype=tensor.dtype, device=place)
            dist.broadcast(full, src=0)
            box = local_part(tensor)
            box.values.copy_(full[box.places])
