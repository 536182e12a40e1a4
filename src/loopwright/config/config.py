"""Config: a configuration that was read and checked, with the source of every value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..args.base import plain, without_secrets
from ..args.derive import reason_of
from ..args.field import specs
from ..core.checkpoint.json_files import write_json
from ..tasks.declaration import Task
from ..tasks.fields import DataFields, LoraFields, ModelFields
from ..tasks.request import Request
from .source import DEFAULT, Source

if TYPE_CHECKING:
    from ..pt.arguments import TrainingArguments

RESOLVED = "resolved_config.json"
"""The file in an output folder with every value and where it came from."""


@dataclass(frozen=True)
class Config:
    """What a run is made of."""

    path: Path
    task: Task
    model: ModelFields
    data: DataFields
    lora: LoraFields | None
    metrics: list[str]
    args: TrainingArguments
    sources: Mapping[str, Source]
    """The source of each value that is not a default, by dotted key."""

    @property
    def folder(self) -> Path:
        """The folder of the file."""
        return self.path.parent

    def source(self, key: str) -> Source:
        """Where a value came from."""
        return self.sources.get(key, DEFAULT)

    def place(self, key: str) -> str:
        """A key with its source for a message: `run.yaml:3: data.train`; of a default, the place of its block."""
        shown = self.source(key).shown or self.source(key.rpartition(".")[0]).shown
        return f"{shown}: {key}" if shown else key

    def request(self) -> Request:
        """The part that a task reads."""
        return Request(
            folder=self.folder,
            model=self.model,
            data=self.data,
            lora=self.lora,
            metrics=self.metrics,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            place=self.place,
        )

    def blocks(self) -> dict[str, Any]:
        """The values that are not training arguments, by dotted key."""
        found: dict[str, Any] = {"task": self.task.name, "metrics": list(self.metrics)}
        for name, block in (("model", self.model), ("data", self.data), ("lora", self.lora)):
            if block is None:
                found[name] = None
            else:
                found.update((f"{name}.{key}", plain(getattr(block, key))) for key in specs(type(block)))
        return found

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Every value with its source, by dotted key; secrets are masked."""
        arguments = json.loads(self.args.to_json_string())
        defaults = json.loads(type(self.args)().to_json_string())
        rows: dict[str, dict[str, Any]] = {}
        for key, value in without_secrets({**self.blocks(), **arguments}).items():
            source = self.source(key)
            is_derived = source is DEFAULT and key in arguments and value != defaults.get(key)
            rows[key] = {"value": value, "source": str(Source("derived", reason_of(key)) if is_derived else source)}
        return rows

    def write(self, folder: Path) -> Path:
        """Write `resolved_config.json` into an output folder."""
        path = folder / RESOLVED
        write_json(path, {"config": str(self.path), "values": self.resolved()})
        return path
