"""Strategies whose parameters are sharded as DTensors: global norms, and optimizers of shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ...errors import ModelError
from ..checkpoint.shards import is_distributed
from .base import ManyProcesses


class Sharded(ManyProcesses):
    """Ranks that hold shards of the parameters."""

    is_sharded = True
    forward_is_collective = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._spread: list[nn.Parameter] = []
        """The sharded parameters."""
        self._successors: dict[nn.Parameter, nn.Parameter] = {}
        """The sharded parameter for each original one."""

    def setup_model(self, model: nn.Module, *, place: bool = True) -> nn.Module:
        """Shard the model across the ranks, in place."""
        before = dict(model.named_parameters(remove_duplicate=False))
        self.shard(model)
        after = dict(model.named_parameters(remove_duplicate=False))
        self._spread = list(after.values())
        self._successors = {old: after[name] for name, old in before.items() if after[name] is not old}
        return super().setup_model(model, place=False)

    def shard(self, model: nn.Module) -> None:
        raise NotImplementedError

    def detect_changes(self) -> bool:
        """Apply changes since the last update. Reshards first: a forward without a backward leaves full parameters."""
        if not self.contents.is_same():
            for module in self.contents.modules:
                if isinstance(module, FSDPModule):
                    module.reshard()
        return super().detect_changes()

    def follow(self) -> None:
        super().follow()
        self._refuse_strangers()
        # Parameters on different meshes, or on none, cannot be passed to the optimizer's kernels in one list.
        meshes = {str(getattr(p, "device_mesh", None)) for p in self.contents.trained()}
        for group in getattr(self.optimizer, "param_groups", []) if len(meshes) > 1 else []:
            group.update({name: False for name in ("foreach", "fused") if name in group})

    def _refuse_strangers(self) -> None:
        """Raise for parameters added after sharding: they have no shards, and their gradients would not be reduced."""
        known = set(map(id, self._spread))
        strangers = [n for n, p in self.model.named_parameters() if id(p) not in known and p.requires_grad]
        if strangers:
            raise ModelError(
                f"these parameters were added or replaced after the model was sharded: {', '.join(strangers[:10])}. "
                "Add them before you pass the model to the trainer"
            )

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Set the optimizer; one created for the unsharded parameters is switched to the sharded ones."""
        self._move_to_successors(optimizer)
        return super().setup_optimizer(optimizer)

    def _move_to_successors(self, optimizer: Any) -> None:
        groups = getattr(optimizer, "param_groups", [])
        old = [p for group in groups for p in group["params"] if p in self._successors]
        if not old:
            return
        if not isinstance(optimizer, torch.optim.Optimizer) or optimizer.state:
            raise ModelError(
                f"the optimizer passed to the trainer ({type(optimizer).__name__}) holds the unsharded parameters "
                "and has state already; pass optimizer_cls_and_kwargs=(class, options), or override create_optimizer"
            )
        for group in groups:
            group["params"] = [self._successors.get(p, p) for p in group["params"]]

    def fold_clipping(self, allowed: Any) -> None:
        """Does nothing: the optimizer's kernel has only the norm of this rank's shards, so it does not clip."""

    # ---- gradients --------------------------------------------------------------------------------------------------

    def _gradients(self) -> list[Any]:
        return [p.grad for p in self._clipped if p.grad is not None]

    def scale_gradients(self, factor: Any) -> None:
        parts = [_part(p.grad) for p in self.contents.everything if p.grad is not None]
        if parts:
            torch._foreach_mul_(parts, factor)

    def clip_gradients(self, max_norm: float | None, *, want_norm: bool) -> Any:
        self.detect_changes_inside()
        if not max_norm and not want_norm:
            return None
        gradients = self._gradients()
        norm = global_norm(gradients, self.device)
        if max_norm:
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_([_part(gradient) for gradient in gradients], factor)
        return norm


def _part(gradient: Any) -> Tensor:
    """This rank's shard of a gradient."""
    return gradient._local_tensor if is_distributed(gradient) else gradient


def global_norm(gradients: Iterable[Any], device: torch.device) -> Tensor:
    """The norm of the full gradients: squares of the shards are summed over the ranks with different shards."""
    spread: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        spread.setdefault(_groups_of(gradient), []).append(_part(gradient))
    total = torch.zeros((), dtype=torch.float64, device=device)
    kind = torch.float32
    for groups, parts in spread.items():
        kind = torch.promote_types(kind, parts[0].dtype)
        norms = torch._foreach_norm([part.to(device) for part in parts])
        squares = torch.stack([norm.to(torch.float64) ** 2 for norm in norms]).sum()
        for group in groups:
            dist.all_reduce(squares, group=group)
        total = total + squares
    return total.sqrt().to(kind)


def _groups_of(gradient: Any) -> tuple[Any, ...]:
    """The process groups across which a gradient is sharded."""
    if not is_distributed(gradient):
        return ()
    mesh = gradient.device_mesh
    return tuple(mesh.get_group(dim) for dim, kind in enumerate(gradient.placements) if not kind.is_replicate())
