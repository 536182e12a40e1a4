"""A configuration file as values, with the line of every key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..args.field import nearest
from ..errors import ArgumentsError
from .json_file import read_json_text
from .toml_file import read_toml_text
from .yaml_file import read_yaml_text

KeyPath = tuple[str | int, ...]
"""The keys and indices that lead to a value."""
LARGEST = 4 * 2**20
"""Bytes of a configuration file; more is data, or a mistake."""

READERS: dict[str, Callable[[str, str], tuple[Any, dict[KeyPath, int]]]] = {
    ".yaml": read_yaml_text,
    ".yml": read_yaml_text,
    ".json": read_json_text,
    ".toml": read_toml_text,
}
"""Reads a text: returns its values and their lines; raises ArgumentsError with the file and line."""


@dataclass(frozen=True)
class Document:
    """The contents of a configuration file."""

    path: Path
    values: dict[str, Any]
    lines: dict[KeyPath, int]

    def place(self, *keys: str | int) -> str:
        """`file:line` of a key, or of the nearest key above it."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return f"{self.path}:{self.lines[keys]}" if keys else str(self.path)


def read_document(path: Path) -> Document:
    """Read a YAML, JSON or TOML file."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ArgumentsError(
            f"{path}: a configuration is a file ending in {', '.join(READERS)}; rename it, or create one with "
            "`loopwright init TASK`"
        )
    values, lines = reader(_text_of(path), str(path))
    if not isinstance(values, dict):
        raise ArgumentsError(f"{path}: a configuration is a mapping of keys to values, not {type(values).__name__}")
    return Document(path, values, lines)


def _text_of(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST:
            raise ArgumentsError(f"{path}: {path.stat().st_size:,} bytes is more than a configuration file may have")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArgumentsError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ArgumentsError(f"{path}: {reason}{_similar(path)}") from None


def _similar(path: Path) -> str:
    try:
        names = [each.name for each in path.parent.iterdir() if each.suffix.lower() in READERS]
    except OSError:
        return ""
    return nearest(path.name, [name for name in names if name != path.name])
