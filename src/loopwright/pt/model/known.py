"""What training goes by, to notice what callbacks assign while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Known:
    """What training goes by; everything is compared with it by identity."""

    model: Any = None
    methods: tuple[Any, ...] = ()
    losses: tuple[Any, ...] = ()
    data: tuple[Any, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
