"""Code blocks of Markdown pages: what they are, and why one is not run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    r"^(<!-- no-run: (?P<no_run>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass
class Block:
    page: Path
    line: int
    language: str
    code: str
    no_run: str = ""
    """Why it is not run; empty if it is."""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text[: found.start("code")].count("\n")
        yield Block(page, line, found["language"], found["code"], found["no_run"] or "")


def pages() -> list[Path]:
    """The pages whose blocks run: all written for readers who begin, have one task, or look something up."""
    folders = ("start", "guides", "move", "reference")
    return sorted(page for folder in folders for page in (ROOT / "docs" / folder).glob("*.md"))
