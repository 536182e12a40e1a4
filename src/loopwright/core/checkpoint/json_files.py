"""JSON files of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError


def _encoded(values: Any) -> str:
    return json.dumps(values, indent=1, sort_keys=True) + "\n"


def write_json(path: Path, values: Any) -> None:
    path.write_text(_encoded(values), encoding="utf-8")


def documents_writer(documents: Mapping[str, Any]) -> Callable[[Path], None]:
    """A function that writes a snapshot of the documents taken now; later changes are not included."""
    texts = {name: _encoded(values) for name, values in documents.items()}

    def write(folder: Path) -> None:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")

    return write


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
