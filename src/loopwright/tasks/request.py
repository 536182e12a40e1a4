"""Request: the part of a configuration that a task reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .fields import LoraFields, ModelFields


@dataclass(frozen=True)
class Request:
    """What a task makes model and data of."""

    folder: Path
    """The folder of the configuration: import paths may name files in it."""
    model: ModelFields
    data: Any
    """The fields of the task's block `data`."""
    lora: LoraFields | None
    metrics: list[str]
    seed: int
    place: Callable[[str], str]
    """Where a dotted key was set, as `file:line` or a flag, for messages."""
