"""Accelerators and CPUs of this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Accelerators and CPUs that this process may use."""

    devices: int
    """Number of accelerators; 0 on a CPU machine."""
    cores: int
    kind: str = "cpu"


def this_machine() -> Machine:
    """This machine, as reported by torch and the operating system."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not torch.accelerator.is_available():
        return Machine(0, cores)
    kind = torch.accelerator.current_accelerator()
    return Machine(torch.accelerator.device_count(), cores, kind.type if kind is not None else "cpu")
