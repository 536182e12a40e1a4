"""Generated pages of the documentation are what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import loopwright
from loopwright.cli import compatibility
from loopwright.cli.commands.docs import main, outdated
from loopwright.cli.compatibility_notes import ABSENT, BETTER, NAMES

DOCS = Path(__file__).parents[2] / "docs"


def test_generated_pages_are_up_to_date() -> None:
    assert outdated(DOCS) == [], "run `loopwright docs docs` and commit the result"


def test_the_command_writes_and_checks(tmp_path: Path) -> None:
    assert main([str(tmp_path), "--check"]) == 1
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path), "--check"]) == 0


def test_what_was_written_by_hand_is_kept() -> None:
    pytest.importorskip("transformers")
    page = compatibility.compatibility_page(f"# Mine\n{compatibility.BEGIN}\nold\n{compatibility.END}\n## By hand\n")
    assert page is not None and page.startswith("# Mine\n") and page.endswith("\n## By hand\n")
    assert "\nold\n" not in page


@pytest.mark.parametrize("kind", BETTER)
def test_notes_are_about_names_of_transformers(kind: str) -> None:
    pytest.importorskip("transformers")
    rows = {name for name, _ in getattr(compatibility, f"{kind}s")()}
    assert {*BETTER[kind], *ABSENT[kind]} <= rows


def test_whatever_is_not_there_says_why() -> None:
    pytest.importorskip("transformers")
    silent = [
        line for line in compatibility.compatibility_page(None).splitlines() if line.endswith("| not available |")
    ]
    assert silent == []


def test_names_of_other_libraries_are_served_as_the_page_says(tmp_path: Path) -> None:
    args = loopwright.TrainingArguments(str(tmp_path / "run"), use_cpu=True, report_to="none")
    trainer = loopwright.Trainer(torch.nn.Linear(1, 1), args)
    absent = [name for name, _, how in NAMES if how.startswith(("not available", "an override is", "`install()`"))]
    assert [name for name, *_ in NAMES if name not in absent and not hasattr(trainer, name)] == []
    assert [name for name in absent if hasattr(trainer, name)] == []


def test_the_command_writes_nothing_unless_a_folder_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2 and "folder" in capsys.readouterr().err
    assert [*tmp_path.rglob("*.md")] == []
