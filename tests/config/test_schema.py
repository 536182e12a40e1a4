"""The JSON schema agrees with what `load_config` accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from loopwright.cli.commands.init import example_of, text_of
from loopwright.config import load_config
from loopwright.config.schema import json_schema
from loopwright.errors import ArgumentsError
from loopwright.tasks.table import TASKS

jsonschema = pytest.importorskip("jsonschema")
BASE = {"task": "table-regression", "model": "mlp", "data": {"train": "x.csv"}}


@pytest.fixture(scope="module")
def validator() -> object:
    schema = json.loads(json.dumps(json_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("task", TASKS)
def test_what_init_writes_is_valid_and_loads(task: str, validator: object, tmp_path: Path) -> None:
    text = text_of(example_of(TASKS[task]), TASKS[task])
    assert text.startswith("# yaml-language-server: $schema=")
    validator.validate(yaml.safe_load(text))  # type: ignore[attr-defined]
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(tmp_path / "run.yaml").task is TASKS[task]


@pytest.mark.parametrize(
    ("values", "is_good"),
    [
        ({"learning_rate": 1e-3}, True),
        ({"learning_rate": "1e-3"}, True),
        ({"learning_rate": "fast"}, False),
        ({"learning_rate": [1]}, False),
        ({"lerning_rate": 1e-3}, False),
        ({"max_steps": 5}, True),
        ({"max_steps": "five"}, False),
        ({"bf16": False}, True),
        ({"bf16": "maybe"}, False),
        ({"save_strategy": "epoch"}, True),
        ({"save_strategy": "sometimes"}, False),
        ({"save_strategy": False}, True),
        ({"lr_scheduler_type": "cosine"}, True),
        ({"optim": "adamw"}, False),
        ({"output_dir": 3}, False),
        ({"metrics": ["mae"]}, True),
        ({"metrics": "mae"}, True),
        ({"metrics": ["mea"]}, False),
        ({"model": {"name": "mlp", "options": {"hidden": [3]}}}, True),
        ({"model": {"nam": "mlp"}}, False),
        ({"data": {"train": "x.csv", "target_column": "y"}}, True),
        ({"data": {"train": "x.csv", "text_column": "y"}}, False),
        ({"data": {"train": "x.csv", "validation_share": "half"}}, False),
        ({"lora": {"r": 4}}, True),
        ({"lora": {"rank": 4}}, False),
        ({"lora": None}, True),
        ({"task": "chatt"}, False),
    ],
)
def test_the_schema_agrees_with_the_checks(
    values: dict[str, object], is_good: bool, validator: object, tmp_path: Path
) -> None:
    config = {**BASE, **values}
    (tmp_path / "run.json").write_text(json.dumps(config))
    try:
        load_config(tmp_path / "run.json")
        accepted = True
    except ArgumentsError:
        accepted = False
    assert (accepted, validator.is_valid(config)) == (is_good, is_good)  # type: ignore[attr-defined]
