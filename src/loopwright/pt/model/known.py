"""The objects that training uses, to detect assignments by callbacks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Known:
    """Objects in use; compared by identity with the current ones."""

    model: Any = None
    methods: tuple[Any, ...] = ()
    losses: tuple[Any, ...] = ()
    data: tuple[Any, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
