"""The process group of a run, and exchanges between ranks on the host.

Three groups. torch's default one carries tensors; a gloo group carries what the hosts agree on, so that asking for it
never waits for a device; and another gloo group belongs to saving, which talks while training goes on.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ArgumentsError
from ..devices import is_lazy
from .rendezvous import agree_on_round

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

ACCELERATED = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "mlu": "cncl", "musa": "mccl"}
"""The library each kind of device talks with."""

_opened: Processes | None = None


class Host:
    """Collectives in host memory, through a process group of their own."""

    def __init__(self, group: Any, rank: int, world_size: int) -> None:
        self.group, self.rank, self.world_size = group, rank, world_size

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Broadcast the source's value."""
        holder = [value]
        dist.broadcast_object_list(holder, src=source, group=self.group, device=torch.device("cpu"))
        return holder[0]

    def all_gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        """Everybody's numbers, by rank: as many from each, in double precision."""
        own = torch.tensor(numbers, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(found, own, group=self.group)
        return [each.tolist() for each in found]

    def barrier(self) -> None:
        self.all_gather_numbers([0.0])


class Processes:
    """All processes of this run, seen from this one."""

    def __init__(self, timeout: timedelta, *, ours: bool) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.timeout, self._ours = timeout, ours
        self.host = Host(dist.new_group(backend="gloo", timeout=timeout), self.rank, self.world_size)
        self.saving = Host(dist.new_group(backend="gloo", timeout=timeout), self.rank, self.world_size)
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.names = self.host.gather(socket.gethostname())
        """The machine each process is on, by rank."""
        self._name = self.host.broadcast(secrets.token_hex(8))

    @property
    def store(self) -> Any:
        """The key-value store the group was opened with, for this group alone.

        torchrun keeps the store when it starts the processes again: what they said then must not be heard now.
        """
        return dist.PrefixStore(f"loopwright/{self._name}", dist.distributed_c10d._get_default_store())

    def close(self) -> None:
        """Leave the group, if this is where it was opened."""
        global _opened
        _opened = None
        if self._ours and dist.is_initialized():
            with suppress(Exception):  # at the end of the process: a peer may be gone already
                dist.destroy_process_group()


def open_processes(device: torch.device, *, backend: str | None, timeout: timedelta) -> Processes:
    """The processes a launcher started, joined in a group; one group serves all trainers of a process."""
    global _opened
    if _opened is not None and dist.is_initialized():
        return _opened
    ours = not dist.is_initialized()
    if ours:
        _initialize(device, backend, timeout)
    _opened = Processes(timeout, ours=ours)
    if ours:
        atexit.register(_opened.close)
    return _opened


def _initialize(device: torch.device, backend: str | None, timeout: timedelta) -> None:
    libraries = backend_for(device, backend)
    if device.type != "cpu" and not is_lazy(device):
        torch.accelerator.set_device_index(device.index or 0)
    alone = int(os.environ.get("WORLD_SIZE") or 1) == 1
    if alone and any(name not in os.environ for name in NEEDED):
        dist.init_process_group(libraries, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        raise ArgumentsError(
            f"WORLD_SIZE={os.environ.get('WORLD_SIZE')} means several ranks, but {', '.join(missing)} is not set, so "
            "they cannot find each other; start the script with torchrun, which sets all of them"
        )
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    name = agree_on_round(store, rank, world, timeout)
    store = dist.PrefixStore(name, store)
    dist.init_process_group(libraries, store=store, rank=rank, world_size=world, timeout=timeout)


def backend_for(device: torch.device, asked: str | None) -> str:
    """The communication libraries of a device, gloo for the host always among them."""
    if device.type == "cpu":
        if asked in ACCELERATED.values():
            raise ArgumentsError(
                f"ddp_backend={asked!r} communicates between accelerators, but this run is on the CPU; remove it, or "
                "use 'gloo'"
            )
        return asked or "gloo"
    # A device that came with a package of its own has registered its backend with torch.
    theirs = dist.Backend.default_device_backend_map.get(device.type, "gloo")
    return f"cpu:gloo,{device.type}:{asked or ACCELERATED.get(device.type, theirs)}"
