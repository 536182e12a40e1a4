"""JSON files of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, first_line
from .reading import document_content
from .schema import Shape, anything, check, label

MOST = 4 << 30
"""Bytes of the largest document that is read; a log history of ten million rows has about 1 GB."""


class Encoded:
    """A value of a document that already exists as JSON text."""

    def pieces(self) -> Iterator[str]:
        raise NotImplementedError


def write_json(path: Path, values: Any) -> None:
    _write(path, _parts(values))


def documents_writer(documents: Mapping[str, Any]) -> Callable[[Path], None]:
    """A function that writes a snapshot of the documents taken now; later changes are not included."""
    parts = {name: _parts(values) for name, values in documents.items()}

    def write(folder: Path) -> None:
        for name, each in parts.items():
            _write(folder / name, each)

    return write


def _parts(values: Any) -> list[str | Encoded]:
    """A document as text, and as values that are text already."""
    if not isinstance(values, Mapping) or not any(isinstance(each, Encoded) for each in values.values()):
        return [json.dumps(values, indent=1, sort_keys=True) + "\n"]
    parts: list[str | Encoded] = []
    for name, value in sorted(values.items()):
        parts.append(f"{',' if parts else '{'}\n {json.dumps(name)}: ")
        parts.append(value if isinstance(value, Encoded) else _indented(value))
    return [*parts, "\n}\n"]


def _indented(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True).replace("\n", "\n ")


def _write(path: Path, parts: Iterable[str | Encoded]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for part in parts:
            file.writelines(part.pieces() if isinstance(part, Encoded) else [part])


def read_json(path: Path, shape: Shape = anything) -> Any:
    """The document in a regular file of its checkpoint; raises `CheckpointError` unless it has this shape."""
    content = document_content(path, MOST)
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = first_line(error)[:100]
        raise CheckpointError(f"{label(path)} is not a JSON document ({reason}); it was damaged") from error
    return check(value, shape, path)
