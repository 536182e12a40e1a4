"""Accelerations that are switched on by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from .field import Group, arg


@dataclass
class SpeedArgs(Group):
    """Accelerations that are switched on by themselves."""

    title = "Speed"

    speed: str = arg(
        "auto",
        "Accelerations: off, auto (only those proved to give the same result), or max.",
        choices=("off", "auto", "max"),
    )
