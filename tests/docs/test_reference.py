"""The pages of the reference: every message they quote is one of the sources, no class and no event is missing."""

from __future__ import annotations

import ast
import re

import pytest

from loopwright import errors
from loopwright.core.events import EVENTS
from loopwright.core.state import TrainerControl
from tests.docs.blocks import ROOT

ANY = "…"
ERRORS, EVENT_PAGE = ROOT / "docs" / "reference" / "errors.md", ROOT / "docs" / "reference" / "events.md"


def text_of(node: ast.AST) -> str:
    """A text of the sources, with … for each value in it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ANY
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return ANY


@pytest.fixture(scope="module")
def texts() -> list[str]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src" / "loopwright").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    return [text for text in map(text_of, nodes) if len(text) > 12]


def quoted_messages() -> list[str]:
    section = ERRORS.read_text(encoding="utf-8").split("## Model and loss", 1)[1]
    return re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)


def exists(message: str, texts: list[str]) -> bool:
    """Whether a text of the sources has all parts of the message, in this order."""
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split(ANY)), re.DOTALL)
    return any(pattern.search(text) for text in texts)


@pytest.mark.xdist_group("reference")  # the sources are read once
def test_every_message_of_the_page_is_raised_somewhere(texts):
    messages = quoted_messages()
    assert len(messages) > 30
    assert [message for message in messages if not exists(message, texts)] == []


@pytest.mark.xdist_group("reference")
def test_a_message_that_is_gone_is_found(texts):
    assert not exists("the model returned no loss, only …, for the outputs …", texts)


def test_every_error_of_the_package_is_on_the_page():
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", ERRORS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    kinds = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    assert {name for name, _ in rows} == set(kinds) - {"LoopwrightError"}
    for name, also in rows:
        assert also in {each.__name__ for each in kinds[name].__mro__}, name


def test_the_table_of_events_is_that_of_the_code():
    rows = re.findall(r"^\| `(on_\w+)` \|.*\|([^|]*)\|$", EVENT_PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {name: set(re.findall(r"\w+", flags)) for name, flags in rows} == {
        name: set(flags) for name, flags in EVENTS.items()
    }


def test_every_flag_of_the_control_is_on_the_page():
    page = EVENT_PAGE.read_text(encoding="utf-8")
    flags = [name for name in vars(TrainerControl()) if name.startswith("should_")]
    assert flags and [name for name in flags if f"`control.{name}`" not in page] == []
