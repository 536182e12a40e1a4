"""The progress display as a bar of tqdm, for subclasses that were written for transformers' ProgressCallback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .pace import Pace
from .text import short


class Bar:
    """The methods of a tqdm bar over a display that follows the run by itself."""

    def __init__(self, pace: Pace, show: Callable[[str], None], redraw: Callable[[], None]) -> None:
        self._pace, self._show, self._redraw = pace, show, redraw
        self.text = ""
        """What the user has set as description and postfix."""
        self._parts = {"description": "", "postfix": ""}

    @property
    def n(self) -> int:
        """How much is done."""
        return self._pace.done

    @property
    def total(self) -> int | None:
        """How much there is."""
        return self._pace.total

    def write(self, s: str, *args: Any, **kwargs: Any) -> None:
        """Print a line above the bar."""
        self._show(s)

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        """Show a text in the bar."""
        self._set("description", desc or "", refresh=refresh)

    def set_postfix(self, ordered_dict: Mapping[str, Any] | None = None, refresh: bool = True, **kwargs: Any) -> None:
        """Show names and values in the bar."""
        values = {**(ordered_dict or {}), **kwargs}
        self._set("postfix", "  ".join(f"{name} {short(value)}" for name, value in values.items()), refresh=refresh)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Show a text at the end of the bar."""
        self._set("postfix", s, refresh=refresh)

    def update(self, n: float | None = 1) -> None:
        """Nothing: the display follows the run."""

    def refresh(self, *args: Any, **kwargs: Any) -> None:
        """Draw the bar."""
        self._redraw()

    def close(self) -> None:
        """Nothing: the display ends with the run."""

    def _set(self, part: str, text: str, *, refresh: bool) -> None:
        self._parts[part] = text
        self.text = "  ".join(filter(None, self._parts.values()))
        if refresh:
            self._redraw()
