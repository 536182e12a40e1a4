"""TOML with the line of every key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from ..errors import ArgumentsError

_LINE = re.compile(r"line (\d+)")
_TOKEN = re.compile(
    r"'''.*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"|'[^'\n]*'|\"(?:\\.|[^\"\\\n])*\"|\#[^\n]*|[\[\](){}\n]|[^\[\](){}\n'\"\#]+",
    re.DOTALL,
)


def read_toml_text(text: str, name: str) -> tuple[Any, dict[tuple[str | int, ...], int]]:
    """The values of a TOML text, and the line of each key path."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _LINE.search(str(error))
        line = f":{found[1]}" if found else ""
        raise ArgumentsError(f"{name}{line}: not TOML ({error}); correct this line") from None
    lines: dict[tuple[str | int, ...], int] = {}
    table: tuple[str | int, ...] = ()
    for line_number, statement in _statements(text):
        if statement.startswith("["):
            table = _header(statement, lines)
            keys = table
        else:
            keys = (*table, *_path_of(tomllib.loads(f"{_key_text(statement)} = 0")))
        for end in range(1, len(keys) + 1):
            lines.setdefault(keys[:end], line_number)
    return values, lines


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Each statement with its first line; strings and brackets may contain line breaks."""
    line, depth, words, first = 1, 0, "", 1
    for match in _TOKEN.finditer(text + "\n"):
        token = match.group()
        if token == "\n" and depth == 0:
            if words.strip():
                yield first, words.strip()
            words, first = "", line + 1
        elif not token.startswith("#"):
            words += token
            is_header = words.lstrip().startswith("[") and "=" not in words
            depth += 0 if is_header else (token in "[{(") - (token in "]})")
        line += token.count("\n")


def _header(statement: str, lines: dict[tuple[str | int, ...], int]) -> tuple[str | int, ...]:
    """The key path of a table; tables of an array have an index."""
    is_array = statement.startswith("[[")
    path = _path_of(tomllib.loads(f"[{statement.strip('[]').strip()}]"))
    if not is_array:
        return path
    index = 0
    while (*path, index) in lines:
        index += 1
    return (*path, index)


def _key_text(statement: str) -> str:
    """The part before the first `=` outside of quotes."""
    match = re.match(r"(?:'[^']*'|\"(?:\\.|[^\"\\])*\"|[^='\"])*", statement)
    return match.group() if match is not None else statement


def _path_of(values: dict[str, Any]) -> tuple[str | int, ...]:
    keys: list[str | int] = []
    inner: Any = values
    while isinstance(inner, dict) and inner:
        key = next(iter(inner))
        keys.append(key)
        inner = inner[key]
    return tuple(keys)
