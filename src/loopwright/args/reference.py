"""The reference of all arguments as Markdown, generated from the fields."""

from __future__ import annotations

import itertools
from types import UnionType
from typing import Any, Union, get_args, get_origin

from .field import UNSET, Spec, specs


def markdown_reference(cls: type) -> str:
    """A table per theme: every argument with its type, default and help."""
    tables = [
        _table(title, list(group)) for title, group in itertools.groupby(specs(cls).values(), lambda spec: spec.title)
    ]
    return f"# {cls.__name__}\n\n" + "\n".join(tables)


def _table(title: str, group: list[Spec]) -> str:
    rows = "".join(_row(spec) for spec in group)
    return f"## {title}\n\n| argument | type | default | |\n|---|---|---|---|\n{rows}"


def _row(spec: Spec) -> str:
    default = "" if spec.default is UNSET else f"`{spec.default!r}`"
    cells = (f"`{spec.name}`", f"`{_type_text(spec.hint)}`", default, spec.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def matches(spec: Spec, words: list[str]) -> bool:
    """Whether all words are in the name or the help of an argument; upper case, `-` and `_` do not matter."""
    text = _plain(f"{spec.name} {spec.help}")
    return all(_plain(word) in text for word in words)


def found_text(spec: Spec) -> str:
    """An argument as two lines: name, type and default, and its help."""
    default = "" if spec.default is UNSET else f" = {spec.default!r}"
    return f"{spec.name}: {_type_text(spec.hint)}{default}\n    {spec.help}"


def _plain(text: str) -> str:
    return text.lower().replace("-", " ").replace("_", " ")


def _type_text(hint: Any) -> str:
    if hint is type(None):
        return "None"
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(_type_text(part) for part in get_args(hint))
    if get_origin(hint) in (list, dict):
        return f"{get_origin(hint).__name__}[{', '.join(_type_text(part) for part in get_args(hint))}]"
    return str(getattr(hint, "__name__", hint)) if not get_args(hint) else str(hint).replace("typing.", "")
