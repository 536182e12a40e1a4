"""YAML with the line of every key. Only plain values: tags that create objects are refused."""

from __future__ import annotations

from typing import Any

import yaml

from ..args.problems import short
from ..errors import ArgumentsError, first_line

PLAIN = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
"""The tags of mappings and lists."""
MOST_VALUES = 100_000
"""Values of a file after its aliases are expanded: a few aliases of aliases would fill the memory."""


def read_yaml_text(text: str, name: str) -> tuple[Any, dict[tuple[str | int, ...], int]]:
    """The values of a YAML text, and the line of each key path."""
    reader = _Reader(name)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        return (reader.value(loader, node, ()) if node is not None else {}), reader.lines
    except ArgumentsError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ArgumentsError(f"{name}{line}: not YAML ({error.problem or error.context}); correct this line") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ArgumentsError(f"{name}: not YAML ({first_line(error)}); correct the file") from None


class _Reader:
    """Converts nodes to values and collects their lines."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[tuple[str | int, ...], int] = {}
        self.count = 0

    def value(self, loader: yaml.SafeLoader, node: yaml.Node, path: tuple[str | int, ...]) -> Any:
        self.count += 1
        if self.count > MOST_VALUES:
            raise ArgumentsError(f"{self.name}: more than {MOST_VALUES:,} values; aliases of aliases multiply them")
        self.lines.setdefault(path, node.start_mark.line + 1)
        if not isinstance(node, yaml.ScalarNode) and node.tag not in PLAIN:
            raise ArgumentsError(f"{self.name}:{node.start_mark.line + 1}: the tag {node.tag!r} is not allowed here")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(loader, node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(loader, each, (*path, index)) for index, each in enumerate(node.value)]
        return loader.construct_object(node)

    def _mapping(self, loader: yaml.SafeLoader, node: yaml.MappingNode, path: tuple[str | int, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                self._merge(loader, value_node, path, merged, line)
                continue
            key = loader.construct_object(key_node)
            if not isinstance(key, str):
                raise ArgumentsError(f"{self.name}:{line}: the key {short(key)} is not text; write it in quotes")
            if key in found:
                raise ArgumentsError(
                    f"{self.name}:{line}: {key!r} is already set at line {self.lines[(*path, key)]}; remove one of them"
                )
            self.lines[(*path, key)] = line
            found[key] = self.value(loader, value_node, (*path, key))
        return {**merged, **found}

    def _merge(
        self, loader: yaml.SafeLoader, node: yaml.Node, path: tuple[str | int, ...], merged: dict[str, Any], line: int
    ) -> None:
        """Add the keys of `<<`; of several mappings the first has priority."""
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for part in parts:
            if not isinstance(part, yaml.MappingNode):
                raise ArgumentsError(f"{self.name}:{line}: '<<' needs a mapping, or a list of mappings")
            for key, value in self._mapping(loader, part, path).items():
                merged.setdefault(key, value)
