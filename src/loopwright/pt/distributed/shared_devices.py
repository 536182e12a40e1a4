"""Ranks that share a device: which ones do, and which communication backend they need."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...errors import ArgumentsError
from ...notices import logger

ACCELERATED = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "mlu": "cncl", "musa": "mccl"}
"""The communication backend of each device type."""


def device_identity(device: torch.device) -> str:
    """What the device is called on every rank, however many of them a rank sees; empty if it cannot be said."""
    backend: Any = getattr(torch, device.type, None)
    if device.type == "cpu" or not hasattr(backend, "get_device_properties"):
        return ""
    return str(getattr(backend.get_device_properties(device), "uuid", None) or "")


def gathered(own: str, store: Any, rank: int, world: int) -> list[str]:
    """The values of all ranks, through the store that they meet in."""
    store.set(f"device/{rank}", own)
    return [store.get(f"device/{each}").decode() for each in range(world)]


def sharing(identities: list[str]) -> list[list[int]]:
    """The ranks on each device that several ranks use."""
    places: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        if identity:
            places.setdefault(identity, []).append(rank)
    return [ranks for ranks in places.values() if len(ranks) > 1]


def backend_of_shared(
    device: torch.device, asked: str | None, store: Any, rank: int, world: int, identity: str | None = None
) -> str | None:
    """The backend of the arguments; without one, gloo if ranks share a device, which nccl refuses."""
    own = device_identity(device) if identity is None else identity
    if device.type not in ACCELERATED or asked not in (None, ACCELERATED[device.type]):
        return asked
    shared = sharing(gathered(own, store, rank, world))
    if not shared:
        return asked
    names = f"ranks {', '.join(map(str, shared[0]))} share one {device.type} device"
    if asked is not None:
        raise ArgumentsError(
            f"ddp_backend={asked!r} needs a device for each rank, but {names}; start fewer processes, or remove "
            "ddp_backend to communicate by gloo"
        )
    if rank == 0:
        logger.warning(
            f"{names}: they communicate by gloo through host memory, because {ACCELERATED[device.type]} needs a device "
            "for each rank; start one process per device for full speed"
        )
    return "gloo"


def talks_by_gloo(device: torch.device) -> bool:
    """Whether tensors of an accelerator are sent by gloo in the default group, instead of its own library."""
    if device.type not in ACCELERATED or dist.group.WORLD is None:
        return False
    return bool(dist.group.WORLD._get_backend(device).name() == "gloo")
