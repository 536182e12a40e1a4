"""The process group of a run, and collectives between ranks on the host.

There are three groups: torch's default group for tensors; a gloo group for values on the host, which never waits for a
device; and a gloo group for saving, which runs while training continues.
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

from ...core.shutdown.parent import stop_with_launcher
from ...errors import ArgumentsError
from ..devices import is_lazy
from .rendezvous import agree_on_round
from .shared_devices import ACCELERATED, backend_of_shared

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_opened: Processes | None = None


class Host:
    """Collectives in host memory, in their own process group."""

    def __init__(self, group: Any, rank: int, world_size: int) -> None:
        self.group, self.rank, self.world_size = group, rank, world_size

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Broadcast the source's value."""
        holder = [value]
        dist.broadcast_object_list(holder, src=source, group=self.group, device=torch.device("cpu"))
        return holder[0]

    def all_gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        """The numbers of all ranks, by rank: the same count from each, in double precision."""
        own = torch.tensor(numbers, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(found, own, group=self.group)
        return [each.tolist() for each in found]

    def barrier(self) -> None:
        self.all_gather_numbers([0.0])


class Processes:
    """The ranks of this run."""

    def __init__(self, timeout: timedelta, *, ours: bool) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.timeout, self._ours = timeout, ours
        self.host = Host(dist.new_group(backend="gloo", timeout=timeout), self.rank, self.world_size)
        self.saving = Host(dist.new_group(backend="gloo", timeout=timeout), self.rank, self.world_size)
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.names = self.host.gather(socket.gethostname())
        """The host name of each rank."""
        self.has_compared = False
        """Whether the ranks have compared their arguments."""
        self._name = self.host.broadcast(secrets.token_hex(8))

    @property
    def store(self) -> Any:
        """The key-value store of the process group, with a prefix for this group.

        torchrun keeps the store when it restarts the processes; the prefix hides entries of earlier starts.
        """
        return dist.PrefixStore(f"loopwright/{self._name}", dist.distributed_c10d._get_default_store())

    def close(self) -> None:
        """Destroy the group, if it was created here."""
        global _opened
        _opened = None
        atexit.unregister(self.close)  # it would keep the groups, and their threads, until the process ends
        if self._ours and dist.is_initialized():
            with suppress(Exception):  # at the end of the process a peer may already be gone
                dist.destroy_process_group()


def open_processes(device: torch.device, *, backend: str | None, timeout: timedelta) -> Processes:
    """The ranks started by a launcher, joined in a process group that all trainers of a process share."""
    global _opened
    if _opened is not None and dist.is_initialized():
        return _opened
    stop_with_launcher()
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
    libraries = backend_for(device, backend_of_shared(device, backend, store, rank, world))
    dist.init_process_group(libraries, store=store, rank=rank, world_size=world, timeout=timeout)


def backend_for(device: torch.device, asked: str | None) -> str:
    """The communication backends for a device, always including gloo for the host."""
    if device.type == "cpu":
        if asked in ACCELERATED.values():
            raise ArgumentsError(
                f"ddp_backend={asked!r} communicates between accelerators, but this run is on the CPU; remove it, or "
                "use 'gloo'"
            )
        return asked or "gloo"
    # A device of a separate package has registered its backend with torch.
    backend_of_device = dist.Backend.default_device_backend_map.get(device.type, "gloo")
    return f"cpu:gloo,{device.type}:{asked or ACCELERATED.get(device.type, backend_of_device)}"
