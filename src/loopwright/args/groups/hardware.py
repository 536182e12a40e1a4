"""Seeds, determinism and the device."""

from __future__ import annotations

from dataclasses import dataclass

from ..field import Group, arg, non_negative


@dataclass
class HardwareArgs(Group):
    """Seeds, determinism and the device."""

    title = "Reproducibility and hardware"

    seed: int = arg(42, "Random seed.", check=non_negative)
    data_seed: int | None = arg(None, "Seed of the data order; defaults to seed.", check=non_negative)
    full_determinism: bool = arg(False, "Use deterministic kernels only, so that a run can be reproduced bit by bit.")
    use_cpu: bool = arg(False, "Train on the CPU even if there is an accelerator.")
