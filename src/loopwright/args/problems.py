"""Problems found while arguments are checked, raised together at the end."""

from __future__ import annotations

from datetime import date, time
from enum import Enum
from typing import Any

from ..errors import ArgumentsError
from .secrets import is_secret, masked_text

LONGEST_VALUE = 80
LONGEST_PROBLEM = 1000


class Problems:
    """The problems found so far, and the fields they make invalid."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.broken: set[str] = set()

    def add(self, text: str, *names: str) -> None:
        """Add a problem; rules that depend on the named fields are skipped from now on."""
        shortened = text if len(text) <= LONGEST_PROBLEM else f"{text[:600]} ... {text[-300:]}"
        self.found.append(masked_text(shortened))
        self.broken.update(names)

    def concern(self, names: tuple[str, ...]) -> bool:
        """Whether one of these fields is invalid."""
        return not self.broken.isdisjoint(names)

    def raise_if_any(self) -> None:
        """Raise one error with all problems."""
        if self.found:
            raise ArgumentsError(self.found)


def shown(name: str, value: Any) -> str:
    """'name=value' for a message, shortened and with secrets masked."""
    return f"{name}={short_value(name, value)}"


def short_value(name: str, value: Any) -> str:
    """The value of a name for a message, shortened and with secrets masked."""
    return "..." if is_secret(name) else short(value.value if isinstance(value, Enum) else value)


def short(value: Any) -> str:
    """The repr of a value for a message, shortened and with secrets masked; its type if it has none."""
    try:
        # A date that YAML or TOML has read is shown as it was written.
        text = str(value) if isinstance(value, (date, time)) else masked_text(repr(value))
    except Exception:  # a value of the user's may raise anything, and an int has too many digits to print
        return f"<{type(value).__name__}>"
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."
