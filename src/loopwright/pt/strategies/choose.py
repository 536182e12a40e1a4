"""Which strategy carries out a run: one table of what can go together, and why the rest cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ArgumentsError, NotAvailable
from ..precision import Precision
from .group import open_processes
from .single import SingleDevice

Build = Callable[[Any, torch.device, Precision], Any]


@dataclass(frozen=True)
class Refused:
    """A combination that is not legal, or not possible yet, and what to do instead."""

    reason: str


def _single(args: Any, device: torch.device, precision: Precision) -> Any:
    return SingleDevice(device, precision, non_blocking=_non_blocking(args))


def _ddp(args: Any, device: torch.device, precision: Precision) -> Any:
    from .ddp import DataParallel

    names = {
        "ddp_find_unused_parameters": "find_unused_parameters",
        "ddp_bucket_cap_mb": "bucket_cap_mb",
        "ddp_broadcast_buffers": "broadcast_buffers",
        "ddp_static_graph": "static_graph",
    }
    given = {theirs: getattr(args, ours) for ours, theirs in names.items() if getattr(args, ours) is not None}
    return DataParallel(device, precision, _processes(args, device), options=given, non_blocking=_non_blocking(args))


def _processes(args: Any, device: torch.device) -> Any:
    return open_processes(device, backend=args.ddp_backend, timeout=args.ddp_timeout_delta)


def _non_blocking(args: Any) -> bool:
    return bool(getattr(args.accelerator_config, "non_blocking", False)) or args.dataloader_pin_memory


TABLE: dict[frozenset[str], Build | Refused] = {
    frozenset(): _single,
    frozenset({"processes"}): _ddp,
}
"""What was asked for -> who does it."""


def asked_for(args: Any) -> frozenset[str]:
    """What of the table these arguments ask for."""
    return frozenset({"processes"} if args.world_size > 1 else ())


def choose_strategy(args: Any, device: torch.device, precision: Precision) -> Any:
    """The strategy for these arguments, or an error that says why there is none."""
    asked = asked_for(args)
    row = TABLE.get(asked)
    if row is None:
        raise NotAvailable(f"{' with '.join(sorted(asked))}: this combination is not available")
    if isinstance(row, Refused):
        raise ArgumentsError(row.reason)
    return row(args, device, precision)
