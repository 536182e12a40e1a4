"""`loopwright schema`: print the JSON schema of configurations, for editors and programs."""

from __future__ import annotations

import json

from ...errors import ArgumentsError
from ..command import Result, Usage, Words, run_command

USAGE = Usage(
    "schema",
    "[KEY]",
    "Print the JSON schema of configurations, or of one key; of the key 'data', that of each task. Editors complete "
    "and check configurations with it: loopwright schema > loopwright.schema.json",
)


def run(words: list[str]) -> int:
    """Print the schema; returns the exit code."""
    return run_command(USAGE, words, _schema)


def _schema(words: Words) -> Result:
    from ...args.field import nearest
    from ...config.schema import data_schemas, json_schema

    if words.positional == ["data"]:
        blocks = data_schemas()
        return Result(blocks, json.dumps(blocks, indent=1))
    schema = json_schema()
    if not words.positional:
        return Result(schema, json.dumps(schema, indent=1))
    key = words.positional[0]
    found = schema["properties"].get(key)
    block, dot, _ = key.partition(".")
    if found is None and dot and block in ("data", "lora", "model"):
        raise ArgumentsError(f"{key!r} is a key inside a block; `loopwright schema {block}` shows all its keys")
    if found is None:
        raise ArgumentsError(f"there is no key {key!r}{nearest(key, schema['properties'])}")
    return Result(found, json.dumps(found, indent=1))
