"""report.data.js: the data of the page, in a form that a page opened from a disk may load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..core.checkpoint.replacing import replace_text

FILE = "report.data.js"
BEGINNING, END = "loopwrightReport(", ");\n"
FACTS = ("config", "environment", "values", "notes")


def write_data(folder: Path, document: dict[str, Any]) -> None:
    """Write the data file; a page that loads it meanwhile gets the old or the new one."""
    replace_text(folder / FILE, f"{BEGINNING}{encoded(document)}{END}")


def read_facts(folder: Path) -> dict[str, Any]:
    """What an earlier report of the folder says about arguments and environment; empty without one."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
        run = json.loads(text.removeprefix(BEGINNING).removesuffix(END))["runs"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return {}
    return {name: run[name] for name in FACTS if name in run}


def encoded(document: dict[str, Any]) -> str:
    """JSON that may be part of a page: ASCII, and without the beginning of a tag."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
