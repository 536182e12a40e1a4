"""How long to train, and on how much at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..field import Group, arg, is_number, positive

_CLOCK_TIME = re.compile(r"(\d+-)?\d+:\d{1,2}:\d{1,2}(\.\d+)?")


def is_duration(value: Any) -> str | None:
    """Seconds, HH:MM:SS or D-HH:MM:SS."""
    if is_number(value) and value > 0:
        return None
    if isinstance(value, str):
        if _CLOCK_TIME.fullmatch(value.strip()):
            return None
        if re.fullmatch(r"\d+(\.\d+)?", value.strip()):
            return None if float(value) > 0 else "must be more than 0 seconds"
    return "must be a duration: seconds (3600), HH:MM:SS or D-HH:MM:SS"


@dataclass
class DurationArgs(Group):
    """How long to train, and on how much at a time."""

    title = "Output, duration and batch"

    output_dir: str | None = arg(
        None,
        "Folder for checkpoints and results, or a URL (s3://...) for checkpoints; defaults to trainer_output.",
        ranks="usual",
    )
    per_device_train_batch_size: int = arg(8, "Samples per device in one forward pass of training.", check=positive)
    num_train_epochs: float = arg(3.0, "Passes over the training data; a fraction stops within the last one.")
    max_steps: int = arg(-1, "Number of steps; overrides num_train_epochs when positive.")
    gradient_accumulation_steps: int = arg(1, "Micro-batches accumulated for one step.", check=positive)
    auto_find_batch_size: bool = arg(
        False, "When memory runs out, split the micro-batch and continue; the effective batch size is unchanged."
    )
    max_runtime: float | str | None = arg(
        None,
        "Stop, early enough to save, before this much time is over: seconds, HH:MM:SS or D-HH:MM:SS.",
        check=is_duration,
    )
