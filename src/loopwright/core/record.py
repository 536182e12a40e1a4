"""How a run was started, written beside its results so that it can be started again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

FILE = "run.json"


def write_record(output_dir: str | os.PathLike[str]) -> None:
    """Write the command, folder and interpreter of this process into the output folder."""
    words = {"argv": masked(sys.argv), "command": masked(sys.orig_argv)}
    record = {**words, "folder": os.getcwd(), "python": sys.executable}
    path = Path(output_dir) / FILE
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def masked(words: list[str]) -> list[str]:
    """A command line without the values of options that end in token, key, password or secret."""
    result, hide = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = name.startswith("-") and name.lower().endswith(("token", "key", "password", "secret"))
        result.append("<masked>" if hide else f"{name}=<masked>" if secret and equals else word)
        hide = secret and not equals
    return result


def read_record(output_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """How the run in this folder was started, or None if that is not known."""
    try:
        record: dict[str, Any] = json.loads((Path(output_dir) / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record
