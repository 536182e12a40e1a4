"""Generated pages of the documentation are what the code says."""

from __future__ import annotations

from pathlib import Path

from loopwright.cli.docs import main, outdated

DOCS = Path(__file__).parents[2] / "docs"


def test_generated_pages_are_up_to_date() -> None:
    assert outdated(DOCS) == [], "run `loopwright docs` and commit the result"


def test_the_command_writes_and_checks(tmp_path: Path) -> None:
    assert main([str(tmp_path), "--check"]) == 1
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path), "--check"]) == 0
