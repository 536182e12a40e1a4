"""Seeds, determinism and the device."""

from __future__ import annotations

from dataclasses import dataclass

from .field import Group, arg, non_negative


@dataclass
class HardwareArgs(Group):
    """Seeds, determinism and the device."""

    title = "Reproducibility and hardware"

    seed: int = arg(42, "Seed of all random numbers.", check=non_negative)
    data_seed: int | None = arg(None, "Seed of the order of the data; seed when not given.", check=non_negative)
    full_determinism: bool = arg(False, "Only deterministic kernels, so that a run can be repeated bit by bit.")
    use_cpu: bool = arg(False, "Train on the CPU even where there is an accelerator.")
