"""Copying the micro-batches of an update to the device ahead of their use, on a stream of their own.

Only placement runs ahead, never reading: the batches of an update are in hand when it begins, so no random stream of
the data is touched earlier than without it.
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
"""What a device's module in torch must have for copies to run beside its work."""


class Prefetch:
    """Batches of an update on their way to the device.

    `begin` issues the copies, `take` gives the copy of one host tensor to the compute stream, which waits for it there;
    the host never waits. A tensor that was not announced, or was changed since, is copied on the spot.
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
        """Start copying these micro-batches; what was announced before and not taken is forgotten."""
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
        if copy.arrival.waiting != stream:
            stream.wait_event(copy.arrival.event)
            copy.arrival.waiting = stream
        # The memory belongs to the side stream: it may be given away only after the compute stream is done with it.
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
            arrival = Arrival(self._backend.Event())
            with self._backend.stream(self._stream):
                for tensor in tensors:
                    moved = self._send(tensor)
                    self._copies[id(tensor)] = Copy(tensor, tensor._version, moved, arrival)
                    self._bytes += moved.nbytes
                arrival.event.record(self._stream)

    def _send(self, tensor: Tensor) -> Tensor:
        """The tensor's copy on the device, in flight on the side stream."""
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
    """What stands in where a device has no streams: nothing runs ahead, tensors move when they are used."""

    runs = False

    def __init__(self, device: torch.device, *, non_blocking: bool = True) -> None:
        self._device, self._non_blocking = device, non_blocking

    def begin(self, batches: list[Any]) -> None:
        """Nothing to announce."""

    def take(self, tensor: Tensor) -> Tensor:
        """The tensor on the device."""
        return tensor.to(self._device, non_blocking=self._non_blocking)


def prefetch_for(device: torch.device, *, non_blocking: bool = True) -> Prefetch | NoPrefetch:
    """Prefetching for a device that has streams, its stand-in for the others.

    `non_blocking` is how tensors move that were not announced, as those of an evaluation.
    """
    backend = getattr(torch, device.type, None) if device.type != "cpu" else None
    kind = Prefetch if all(hasattr(backend, name) for name in NEEDED) else NoPrefetch
    return kind(device, non_blocking=non_blocking)


class Arrival:
    """The event after which the tensors of one batch are there, and the stream that waits for it already."""

    def __init__(self, event: Any) -> None:
        self.event = event
        self.waiting: Any = None


class Copy:
    """A host tensor on its way; it is kept, so that its id stays its own."""

    __slots__ = ("arrival", "moved", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int, moved: Tensor, arrival: Arrival) -> None:
        self.tensor, self.version, self.moved, self.arrival = tensor, version, moved, arrival


class Staging:
    """Pinned buffers that are written again only when the copy that reads them has ended.

    Each has an event, recorded after its copy; a buffer whose event has not happened is left alone and another one is
    taken, so the host does not wait.
    """

    def __init__(self, event: Callable[[], Any], *, pin: bool = True) -> None:
        self._event, self._pin = event, pin
        self._buffers: dict[int, deque[tuple[Tensor, Any]]] = {}

    def take(self, size: int) -> tuple[Tensor, Any]:
        """A free buffer of at least this many bytes, and the event to record after the copy from it."""
        room = max(4096, 1 << (size - 1).bit_length())  # few sizes, so that buffers come back into use
        buffers = self._buffers.setdefault(room, deque())
        # The oldest is in front: when its copy has not ended, none has.
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
    """Whether copying the bytes is all there is to moving this tensor: a plain host tensor outside autograd."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.numel() > 0
        and not tensor.is_quantized
    )
