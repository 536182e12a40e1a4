"""The model card: what was measured, on which data, with which arguments and versions.

Only the metadata and the section between two marks are written; anything else in README.md is the user's and is kept.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import yaml

from .results import Results

BEGIN = "<!-- loopwright: this section is written by the trainer; changes to it are overwritten -->"
END = "<!-- loopwright: end of the section -->"
SECTION = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
HEADER = re.compile(r"\A---\s*\n(.*?\n)?---\s*(\n|\Z)", re.DOTALL)
PACKAGES = ("loopwright", "torch", "transformers", "datasets", "tokenizers", "peft", "keras", "tensorflow", "jax")
MOST_ROWS = 20
"""Evaluations in the table of a card; of more, a selection with the first and the last."""


@dataclass
class CardFacts:
    """Everything that a card states."""

    name: str
    results: Results | None = None
    evaluations: Sequence[Mapping[str, Any]] = ()
    """The rows of the log history that hold evaluations."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The metadata that the Hub reads; empty values are left out."""
    data: dict[str, str] = field(default_factory=dict)
    """Training and evaluation data -> a description."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """The arguments that the user has set."""
    training: dict[str, Any] = field(default_factory=dict)
    """Progress of the run and sizes of the model."""
    speed: str = ""
    """The speed report."""


def card(facts: CardFacts, earlier: str = "") -> str:
    """The text of README.md: the earlier one with its metadata completed and its section replaced."""
    found = HEADER.match(earlier)
    body = earlier[found.end() :] if found else earlier
    given = _metadata(found)
    merged = {**{name: value for name, value in facts.metadata.items() if value not in (None, [], "")}, **given}
    merged["tags"] = sorted({*as_list(given.get("tags")), *as_list(facts.metadata.get("tags"))}) or None
    if "model-index" in facts.metadata:  # measured, so the newest one counts
        merged["model-index"] = facts.metadata["model-index"]
    merged = {name: value for name, value in merged.items() if value is not None}
    section = f"{BEGIN}\n\n{_section(facts)}\n{END}"
    if SECTION.search(body):
        body = SECTION.sub(lambda _: section, body, count=1)
    else:
        body = f"{body.rstrip()}\n\n{section}\n" if body.strip() else f"\n# {facts.name}\n\n{section}\n"
    return f"---\n{yaml.safe_dump(merged, sort_keys=False, allow_unicode=True)}---\n{body}"


def _metadata(found: re.Match[str] | None) -> dict[str, Any]:
    try:
        values = yaml.safe_load(found.group(1) or "") if found else None
    except yaml.YAMLError:
        values = None
    return values if isinstance(values, dict) else {}


def as_list(value: Any) -> list[str]:
    """The texts of a value that may be one text, several, or None."""
    return [] if value is None else [value] if isinstance(value, str) else [str(each) for each in value]


def _section(facts: CardFacts) -> str:
    parts = [
        _results(facts.results),
        _table("Training data and evaluation data", facts.data),
        _table("Training", facts.training),
        _evaluations(facts.evaluations),
        _table("Arguments (the others have their defaults)", facts.arguments),
        f"## Speed\n\n```\n{facts.speed}\n```\n" if facts.speed else "",
        _table("Versions", versions()),
    ]
    return "\n".join(part for part in parts if part)


def _results(results: Results | None) -> str:
    if results is None:
        return "## Results\n\nNo evaluation was run.\n"
    return _table(f"Results of the last evaluation (step {results.step})", results.metrics)


def _table(title: str, rows: Mapping[str, Any]) -> str:
    if not rows:
        return ""
    lines = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items())
    return f"## {title}\n\n| | |\n|---|---|\n{lines}\n"


def _evaluations(rows: Sequence[Mapping[str, Any]]) -> str:
    if len(rows) < 2:
        return ""
    step = max(math.ceil((len(rows) - 1) / (MOST_ROWS - 1)), 1)
    chosen = [*rows[:-1:step], rows[-1]]
    names = ["step", "epoch", *sorted({name for row in chosen for name in row if name not in ("step", "epoch")})]
    head = f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n"
    body = "\n".join(f"| {' | '.join(_cell(row.get(name, '')) for name in names)} |" for row in chosen)
    return f"## Evaluations\n\n{head}{body}\n"


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ").replace("<!--", "&lt;!--")


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that are installed."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
