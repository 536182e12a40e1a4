"""The JSON schema of configurations, made of the fields that exist."""

from __future__ import annotations

import types
from collections.abc import Mapping
from enum import Enum
from typing import Any, Union, get_args, get_origin

from ..args.field import UNSET, Spec, specs
from ..args.names import Name
from ..pt.arguments import Seq2SeqTrainingArguments
from ..tasks.fields import LoraFields, ModelFields
from ..tasks.table import TASKS
from .names import TopFields, argument_specs

DRAFT = "https://json-schema.org/draft/2020-12/schema"
TYPES: dict[Any, list[str]] = {
    bool: ["boolean"],
    int: ["integer"],
    float: ["number"],
    str: ["string"],
    dict: ["object"],
    list: ["array"],
    Mapping: ["object"],
    type(None): ["null"],
}
NUMBER_TEXT = {"type": "string", "pattern": r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"}
"""A number as text: YAML reads 5e-5 as one."""


def json_schema() -> dict[str, Any]:
    """The schema of all configurations; the block `data` depends on the task."""
    arguments = argument_specs(Seq2SeqTrainingArguments)
    top = specs(TopFields)
    model = {"anyOf": [{"type": "string"}, _block(specs(ModelFields))]}
    metrics = sorted({name for task in TASKS.values() for name in task.metrics})
    return {
        "$schema": DRAFT,
        "title": "loopwright configuration",
        "type": "object",
        "required": ["task"],
        "properties": {
            "$schema": {"type": "string"},
            "task": {"enum": list(TASKS), "description": top["task"].help},
            "model": {**model, "description": "The model: a name, or a block of options."},
            "data": {"type": "object", "description": "The data; the keys depend on the task."},
            "lora": {"anyOf": [_block(specs(LoraFields)), {"type": "null"}]},
            "metrics": {"type": ["array", "string"], "items": {"enum": metrics}, "description": top["metrics"].help},
            **{name: _field(spec) for name, spec in arguments.items()},
        },
        "additionalProperties": False,
        "allOf": [
            {
                "if": {"properties": {"task": {"const": name}}, "required": ["task"]},
                "then": {"properties": {"data": block}},
            }
            for name, block in data_schemas().items()
        ],
    }


def data_schemas() -> dict[str, Any]:
    """The schema of the block `data` of each task."""
    return {name: _block(specs(task.data)) for name, task in TASKS.items()}


def _block(fields: dict[str, Spec]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: _field(spec) for name, spec in fields.items()},
        "additionalProperties": False,
    }


def _field(spec: Spec) -> dict[str, Any]:
    """The schema of a field: type, choices, help and default."""
    found: dict[str, Any] = {"description": spec.help}
    if spec.default is not UNSET:
        found["default"] = spec.default.value if isinstance(spec.default, Enum) else spec.default
    kinds = _alternatives(spec)
    return {**found, **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {})}


def _alternatives(spec: Spec) -> list[dict[str, Any]]:
    """The accepted types; empty if any value is."""
    if spec.choices:
        names = [{"enum": list(spec.choices)}]
        return [*names, {"type": "null"}] if spec.default is None else names
    hint = spec.hint
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    names_only = any(isinstance(member, type) and issubclass(member, Name) for member in members)
    found: list[dict[str, Any]] = []
    for member in members:
        if names_only and member is str:
            continue
        if isinstance(member, type) and issubclass(member, Name):
            found.append({"enum": [each.value for each in member]})
            if "no" in [each.value for each in member]:
                found.append({"const": False})  # YAML reads a bare `no` as false
            continue
        kind = TYPES.get(get_origin(member) or member)
        if kind is None:
            return []
        found.append({"type": kind[0]})
        if member is float or member is int:
            found.append(NUMBER_TEXT)
    if spec.default is None and {"type": "null"} not in found:
        found.append({"type": "null"})
    if any(get_origin(member) is dict for member in members):
        found.append({"type": "string"})  # JSON text, or a file
    return found
