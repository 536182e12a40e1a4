"""Copying the micro-batches of an update to the device ahead of their use, on a separate stream.

Only copies run ahead, not loading: the batches of an update are available when it begins, so random states of the data
do not change earlier than without prefetching.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

AHEAD = 512 * 2**20
"""Bytes of batches that may wait on the device for their use; the first batch of an update is always copied."""

NEEDED = ("Stream", "Event", "stream", "current_stream")
"""Attributes that torch's module for a device must have for concurrent copies."""


class Prefetch:
    """Copies of an update's batches in progress.

    `begin` issues the copies, `take` makes the compute stream wait for the copy of one host tensor and returns it; the
    host never waits. A tensor that was not passed to `begin`, or has changed since, is copied by `take`.
    """

    runs = True

    def __init__(self, device: torch.device, *, non_blocking: bool = True, ahead: int = AHEAD) -> None:
        self._device, self._non_blocking, self._limit = device, non_blocking, ahead
        self._backend = getattr(torch, device.type)
        self._stream: Any = None
        self._staging = Staging(self._backend.Event)
        self._waiting: deque[Any] = deque()
        self._copies: dict[int, Copy] = {}
        self._bytes = 0

    def begin(self, batches: list[Any]) -> None:
        """Start copying these micro-batches; earlier copies that were not taken are dropped."""
        self._copies.clear()
        self._bytes = 0
        self._waiting = deque(batches)
        if batches and self._stream is None:
            self._stream = self._backend.Stream(self._device)
        self._issue()

    def take(self, tensor: Tensor) -> Tensor:
        """The tensor on the device, safe to use on the current stream."""
        copy = self._copies.pop(id(tensor), None)
        if copy is None or copy.version != tensor._version:
            return tensor.to(self._device, non_blocking=self._non_blocking)
        stream = self._backend.current_stream(self._device)
        # For every tensor: a comparison of streams cannot say that this stream waits already (a stream of torch is
        # neither equal nor unequal to None), and waiting again costs the device nothing.
        stream.wait_event(copy.arrival)
        # The memory belongs to the side stream: it must not be reused before the compute stream is done with it.
        copy.moved.record_stream(stream)
        self._bytes -= copy.moved.nbytes
        if self._waiting:
            self._issue()
        return copy.moved

    def _issue(self) -> None:
        """Copy batches in order until enough of them wait on the device."""
        while self._waiting and (self._bytes < self._limit or not self._copies):
            tensors = [t for t in leaves(self._waiting.popleft()) if id(t) not in self._copies and _can_go(t)]
            if not tensors:
                continue
            arrival = self._backend.Event()
            with self._backend.stream(self._stream):
                for tensor in tensors:
                    moved = self._send(tensor)
                    self._copies[id(tensor)] = Copy(tensor, tensor._version, moved, arrival)
                    self._bytes += moved.nbytes
                arrival.record(self._stream)

    def _send(self, tensor: Tensor) -> Tensor:
        """The tensor's copy on the device, in progress on the side stream."""
        if tensor.is_pinned() or not tensor.is_contiguous():
            return tensor.to(self._device, non_blocking=True)
        buffer, event = self._staging.take(tensor.nbytes)
        staged = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor)
        moved = torch.empty_like(staged, device=self._device)
        moved.copy_(staged, non_blocking=True)
        event.record(self._stream)
        return moved


class NoPrefetch:
    """For devices without streams: tensors are copied when they are used."""

    runs = False

    def __init__(self, device: torch.device, *, non_blocking: bool = True) -> None:
        self._device, self._non_blocking = device, non_blocking

    def begin(self, batches: list[Any]) -> None:
        """Does nothing."""

    def take(self, tensor: Tensor) -> Tensor:
        """The tensor on the device."""
        return tensor.to(self._device, non_blocking=self._non_blocking)


def prefetch_for(device: torch.device, *, non_blocking: bool = True) -> Prefetch | NoPrefetch:
    """`Prefetch` for a device with streams, `NoPrefetch` for others.

    `non_blocking` applies to tensors that were not passed to `begin`, such as those of an evaluation.
    """
    backend = getattr(torch, device.type, None) if device.type != "cpu" else None
    kind = Prefetch if all(hasattr(backend, name) for name in NEEDED) else NoPrefetch
    return kind(device, non_blocking=non_blocking)


class Copy:
    """A host tensor and its copy in progress, which ends with the event `arrival`.

    The tensor is referenced, so that its id is not reused.
    """

    __slots__ = ("arrival", "moved", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int, moved: Tensor, arrival: Any) -> None:
        self.tensor, self.version, self.moved, self.arrival = tensor, version, moved, arrival


class Staging:
    """Pinned buffers that are reused only when the copy that reads them has ended.

    Each has an event, recorded after its copy; while the event of a buffer is pending, another buffer is used, so the
    host does not wait.
    """

    def __init__(self, event: Callable[[], Any], *, pin: bool = True) -> None:
        self._event, self._pin = event, pin
        self._buffers: dict[int, deque[tuple[Tensor, Any]]] = {}

    def take(self, size: int) -> tuple[Tensor, Any]:
        """A free buffer of at least this many bytes, and the event to record after the copy from it."""
        room = max(4096, 1 << (size - 1).bit_length())  # few sizes, so that buffers are reused
        buffers = self._buffers.setdefault(room, deque())
        # The oldest is first: if its copy has not ended, no other has.
        if buffers and buffers[0][1].query():
            buffers.rotate(-1)
        else:
            buffers.append((torch.empty(room, dtype=torch.uint8, pin_memory=self._pin), self._event()))
        return buffers[-1]

    def __len__(self) -> int:
        return sum(map(len, self._buffers.values()))


def leaves(batch: Any) -> Iterator[Tensor]:
    """Every tensor in a batch of nested containers."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from leaves(value)


def _can_go(tensor: Tensor) -> bool:
    """Whether a tensor can be moved by copying its bytes: a plain host tensor outside autograd."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.numel() > 0
        and not tensor.is_quantized
    )
