"""JSON with the line of every key."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from json.decoder import scanstring  # type: ignore[attr-defined]  # documented as JSONDecoder's own
from typing import Any

from ..errors import ArgumentsError

_SPACE = re.compile(r"[\s,:]*")
_SCALAR = re.compile(r"[^\s,\]}]+")


def read_json_text(text: str, name: str) -> tuple[Any, dict[tuple[str | int, ...], int]]:
    """The values of a JSON text, and the line of each key path."""
    breaks = [place.start() for place in re.finditer("\n", text)]
    lines: dict[tuple[str | int, ...], int] = {}

    def visit(start: int, path: tuple[str | int, ...]) -> int:
        """Record the lines of a value; returns the position after it. The text is known to be JSON."""
        start = _SPACE.match(text, start).end()  # type: ignore[union-attr]  # matches any text
        lines.setdefault(path, bisect_right(breaks, start) + 1)
        if text[start] == '"':
            return scanstring(text, start + 1)[1]
        if text[start] not in "{[":
            return _SCALAR.match(text, start).end()  # type: ignore[union-attr]  # the value has a character
        is_object, index = text[start] == "{", 0
        place = _SPACE.match(text, start + 1).end()  # type: ignore[union-attr]
        while text[place] not in "}]":
            key: str | int = index
            if is_object:
                line = bisect_right(breaks, place) + 1
                key, place = scanstring(text, place + 1)
                if (*path, key) in lines:
                    first = lines[(*path, key)]
                    raise ArgumentsError(f"{name}:{line}: {key!r} is already set at line {first}; remove one of them")
                lines[(*path, key)] = line
            place = _SPACE.match(text, visit(place, (*path, key))).end()  # type: ignore[union-attr]
            index += 1
        return place + 1

    try:
        values = json.loads(text)
        visit(0, ())
    except json.JSONDecodeError as error:
        raise ArgumentsError(f"{name}:{error.lineno}: not JSON ({error.msg}); correct this line") from None
    except RecursionError:
        raise ArgumentsError(f"{name}: nested too deeply for a configuration") from None
    return values, lines
