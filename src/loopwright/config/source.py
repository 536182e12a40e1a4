"""Where a value of a configuration came from."""

from __future__ import annotations

from typing import NamedTuple


class Source(NamedTuple):
    """The origin of a value: a line of a file, a flag, a default, or another value."""

    kind: str
    """`file`, `flag`, `default` or `derived`."""
    place: str = ""
    """`file:line`, the flag, or the reason."""

    @property
    def shown(self) -> str:
        """The origin for a message; empty if the user did not set the value."""
        return {"file": self.place, "flag": "command line"}.get(self.kind, "")

    def __str__(self) -> str:
        if self.kind == "flag":
            return f"flag {self.place}"
        return self.place if self.kind == "file" else f"{self.kind}{f': {self.place}' if self.place else ''}"


DEFAULT = Source("default")
