"""report.html: one file with the page, its charts and the data so far."""

from __future__ import annotations

import functools
import html
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..core.checkpoint.replacing import replace_text
from ..errors import OutputError
from .data_file import FILE as DATA_FILE, encoded

FILE = "report.html"
MARK = '<meta name="generator" content="loopwright">'
"""What a page of this package contains; another file is not replaced."""


def page(document: dict[str, Any], *, follows: bool) -> str:
    """The page; with `follows` it loads the data file beside it again and again, while the run trains."""
    title = " and ".join(run["name"] for run in document["runs"]) or "a run"
    parts = {
        "@@TITLE@@": html.escape(f"Report of {title}"),
        "@@FOLLOW@@": DATA_FILE if follows else "",
        "@@DATA@@": encoded(document),
    }
    return re.sub("|".join(parts), lambda found: parts[found.group()], _template())


def write_page(path: Path, document: dict[str, Any], *, follows: bool) -> None:
    """Write the page by a temporary file; raises if a file of another kind has its name."""
    if path.is_dir() or (path.exists() and not _is_ours(path)):
        raise OutputError(f"{path} exists and is not a report of loopwright; choose another file with --output")
    replace_text(path, page(document, follows=follows))


def _is_ours(path: Path) -> bool:
    with open(path, "rb") as file:
        return MARK.encode() in file.read(1000)


@functools.cache
def _template() -> str:
    """The page with its scripts and styles, without data."""
    assets = files(__package__) / "assets"

    def read(name: str) -> str:
        return (assets / name).read_text(encoding="utf-8")

    licence = " ".join(read("uPlot.LICENSE").split())
    return (
        read("page.html")
        .replace("@@MARK@@", MARK)
        .replace("@@STYLE@@", read("uPlot.min.css") + read("report.css"))
        .replace("@@UPLOT@@", f"/* {licence} */\n" + read("uPlot.iife.min.js").strip())
        .replace("@@SCRIPT@@", read("charts.js") + read("report.js"))
    )
