"""How the learning rate changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..field import Group, arg, options, steps_or_share
from ..names import SchedulerType


@dataclass
class ScheduleArgs(Group):
    """How the learning rate changes."""

    title = "Learning-rate schedule"

    lr_scheduler_type: SchedulerType | str = arg("linear", "The learning rate schedule, by name; see SchedulerType.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = arg(
        None, "Options of the schedule, as a dict or as JSON.", check=options
    )
    warmup_steps: float = arg(0, "Warmup steps; below 1, a fraction of all steps.", check=steps_or_share)
