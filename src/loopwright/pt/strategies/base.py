"""The base of all strategies with several ranks: any-rank decisions, gathering, and reduced numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.evaluation.predictions import map_nested
from ...core.update import MicroBatch
from ..distributed.failure import Alarm
from ..distributed.gather import gather_nested
from ..distributed.process_group import Host, Processes
from ..precision import Precision
from .single import SingleDevice


class ManyProcesses(SingleDevice):
    """One of several ranks, each with its own device and a part of the data.

    Gradients are averaged over the parts of the data, so every rank weights its losses relative to the mean number of
    targets per part (`Update.total_items`): the result is the mean over all targets of the update.
    """

    alarm: Alarm

    def __init__(
        self, device: torch.device, precision: Precision, processes: Processes, *, non_blocking: bool = False
    ) -> None:
        super().__init__(device, precision, non_blocking=non_blocking)
        self.processes, self.host = processes, processes.host
        self.rank, self.world_size = processes.rank, processes.world_size
        self.share_out(copies=1)
        self.alarm = Alarm(processes)

    @property
    def saving(self) -> Host:
        return self.processes.saving

    @property
    def store(self) -> Any:
        return self.processes.store

    def share_out(self, *, copies: int) -> None:
        """Let `copies` neighbouring ranks at a time use the same part of the data."""
        self.copies = copies
        self.data_rank, self.data_world = self.rank // copies, self.world_size // copies

    # ---- one update -------------------------------------------------------------------------------------------------

    def add(self, total: Any, loss: Any, micro: MicroBatch) -> Any:
        return super().add(total, self.without_dummy(loss, micro), micro)

    def without_dummy(self, loss: Any, micro: MicroBatch) -> Any:
        return loss * 0 if micro.is_dummy else loss

    def mean_count(self, count: Any) -> Any:
        """The mean of a count over all parts of the data."""
        count = torch.as_tensor(count, dtype=torch.float64).to(self.device)
        dist.all_reduce(count)
        return count / self.world_size

    def nonfinite(self, loss: Tensor, norm: Tensor | None, *, sticky: bool) -> Tensor:
        flag = super().nonfinite(loss, norm, sticky=False).to(torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return self._with_earlier(flag.bool()) if sticky else flag.bool()

    # ---- numbers and collectives -------------------------------------------------------------------------------------

    def all_gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        """The numbers of all ranks, one row per part of the data."""
        return self.host.all_gather_numbers(numbers)[:: self.copies]

    def reduce(self, values: list[float]) -> list[float]:
        """The mean of each number over the parts of the data."""
        rows = self.all_gather_numbers(values)
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)]

    def gather(self, values: Any) -> Any:
        """Nested tensors of all ranks, joined along their first dimension."""
        found = gather_nested(values, self.host, self.device)[:: self.copies]
        return joined(found)

    def gather_each(self, value: Any, *, objects: bool = False) -> list[Any]:
        """All-gather: the nested values of every data rank; tensors are sent as tensors unless `objects` is set."""
        found = self.host.gather(value) if objects else gather_nested(value, self.host, self.device)
        return found[:: self.copies]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return self.host.broadcast(value, source)

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return any(row[0] for row in self.host.all_gather_numbers([float(flag)]))

    def numbers_of_ranks(self, numbers: list[float]) -> list[list[float]]:
        return self.host.all_gather_numbers(numbers)

    def barrier(self) -> None:
        self.host.barrier()


def on_host(value: Any) -> Any:
    """Nested values with every tensor in host memory, to be sent to another rank."""
    return map_nested(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, plain_nest(value))


def plain_nest(value: Any) -> Any:
    """A batch as plain dicts: other mappings may not be serializable."""
    if isinstance(value, dict):
        return value if type(value) is dict else dict(value)
    return dict(value) if hasattr(value, "keys") and hasattr(value, "__getitem__") else value


def joined(found: list[Any]) -> Any:
    """The nested tensors of all ranks, joined along their first dimension."""
    first = found[0]
    if isinstance(first, Tensor):
        return torch.cat([each.reshape(1) if each.dim() == 0 else each for each in found])
    if isinstance(first, dict):
        return {name: joined([each[name] for each in found]) for name in first}
    if isinstance(first, (list, tuple)):
        return type(first)(joined(list(parts)) for parts in zip(*found, strict=True))
    return found
