"""Every block of Python in the pages runs, those of a page in one namespace, and prints what the page says."""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from loopwright import compat
from tests.docs.blocks import ROOT, Block, blocks_of, pages

pytest.importorskip("transformers")
LANGUAGES = {"python", "output", "sh", "yaml", "json", "text", "mermaid"}
PAGES = pages()
PYTHON = [page for page in PAGES if any(block.language == "python" and not block.no_run for block in blocks_of(page))]


def names(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of its own, in which the examples are found."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def marks_of(page: Path) -> list[pytest.MarkDecorator]:
    """Pages with TensorFlow run where the other tests of TensorFlow do, which set its devices before it starts."""
    if "TFTrainer(" not in page.read_text(encoding="utf-8"):
        return []
    absent = importlib.util.find_spec("tensorflow") is None
    return [pytest.mark.xdist_group("tensorflow"), pytest.mark.skipif(absent, reason="needs TensorFlow")]


@pytest.mark.parametrize("page", [pytest.param(page, marks=marks_of(page)) for page in PYTHON], ids=names(PYTHON))
def test_the_python_of_a_page_runs(page, folder):
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed = ""
    try:
        for block in blocks_of(page):
            if block.language == "python" and not block.no_run:
                printed = run(block, namespace)
            elif block.language == "output":
                assert printed == block.code, f"{block.place}: it printed\n{printed}"
    finally:
        compat.uninstall()


def run(block: Block, namespace: dict[str, object]) -> str:
    """Run a block; returns what its own calls of print wrote, as opposed to the lines of the console."""
    text = io.StringIO()
    namespace["print"] = functools.partial(print, file=text)
    exec(compile("\n" * block.line + block.code, str(block.page), "exec"), namespace)
    return text.getvalue()


def test_blocks_are_of_a_kind_that_is_checked():
    for page in PAGES:
        for block in blocks_of(page):
            assert block.language in LANGUAGES, block.place


def commands(page: Path) -> list[tuple[str, list[str]]]:
    found = []
    for block in blocks_of(page):
        if block.language == "sh":
            lines = block.code.replace("\\\n", " ").splitlines()
            found += [(block.place, words) for line in lines if (words := shlex.split(line, comments=True))]
    return found


COMMANDS = [each for page in PAGES for each in commands(page)]


@pytest.mark.parametrize("command", sorted({words[1] for _, words in COMMANDS if words[0] == "loopwright"}))
def test_a_command_of_a_page_exists(command):
    """Its options too: each one that a page uses is in the help of the command."""
    done = subprocess.run(
        [sys.executable, "-m", "loopwright", command, "--help"], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    options = {word.partition("=")[0] for _, words in COMMANDS if words[:2] == ["loopwright", command]
               for word in words[2:] if word.startswith("--")}  # fmt: skip
    if command not in ("run", "launch", "train", "check", "drill"):  # these pass options on
        assert not [option for option in options if option not in done.stdout]


def test_a_file_that_a_page_names_is_there():
    for page in PAGES:
        for word in page.read_text().split("`"):
            if word.startswith(("examples/", "tests/", "docs/", "benchmarks/")) and " " not in word:
                assert any(ROOT.glob(word.partition("::")[0])), (page, word)


def test_a_broken_link_and_a_lost_page_are_found(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "docs" / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    pages = build.pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert not build.problems(pages)
    monkeypatch.setattr(build, "DOCS", tmp_path)
    (tmp_path / "a.md").write_text("# A\n[b](b.md) [here](#a) [there](#b) [c](c.md#none)\n")
    (tmp_path / "c.md").write_text("# C\n")
    found = build.problems(["a.md", "d.md"])
    assert [each for each in found if "d.md is in mkdocs.yml" in each or "c.md is not in the navigation" in each]
    assert len([each for each in found if "leads nowhere" in each]) == 3
