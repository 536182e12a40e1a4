"""Paths in a configuration: relative to its folder; on the command line, to the current folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..args.paths import is_url
from .source import Source

FOLDERS = {"output_dir", "logging_dir", "save_trigger_file"}
"""Keys that are always paths."""
MAYBE = {
    "data.train",
    "data.validation",
    "data.chat_template",
    "model.name",
    "model.tokenizer",
    "resume_from_checkpoint",
}
"""Keys that are a path if it exists, and otherwise a name."""


def resolved_path(key: str, value: Any, folder: Path, source: Source | None) -> Any:
    """A value whose path, if it is one, does not depend on the current folder; a mapping with each of its values so."""
    if isinstance(value, Mapping) and key in MAYBE:
        return {name: resolved_path(key, each, folder, source) for name, each in value.items()}
    if key not in FOLDERS | MAYBE or not isinstance(value, str) or not value or source is None or source.kind != "file":
        return value
    text = os.path.expanduser(value)
    if is_url(text) or os.path.isabs(text):
        return text
    path = os.path.normpath(folder / text)
    is_path = key in FOLDERS or os.path.exists(path) or text.startswith((f".{os.sep}", f"..{os.sep}"))
    return path if is_path else value
