"""What processes with the test device talk through: gloo, with copies in host memory. For tests only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future

from tests.native_device.device import NAME

LIBRARY = "hostcopies"


class HostCopies(dist.ProcessGroup):
    """A group that copies what is on the device to the host, lets gloo do the work, and copies the result back."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""

    def getBackendName(self) -> str:
        return LIBRARY

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _through_host(self, written: list[Tensor], read: list[Tensor], work: Callable[[Any, Any], Any]) -> Any:
        """Run on host copies of what is read and written, and copy back what was written."""
        targets = [each.cpu() for each in written]
        # What is both read and written is one tensor to gloo as well.
        place = {id(each): target for each, target in zip(written, targets, strict=True)}
        work(targets, [place.get(id(each), each.cpu()) for each in read]).wait()
        for each, target in zip(written, targets, strict=True):
            if each.device.type != "cpu":
                each.detach().copy_(target)
        future: Any = torch.futures.Future()
        future.set_result(written)
        return _create_work_from_future(future)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        given = () if options is None else (options,)
        return self._through_host(tensors, [], lambda out, _: self._gloo.allreduce(out, *given))

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self._through_host(tensors, [], lambda out, _: self._gloo.broadcast(out, options))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Any:
        (into,) = outputs
        return self._through_host(into, inputs, lambda out, given: self._gloo.allgather([out], given))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any = None) -> Any:
        given = [[each.cpu() for each in parts] for parts in inputs]
        return self._through_host(outputs, [], lambda out, _: self._gloo.scatter(out, given, options))

    def _allgather_base(self, output: Tensor, source: Tensor, options: Any = None) -> Any:
        return self._through_host([output], [source], lambda out, given: self._gloo._allgather_base(out[0], given[0]))

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: Any = None) -> Any:
        def work(out: Any, given: Any) -> Any:
            done = self._gloo.allreduce(given, options_of(options))
            done.wait()
            out[0].copy_(given[0].chunk(self.size())[self.rank()].reshape(out[0].shape))
            return done

        return self._through_host([output], [source], work)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # their names in newer torch

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None) -> Any:
        return _last(self._allgather_base(*pair) for pair in zip(outputs, inputs, strict=True))

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None) -> Any:
        return _last(self._reduce_scatter_base(*pair, options) for pair in zip(outputs, inputs, strict=True))

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> Any:
        return _last(self.allreduce([each], options_of(options)) for each in tensors)

    def barrier(self, options: Any = None) -> Any:
        return self._gloo.barrier()


def _last(works: Iterable[Any]) -> Any:
    """The last of several works, each of which has ended."""
    return list(works)[-1]


def options_of(options: Any) -> Any:
    """The reduction that is asked for, for an all-reduce."""
    made = dist.AllreduceOptions()
    if options is not None:
        made.reduceOp = options.reduceOp
    return made


def register() -> None:
    """Tell torch.distributed what the test device talks through, and give it the streams FSDP2 asks for.

    The device computes in the host's order, so its streams are those of the CPU: they have nothing to wait for.
    """
    dist.Backend.register_backend(LIBRARY, HostCopies, devices=[NAME])
    module = getattr(torch, NAME)
    module.Stream, module.Event, module.stream = torch.cpu.Stream, torch.cpu.Event, torch.cpu.stream
    module.current_stream = lambda device=None: torch.cpu.current_stream()
