"""Arguments of accelerations that are enabled automatically."""

from __future__ import annotations

from dataclasses import dataclass

from ..field import Group, arg


@dataclass
class SpeedArgs(Group):
    """Arguments of accelerations that are enabled automatically."""

    title = "Speed"

    speed: str = arg(
        "auto",
        "Accelerations, each verified to give the same result: off, auto (those that pay off in this run), max (all).",
        choices=("off", "auto", "max"),
    )
    measure_matmul: bool = arg(
        False, "Measure matrix products for a second before training, and report MFU relative to them as well."
    )
