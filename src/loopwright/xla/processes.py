"""Several processes on lazy torch_xla, on one host or many: each has a device, the whole model and a shard of the data.

Gradients are averaged once per update, in one of two ways. If the runtime of torch_xla spans all processes (TPU,
Trn1), the all-reduce is part of the step's graph, which must then be identical on every rank. If each process has its
own runtime (XLA on CPUs, hosts whose devices are not connected), gradients are reduced through the hosts. All other
communication uses the hosts: ranks are those of the launcher, and may differ from the order of the runtime's devices,
which does not matter for a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..args.base import BaseArguments
from ..core.update import MicroBatch
from ..errors import ArgumentsError, ModelError, NotAvailable
from ..pt.distributed.gather import gather_nested
from ..pt.distributed.process_group import Processes, open_processes
from ..pt.precision import Precision
from ..pt.strategies.base import ManyProcesses, joined, on_host
from ..pt.strategies.single import SingleDevice
from . import runtime
from .strategy import XlaDevice

HOST = torch.device("cpu")
BACKEND = "xla"


class XlaProcesses(XlaDevice, ManyProcesses):
    """Runs updates on several processes that each drive one lazy device."""

    logs_later = False  # logging all-reduces the loss, which must happen at the same point on every rank

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        processes: Processes,
        *,
        accumulates: bool = False,
        allowed: int | None = None,
        spans: bool | None = None,
    ) -> None:
        ManyProcesses.__init__(self, device, precision, processes)
        self._note(accumulates=accumulates, allowed=allowed, layout=None)
        self.spans = spans_all(runtime.replicas(), self.world_size) if spans is None else spans
        """Whether the runtime can all-reduce over all processes."""
        self.forward_is_collective = self.spans  # identical graphs need equal numbers of micro-batches
        self._trained: list[nn.Parameter] = []
        self._shared: list[bool] | None = None
        """Which parameters have a gradient on any rank, determined in the first update."""

    @classmethod
    def of(cls, args: BaseArguments, device: torch.device, precision: Precision) -> Self:
        """The strategy of these arguments."""
        asked = args.ddp_backend
        if asked not in (None, BACKEND):
            raise ArgumentsError(
                f"ddp_backend={asked!r} does not support lazy XLA devices; remove it, or use {BACKEND!r}"
            )
        runtime.register_backend()
        processes = open_processes(device, backend=BACKEND, timeout=args.ddp_timeout_delta)
        made = cls(
            device,
            precision,
            processes,
            accumulates=args.gradient_accumulation_steps > 1,
            allowed=args.max_recompiles,
        )
        if made.spans and len(args.static_lengths or ()) != 1:
            raise ArgumentsError(
                f"static_lengths={args.static_lengths}: ranks reduce gradients inside their graphs, which must be "
                "identical; use one length, such as static_lengths=[512]"
            )
        return made

    # ---- setting up -------------------------------------------------------------------------------------------------

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model itself, with the weights of rank 0."""
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            raise ModelError(
                "the model normalizes over batches, and on lazy XLA each rank would keep its own statistics; let one "
                "process drive all devices (xla_spmd='data'), or use another normalization"
            )
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                first = self.broadcast(tensor.detach().cpu() if self.rank == 0 else None)
                if self.rank:
                    tensor.copy_(first)
        return model

    # ---- one update -------------------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, micro: MicroBatch) -> Iterator[None]:
        with super().micro_batch(micro):
            yield
        if micro.is_last:
            self._average_gradients()

    def without_dummy(self, loss: Any, micro: MicroBatch) -> Any:
        """A number is sent to the device in any case: 0 and 1 are one graph."""
        return loss * (0.0 if micro.is_dummy else 1.0)

    def _average_gradients(self) -> None:
        if self._shared is None:
            self._shared = self._with_gradients_anywhere()
        for parameter, shared in zip(self._trained, self._shared, strict=True):
            if shared and parameter.grad is None:  # not used in this rank's loss
                parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype).to(self.device)
            elif parameter.grad is not None and not shared:
                raise ModelError(
                    f"{self._name_of(parameter)} got no gradient in the first step, so the other ranks expect "
                    "none; set requires_grad=False on it, or use it from the first step on"
                )
        gradients = [p.grad for p in self._trained if p.grad is not None]
        self._sum(gradients, scale=1.0 / self.data_world)

    def _with_gradients_anywhere(self) -> list[bool]:
        """For each parameter: whether any rank has a gradient."""
        rows = self.host.all_gather_numbers([float(parameter.grad is not None) for parameter in self._trained])
        return [any(column) for column in zip(*rows, strict=True)]

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next((name for name, each in self.model.named_parameters() if each is parameter), "a parameter")

    def follow(self) -> None:
        super().follow()
        self._trained, self._shared = self.contents.trained(), None

    def _sum(self, tensors: list[Tensor], *, scale: float = 1.0) -> None:
        """Sum over all ranks, in place."""
        if self.spans:
            runtime.sum_over_processes(tensors, scale)
            return
        self.boundary()
        for tensor, host in zip(tensors, runtime.to_host(tensors), strict=True):
            self._sum_on_host(host)
            tensor.copy_(host.mul_(scale) if host.is_floating_point() else host)

    def _sum_on_host(self, value: Tensor) -> None:
        dist.all_reduce(value, group=self.host.group)

    def mean_count(self, count: Any) -> Any:
        """The mean of a count over all shards of the data."""
        count = torch.as_tensor(count, dtype=torch.float32).to(self.device).detach().clone()
        self._sum([count])
        return count / self.world_size

    def nonfinite(self, loss: Tensor, norm: Tensor | None, *, sticky: bool) -> Tensor:
        flag = SingleDevice.nonfinite(self, loss, norm, sticky=False).to(torch.float32)
        self._sum([flag])
        return self._with_earlier(flag > 0) if sticky else flag > 0

    # ---- numbers ----------------------------------------------------------------------------------------------------

    def gather(self, values: Any) -> Any:
        return joined(self.gather_each(values))

    def gather_each(self, value: Any, *, objects: bool = False) -> list[Any]:
        """All-gather nested values, in host memory."""
        value = on_host(value)
        found = self.host.gather(value) if objects else gather_nested(value, self.host, HOST, self.host.group)
        return found[:: self.copies]


def spans_all(replicas: int, world_size: int) -> bool:
    """Whether the runtime spans all processes; otherwise it has the devices of this process only."""
    if replicas == world_size:
        return True
    if replicas == 1:
        return False
    raise NotAvailable(
        f"torch_xla's runtime has {replicas} devices, but the launcher started {world_size} processes; start one "
        "process per device, or one process that drives all devices (xla_spmd)"
    )
