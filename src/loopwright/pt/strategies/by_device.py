"""The strategy for one device: the default one, or that of the device type."""

from __future__ import annotations

import torch

from ...args.base import BaseArguments
from ..device_traits import kind_of
from ..precision import Precision
from .single import SingleDevice


def strategy_on(args: BaseArguments, device: torch.device, precision: Precision) -> SingleDevice:
    """The strategy of a single process on this device."""
    non_blocking = bool(getattr(args.accelerator_config, "non_blocking", False)) or args.dataloader_pin_memory
    special = kind_of(device).strategy
    if special is None:
        return SingleDevice(device, precision, non_blocking=non_blocking)
    made: SingleDevice = special(args, device, precision)
    return made


def processes_on(args: BaseArguments, device: torch.device, precision: Precision) -> SingleDevice:
    """The strategy of several ranks, for a device type that has its own."""
    special = kind_of(device).processes
    assert special is not None
    made: SingleDevice = special(args, device, precision)
    return made
