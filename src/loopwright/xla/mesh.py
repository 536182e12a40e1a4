"""SPMD: one process drives all devices, and annotations define how tensors are sharded across them."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ..args.base import BaseArguments
from ..errors import ArgumentsError, ModelError
from . import runtime

DATA, MODEL = "data", "model"

STYLES = {"colwise": 0, "colwise_rep": 0, "colwise_gather_output": 0, "embedding_rowwise": 0,
          "rowwise": 1, "rowwise_rep": 1, "rowwise_split_input": 1}  # fmt: skip
"""Styles of a tensor parallel plan, and the dimension of the weight that each splits."""


class MeshLayout:
    """The layout of tensors on a mesh: batches by rows; weights replicated, sharded (FSDP) or split by a plan."""

    def __init__(self, devices: int, *, shards: bool = False, tensor: int = 1, plan: Mapping[str, str] | None = None):
        import torch_xla.distributed.spmd as xs

        if devices % tensor:
            raise ArgumentsError(f"tensor_parallel_size={tensor} does not divide the {devices} available devices")
        self._spmd = xs
        self.rows, self.tensor, self.shards, self.plan = devices // tensor, tensor, shards, dict(plan or {})
        self.mesh = xs.Mesh(np.arange(devices), (self.rows, tensor), (DATA, MODEL))
        xs.set_global_mesh(self.mesh)
        self._specs: dict[int, tuple[str | None, ...]] = {}

    @classmethod
    def of(cls, args: BaseArguments) -> Self | None:
        """The layout of these arguments; None with one device."""
        spread = getattr(args, "xla_spmd", None)
        tensor = getattr(args, "tensor_parallel_size", 1)
        if spread is None and tensor == 1:
            return None
        devices = runtime.use_spmd()
        return cls(devices, shards=spread == "fsdp", tensor=tensor, plan=getattr(args, "tensor_parallel_plan", None))

    # ---- weights ----------------------------------------------------------------------------------------------------

    def spread(self, model: nn.Module) -> None:
        """Annotate every parameter with its sharding."""
        splits = self._split_by_plan(model) if self.tensor > 1 else {}
        for name, parameter in model.named_parameters():
            split = splits.get(name)
            if split is not None and parameter.shape[split] % self.tensor:
                raise ModelError(
                    f"tensor_parallel_size={self.tensor} does not divide dimension {split} of {name}, whose shape is "
                    f"{tuple(parameter.shape)}; choose another size, or remove the layer from tensor_parallel_plan"
                )
            self._mark(parameter, self._spec(parameter, split))

    def spread_state(self, optimizer: Any) -> None:
        """Shard optimizer state like its parameter."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                spec = self._specs.get(runtime.identity(parameter), (None,) * parameter.dim())
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor) and value.shape == parameter.shape and value.device.type == "xla":
                        self._mark(value, spec)

    def _split_by_plan(self, model: nn.Module) -> dict[str, int]:
        """Parameter name -> dimension that the plan splits."""
        plan = self.plan or dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
        if not plan:
            raise ModelError(
                f"{type(model).__name__} has no tensor parallel plan; set one by name pattern: "
                "tensor_parallel_plan={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}"
            )
        unknown = [style for style in plan.values() if style not in STYLES and style not in ("replicate",)]
        if unknown:
            raise ArgumentsError(f"tensor_parallel_plan: {unknown[0]!r} is not one of {', '.join(STYLES)}, replicate")
        splits: dict[str, int] = {}
        for name, module in model.named_modules():
            style = next((style for pattern, style in plan.items() if fnmatch(name, pattern)), None)
            if style in STYLES:
                splits.update(_splits_of(name, module, STYLES[style]))
        if not splits:
            raise ModelError(f"tensor_parallel_plan matches no layer of {type(model).__name__}: {', '.join(plan)}")
        return splits

    def _spec(self, parameter: Tensor, split: int | None) -> tuple[str | None, ...]:
        """The mesh axis of each dimension: the plan's, and for FSDP the longest other one that divides evenly."""
        spec: list[str | None] = [None] * parameter.dim()
        if split is not None:
            spec[split] = MODEL
        if self.shards:
            free = [d for d in range(parameter.dim()) if spec[d] is None and parameter.shape[d] % self.rows == 0]
            if free:
                spec[max(free, key=lambda d: parameter.shape[d])] = DATA
        return tuple(spec)

    def _mark(self, tensor: Tensor, spec: tuple[str | None, ...]) -> None:
        self._specs[runtime.identity(tensor)] = spec
        if tensor.dim():
            self._spmd.mark_sharding(tensor, self.mesh, spec)

    # ---- batches ----------------------------------------------------------------------------------------------------

    def spread_batch(self, batch: Any) -> None:
        """Shard the rows of every input across the data axis."""
        several = list(batch.values()) if isinstance(batch, Mapping) else batch
        for value in several if isinstance(several, (list, tuple)) else [several]:
            if isinstance(value, Tensor) and value.dim() and value.device.type == "xla":
                self._check_rows(value.shape[0])
                self._spmd.mark_sharding(value, self.mesh, (DATA, *(None,) * (value.dim() - 1)))

    def _check_rows(self, rows: int) -> None:
        if rows % self.rows:
            raise ArgumentsError(
                f"a batch of {rows} rows cannot be split evenly across {self.rows} devices; change "
                "per_device_train_batch_size and per_device_eval_batch_size (here: rows of all devices)"
            )


def _splits_of(name: str, module: nn.Module, dimension: int) -> dict[str, int]:
    splits = {}
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(weight, torch.nn.Parameter):
        splits[f"{name}.weight"] = dimension
    if isinstance(bias, torch.nn.Parameter) and dimension == 0:
        splits[f"{name}.bias"] = 0
    return splits
