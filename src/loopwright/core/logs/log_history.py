"""`state.log_history`: a list of rows that keeps the JSON text of its older rows, so that a save encodes the latest.

The list and its rows may be changed at any time. The latest rows are encoded at every save, because the code that
added them may still change them; older rows are replaced by equal ones that notice a change. A change among these
discards the text, and the next save encodes all rows again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..checkpoint.json_files import Encoded
from .json_values import LEFT_OUT

RECENT = 100
"""Rows at the end of the list that every save encodes again."""


@dataclass
class SavedText:
    """The text of the older rows, in one piece per save."""

    pieces: list[str]
    rows: int = 0
    is_stale: bool = False
    """Whether a row in the text, or the list before its end, was changed."""


class LogHistory(list[dict[str, Any]]):
    """A list of logged rows."""

    def __init__(self, rows: Iterable[dict[str, Any]] = ()) -> None:
        super().__init__(rows)
        self._text = SavedText([])

    def encoded(self, convert: Callable[[Any], Any]) -> EncodedRows:
        """The rows as JSON text; `convert` returns a row as JSON values, or LEFT_OUT."""
        if self._text.is_stale:
            self._text = SavedText([])  # a new object: a save in the background may be writing the old one
        text, end = self._text, max(len(self) - RECENT, self._text.rows)
        if end > text.rows:
            text.pieces.append(_lines(self[text.rows : end], convert))
            for index in range(text.rows, end):
                if isinstance(self[index], dict):
                    super().__setitem__(index, TrackedRow(self[index], text))
            text.rows = end
        return EncodedRows(text.pieces, len(text.pieces), _lines(self[end:], convert))

    def _changes(self, index: Any) -> None:
        """Note a change at this index, or anywhere if it is not an integer."""
        is_old = not isinstance(index, int) or (index if index >= 0 else index + len(self)) < self._text.rows
        self._text.is_stale = self._text.is_stale or is_old

    def __setitem__(self, index: Any, value: Any) -> None:
        self._changes(index)
        super().__setitem__(index, value)

    def __delitem__(self, index: Any) -> None:
        self._changes(index)
        super().__delitem__(index)

    def __imul__(self, times: Any) -> Any:  # type: ignore[misc]
        self._changes(None)
        return super().__imul__(times)

    def insert(self, index: Any, value: Any) -> None:
        self._changes(index)
        super().insert(index, value)

    def pop(self, index: Any = -1) -> dict[str, Any]:
        self._changes(index)
        return super().pop(index)

    def remove(self, value: Any) -> None:
        self._changes(None)
        super().remove(value)

    def clear(self) -> None:
        self._changes(None)
        super().clear()

    def sort(self, **options: Any) -> None:
        self._changes(None)
        super().sort(**options)

    def reverse(self) -> None:
        self._changes(None)
        super().reverse()

    def __reduce__(self) -> Any:
        return LogHistory, ([dict(row) if isinstance(row, dict) else row for row in self],)


class TrackedRow(dict[str, Any]):
    """A row whose text is kept: it notes when it is changed."""

    __slots__ = ("_text",)

    def __init__(self, values: Any = (), text: SavedText | None = None) -> None:
        super().__init__(values)
        self._text = SavedText([]) if text is None else text

    def __setitem__(self, name: str, value: Any) -> None:
        self._text.is_stale = True
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._text.is_stale = True
        super().__delitem__(name)

    def __ior__(self, others: Any) -> Any:  # type: ignore[misc]
        self._text.is_stale = True
        return super().__ior__(others)

    def update(self, *others: Any, **values: Any) -> None:
        self._text.is_stale = True
        super().update(*others, **values)

    def setdefault(self, name: str, default: Any = None) -> Any:
        self._text.is_stale = True
        return super().setdefault(name, default)

    def pop(self, *given: Any) -> Any:
        self._text.is_stale = True
        return super().pop(*given)

    def popitem(self) -> Any:
        self._text.is_stale = True
        return super().popitem()

    def clear(self) -> None:
        self._text.is_stale = True
        super().clear()

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


@dataclass(frozen=True)
class EncodedRows(Encoded):
    """The rows at one moment: the pieces that existed then, and the text of the latest rows."""

    older: list[str]
    number: int
    latest: str

    def pieces(self) -> Iterator[str]:
        yield "["
        separator = "\n  "
        for text in (*self.older[: self.number], self.latest):
            if text:
                yield separator + text
                separator = ",\n  "
        yield "\n ]"


def _lines(rows: list[dict[str, Any]], convert: Callable[[Any], Any]) -> str:
    """One line of JSON for each row."""
    values = [each for each in map(convert, rows) if each is not LEFT_OUT]
    return ",\n  ".join(json.dumps(each, sort_keys=True) for each in values)
