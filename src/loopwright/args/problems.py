"""Everything found wrong while arguments are settled, raised together at the end."""

from __future__ import annotations

from enum import Enum
from typing import Any

from ..errors import ArgumentsError, NotAvailable

LONGEST_VALUE = 80


class Problems:
    """What was found so far, and which fields can no longer be relied on."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.unavailable: list[str] = []
        self.broken: set[str] = set()

    def add(self, text: str, *names: str) -> None:
        """Note a problem; what depends on the named fields is not looked at any more."""
        self.found.append(text)
        self.broken.update(names)

    def concern(self, names: tuple[str, ...]) -> bool:
        """Whether one of these fields is broken."""
        return not self.broken.isdisjoint(names)

    def raise_if_any(self) -> None:
        """One error with all problems; NotAvailable when nothing else is wrong."""
        if self.found:
            raise ArgumentsError(self.found + self.unavailable)
        if len(self.unavailable) == 1:
            raise NotAvailable(self.unavailable[0])
        if self.unavailable:
            lines = "".join(f"\n  - {text}" for text in self.unavailable)
            raise NotAvailable(
                f"{len(self.unavailable)} of the arguments ask for something that is not available yet:{lines}"
            )


def shown(name: str, value: Any) -> str:
    """'name=value' for a message: short, and without secrets."""
    if name.endswith("_token"):
        return f"{name}=..."
    text = repr(value.value if isinstance(value, Enum) else value)
    return f"{name}={text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + '...'}"
