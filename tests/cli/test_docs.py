"""Generated pages of the documentation are what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopwright.cli.docs import main, outdated

DOCS = Path(__file__).parents[2] / "docs"


def test_generated_pages_are_up_to_date() -> None:
    assert outdated(DOCS) == [], "run `loopwright docs docs` and commit the result"


def test_the_command_writes_and_checks(tmp_path: Path) -> None:
    assert main([str(tmp_path), "--check"]) == 1
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path), "--check"]) == 0


def test_the_command_writes_nothing_unless_a_folder_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2 and "folder" in capsys.readouterr().err
    assert [*tmp_path.rglob("*.md")] == []
