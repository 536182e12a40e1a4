"""Print the requirements of a dependency group of pyproject.toml: versions of pip before 25.1 cannot read them."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def requirements(name: str, groups: dict[str, list[Any]]) -> list[str]:
    """The requirements of a group, and of the groups that it includes."""
    found: list[str] = []
    for each in groups[name]:
        found += [each] if isinstance(each, str) else requirements(each["include-group"], groups)
    return found


if __name__ == "__main__":
    print(*requirements(sys.argv[1], tomllib.loads(PROJECT.read_text(encoding="utf-8"))["dependency-groups"]))
