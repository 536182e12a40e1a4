"""Tensor parallelism: layers split across neighbouring ranks, by the model's plan or one by name pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ...args.nested.sharding import FsdpOptions
from ...core.update import MicroBatch
from ...errors import ModelError
from ..checkpoint.shards import is_distributed
from ..distributed.process_group import Processes
from ..precision import Precision
from .fsdp import shard_model, synchronize
from .sharded import Sharded

Make = Callable[[], ParallelStyle]

STYLES: dict[str, tuple[Make, int]] = {
    "colwise": (lambda: ColwiseParallel(), 0),
    "colwise_rep": (lambda: ColwiseParallel(output_layouts=Replicate()), 0),
    "colwise_gather_output": (lambda: ColwiseParallel(output_layouts=Replicate()), 0),
    "rowwise": (lambda: RowwiseParallel(), 1),
    "rowwise_rep": (lambda: RowwiseParallel(input_layouts=Replicate()), 1),
    "rowwise_split_input": (lambda: RowwiseParallel(input_layouts=Replicate()), 1),
    "embedding_rowwise": (lambda: RowwiseParallel(input_layouts=Replicate()), 0),
}
"""Style -> its torch implementation, and the dimension of the weight that is split."""

PARTIAL = "replicated_with_grad_allreduce"
"""Full weights on parts of activations: each rank computes a part of their gradient."""
AS_IT_IS = ("replicate",)


class TensorParallel(Sharded):
    """Runs updates on groups of ranks that split layers, each group with a part of the data."""

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        processes: Processes,
        *,
        size: int,
        plan: Mapping[str, str] | None = None,
        sharding: FsdpOptions | None = None,
        compute_dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> None:
        super().__init__(device, precision, processes, non_blocking=non_blocking)
        self.size = size
        self.share_out(copies=size)
        self._plan, self._sharding, self._compute_dtype = plan, sharding, compute_dtype
        self.saves_whole = sharding is not None and sharding.whole_checkpoints
        # Neighbours split layers: they communicate most, and are most likely on one machine.
        self.mesh = init_device_mesh(
            device.type, (processes.world_size // size, size), mesh_dim_names=("data", "tensor")
        )
        self._partial: list[nn.Parameter] = []

    def shard(self, model: nn.Module) -> None:
        model.to(self.device)
        partial = split_layers(model, self.mesh["tensor"], plan_of(model, self._plan), self.size)
        if self._sharding is not None:
            shard_model(
                model,
                self.mesh["data"],
                self._sharding,
                compute_dtype=self._compute_dtype,
                device=self.device,
                strategy=self,
            )
        named = dict(model.named_parameters())
        self._partial = [named[name] for name in partial]

    @contextmanager
    def micro_batch(self, micro: MicroBatch) -> Iterator[None]:
        if self._sharding is not None:
            synchronize(self.model, is_last=micro.is_last)
        with super().micro_batch(micro):
            yield
        for parameter in self._partial if micro.is_last else ():
            if parameter.grad is not None:
                whole = parameter.grad._local_tensor if is_distributed(parameter.grad) else parameter.grad
                dist.all_reduce(whole, group=self.mesh.get_group("tensor"))


def plan_of(model: nn.Module, given: Mapping[str, str] | None) -> dict[str, str]:
    """The user's plan, or that of the model."""
    plan = dict(given or getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
    if not plan:
        raise ModelError(
            f"{type(model).__name__} has no tensor parallel plan; set one by name pattern: "
            "parallelism_config={'tp_size': 2, 'tp_plan': {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}}"
        )
    return plan


def split_layers(model: nn.Module, mesh: Any, plan: dict[str, str], size: int) -> list[str]:
    """Split the layers of the plan; returns unsplit parameters that get only a part of their gradient per rank."""
    modules = dict(model.named_modules())
    chosen = {pattern: [name for name in modules if fnmatch(name, pattern)] for pattern in plan}
    _check_plan(model, plan, chosen, size)
    tied = _tied(model)
    partial = []
    for pattern, names in chosen.items():
        for name in names:
            if plan[pattern] == PARTIAL:
                partial += [f"{name}.{key}" for key, _ in modules[name].named_parameters()]
            elif plan[pattern] not in AS_IT_IS:
                parallelize_module(modules[name], mesh, STYLES[plan[pattern]][0]())
    _tie_again(model, tied)
    return partial


def _check_plan(model: nn.Module, plan: dict[str, str], chosen: dict[str, list[str]], size: int) -> None:
    """Raise one error with all problems of the plan."""
    problems = []
    for pattern, names in chosen.items():
        style = plan[pattern]
        if style not in (*STYLES, PARTIAL, *AS_IT_IS):
            problems.append(f"{pattern}: the style {style!r} is not available (available: {', '.join(STYLES)})")
        elif not names:
            problems.append(f"{pattern}: no module of the model matches this name")
        elif style in STYLES:
            problems += [p for name in names if (p := _does_not_divide(model.get_submodule(name), name, style, size))]
    problems += _split_heads(model, chosen, size)
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems[:10])
        raise ModelError(f"the tensor parallel plan cannot be applied with tp_size={size}:{listed}")


def _does_not_divide(module: nn.Module, name: str, style: str, size: int) -> str | None:
    weight = getattr(module, "weight", None)
    if not isinstance(module, (nn.Linear, nn.Embedding)) or weight is None:
        return f"{name} is a {type(module).__name__}; only Linear and Embedding layers can be split"
    length = weight.shape[STYLES[style][1]]
    return f"{name}: {style} splits {length} into {size}, which is not divisible" if length % size else None


def _split_heads(model: nn.Module, chosen: dict[str, list[str]], size: int) -> list[str]:
    """Errors for attention heads that are not divisible: attention of transformers' models is split by heads."""
    config = getattr(model, "config", None)
    if config is None or not any("attn" in name for names in chosen.values() for name in names):
        return []
    counts = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    return [
        f"config.{name} is {count}, which is not divisible by {size} ranks"
        for name, count in counts.items()
        if isinstance(count, int) and count % size
    ]


def _tied(model: nn.Module) -> list[list[str]]:
    """Groups of names of tied weights."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def _tie_again(model: nn.Module, tied: list[list[str]]) -> None:
    """Tie weights again that were tied before."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for first, *others in tied:
        for name in others:
            one, other = parameters[first], parameters[name]
            if getattr(one, "placements", None) != getattr(other, "placements", None):
                raise ModelError(f"{first} and {name} are tied, but the plan splits them differently")
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, one)
