"""Every example runs as it is, offline, and learns what it is meant to learn."""

from __future__ import annotations

import re
import runpy
import sys

import pytest

from tests.docs.blocks import ROOT

pytest.importorskip("transformers")
EXAMPLES = {  # the last line it prints, and the least value in it
    "classify": ("accuracy", 0.9),
    "pretrain": ("accuracy", 0.45),
    "chat_lora": ("without a mistake", 0.8),
    "translate": ("without a mistake", 0.8),
    "images": ("accuracy", 0.8),
    "speech": ("without a mistake", 0.6),
    "arrays": ("eval_loss", 0.0),
}
MOST_LINES = 80


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--output", str(tmp_path / "run")])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    words, least = EXAMPLES[name]
    found = re.fullmatch(rf"{words} ([0-9.]+)", capsys.readouterr().out.strip().splitlines()[-1])
    assert found is not None and float(found[1]) >= least


def test_examples_are_short_and_all_tested():
    paths = [path for path in (ROOT / "examples").glob("*.py") if path.stem not in ("demo", "generated")]
    assert {path.stem for path in paths} == set(EXAMPLES)
    assert all(len(path.read_text().splitlines()) <= MOST_LINES for path in paths)
