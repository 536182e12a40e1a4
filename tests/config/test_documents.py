"""Configuration files: the values and the line of every key, in YAML, JSON and TOML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from loopwright.config.document import Document, read_document
from loopwright.errors import ArgumentsError

VALUES = {
    "task": "chat",
    "learning_rate": 0.001,
    "data": {"train": "a: b # c.jsonl", "max_length": 12, "labels": ["x, y", "=z"]},
    "lora": {"r": 4, "nested": {"deep": "'quoted' \"text\""}},
    "text": "first\nsecond = [\n",
}


def document(tmp_path: Path, name: str, text: str) -> Document:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_document(path)


def problem(tmp_path: Path, name: str, text: str) -> str:
    with pytest.raises(ArgumentsError) as caught:
        document(tmp_path, name, text)
    return str(caught.value).removeprefix(f"{tmp_path}/")


TOML = """task = "chat"
learning_rate = 0.001
text = '''first
second = [
'''

[data]
train = "a: b # c.jsonl"
max_length = 12  # tokens
labels = [
  "x, y",  # one
  "=z",
]

[lora]
r = 4
nested.deep = "'quoted' \\"text\\""
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", yaml.safe_dump(VALUES, sort_keys=False)),
        ("run.json", json.dumps(VALUES, indent=2)),
        ("run.toml", TOML),
    ],
)
def test_every_key_has_its_line(tmp_path: Path, name: str, text: str) -> None:
    found = document(tmp_path, name, text)
    assert found.values == VALUES
    lines = text.split("\n")

    def visit(values: dict[str, Any], path: tuple[str, ...]) -> None:
        for key, value in values.items():
            line = lines[found.lines[(*path, key)] - 1]
            assert key in line, (path, key, line)
            if isinstance(value, dict):
                visit(value, (*path, key))

    visit(VALUES, ())
    assert found.place("data", "train") == f"{tmp_path / name}:{found.lines[('data', 'train')]}"


def test_the_line_of_a_key_is_exact(tmp_path: Path) -> None:
    assert document(tmp_path, "a.yaml", "task: chat\n\n# x\ndata:\n  train: a\n").lines[("data", "train")] == 5
    assert (
        document(tmp_path, "a.json", '{"task":\n "chat", "data": {"b": [1,\n 2], "train"\n: 1}}').lines[
            ("data", "train")
        ]
        == 3
    )
    assert (
        document(tmp_path, "a.toml", 'task = """\n[data]\ntrain = 1\n"""\n[data]\ntrain = 1\n').lines[("data", "train")]
        == 6
    )
    tables = document(tmp_path, "b.toml", "[[mix]]\na = 1\n[[mix]]\na = 2\n").lines
    assert (tables[("mix", 0, "a")], tables[("mix", 1, "a")]) == (2, 4)


PAIRS = zip("abcdefghijk", "bcdefghijkl", strict=True)
ALIASES = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in PAIRS)


@pytest.mark.parametrize(
    ("name", "text", "beginning"),
    [
        ("a.yaml", "task: chat\ntask: seq2seq\n", "a.yaml:2: 'task' is already set at line 1"),
        ("a.json", '{"a": 1,\n "a": 2}', "a.json:2: 'a' is already set at line 1"),
        ("a.toml", "a = 1\na = 2\n", "a.toml:2: not TOML"),
        ("a.yaml", "a: [1, 2\nb: 3\n", "a.yaml:2: not YAML"),
        ("a.yaml", "a: !!python/object/apply:os.system ['true']\n", "a.yaml:1: the tag 'tag:yaml.org,2002:python/"),
        ("a.yaml", "a: !!python/name:os.system x\n", "a.yaml:1: not YAML"),
        ("a.yaml", "true: 1\n", "a.yaml:1: the key True is not text"),
        ("a.yaml", "- 1\n", "a.yaml: a configuration is a mapping"),
        ("a.json", '{"a": 1,\n "b" 2}', "a.json:2: not JSON"),
        ("a.toml", "a = \n", "a.toml:1: not TOML"),
        ("a.cfg", "a = 1\n", "a.cfg: a configuration is a file ending in .yaml"),
        pytest.param("a.yaml", ALIASES, "a.yaml: more than 100,000 values", id="aliases of aliases"),
        pytest.param("a.yaml", "[" * 1100, "a.yaml", id="nested too deeply"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_with_its_place(tmp_path: Path, name: str, text: str, beginning: str) -> None:
    found = problem(tmp_path, name, text)
    assert found.startswith(beginning) and "\n" not in found


def test_merged_mappings_and_an_empty_file(tmp_path: Path) -> None:
    found = document(tmp_path, "a.yaml", "base: &base {a: 1, b: 2}\nnew:\n  <<: *base\n  b: 3\n")
    assert found.values["new"] == {"a": 1, "b": 3} and found.lines[("new", "b")] == 4
    assert document(tmp_path, "b.yaml", "").values == {}


def test_a_missing_file_suggests_a_similar_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("task: chat\n")
    with pytest.raises(ArgumentsError, match=r"rnu\.yaml: No such file or directory; did you mean 'run\.yaml'\?"):
        read_document(tmp_path / "rnu.yaml")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"task: \xff\xfe\n")
    with pytest.raises(ArgumentsError, match="not UTF-8"):
        read_document(tmp_path / "a.yaml")
