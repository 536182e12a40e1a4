"""docs/guarantees.md and SECURITY.md name a test for every promise, and each of them exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", PAGE + SECURITY)))


@cache
def found_in(path: str) -> set[str]:
    """The tests of a file; none if there is no such file."""
    if not (ROOT / path).is_file():
        return set()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_the_named_tests_exist() -> None:
    parts = {name: name.partition("::") for name in NAMED}
    assert len(parts) > 30
    assert [name for name, (path, _, function) in parts.items() if not found_in(path)] == []
    assert [name for name, (path, _, function) in parts.items() if function and function not in found_in(path)] == []


def test_every_promise_has_a_test() -> None:
    rows = [line for line in (PAGE + SECURITY).splitlines() if line.startswith("| ")]
    promises = [line for line in rows if not line.startswith("| Promise")]
    assert len(promises) > 30
    assert [line for line in promises if "`tests/" not in line] == []


def test_every_test_of_the_whole_sets_is_named() -> None:
    """What only runs with `-m grid` is easily forgotten."""
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            marks = [ast.unparse(each) for each in getattr(node, "decorator_list", [])]
            if "pytest.mark.grid" in marks:
                assert f"tests/faults/{path.name}::{node.name}" in NAMED
