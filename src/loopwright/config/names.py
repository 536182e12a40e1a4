"""The keys that exist in a configuration, and what is wrong with one that does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..args.field import Group, Spec, arg, names_or_pattern, nearest, specs
from ..args.groups.generation import GenerationArgs
from ..pt.arguments import Seq2SeqTrainingArguments, TrainingArguments
from ..tasks.declaration import Task
from ..tasks.fields import LoraFields, ModelFields
from ..tasks.table import TASKS

FOR_SCRIPTS = {
    "do_train": "`loopwright train` always trains",
    "do_eval": "it evaluates if there is validation data",
    "do_predict": "call the trainer's predict() in a script",
    "local_rank": "the launcher sets it",
}
"""Training arguments that only scripts read, and why they are not needed here."""
OTHER_BLOCKS = {"search": "loopwright search"}
"""Blocks that only one command reads."""


@dataclass
class TopFields(Group):
    """Keys of a configuration that are neither blocks nor training arguments."""

    title = "task"

    task: str | None = arg(None, "What is trained.", choices=tuple(TASKS))
    metrics: str | list[str] | None = arg(
        None, "Names of the metrics of the validation; defaults to those of the task.", check=names_or_pattern
    )


class Names:
    """The keys of a task's configuration."""

    def __init__(self, task: Task) -> None:
        self.task = task
        kind: type[TrainingArguments] = Seq2SeqTrainingArguments if task.generates else TrainingArguments
        self.arguments_class = kind
        self.arguments = argument_specs(self.arguments_class)
        self.blocks: dict[str, dict[str, Spec]] = {
            "model": specs(ModelFields),
            "data": specs(task.data),
            "lora": specs(LoraFields),
        }
        self.top = specs(TopFields)

    def is_block(self, key: str) -> bool:
        """Whether a key names a block of keys."""
        return key in self.blocks

    def spec(self, key: str) -> Spec | None:
        """The field of a dotted key, or None."""
        block, _, inner = key.partition(".")
        if inner:
            return self.blocks.get(block, {}).get(inner)
        if key == "model":
            return self.blocks["model"]["name"]
        return self.top.get(key) or self.arguments.get(key)

    def problem(self, key: str) -> str | None:
        """What is wrong with a dotted key; None if it exists."""
        block, _, inner = key.partition(".")
        if self.spec(key) is not None or (not inner and block in self.blocks):
            return None
        if inner and block in self.blocks:
            return f"unknown key {key!r}{self._advice(key, inner)}"
        if key in FOR_SCRIPTS:
            return f"{key!r} is for scripts: {FOR_SCRIPTS[key]}; remove it"
        if block in OTHER_BLOCKS:
            return f"{block!r} is a block of `{OTHER_BLOCKS[block]}`; remove it, or run that command"
        if key in specs(GenerationArgs):
            tasks = ", ".join(name for name, task in TASKS.items() if task.generates)
            return f"{key!r} is for tasks that generate text ({tasks}); remove it"
        row: Any = specs(self.arguments_class)[key].row if key in specs(self.arguments_class) else None
        if row is not None:
            return f"{key!r} is an old name: {row.word}"
        return f"unknown key {key!r}{self._advice(key, key)}"

    def _advice(self, key: str, inner: str) -> str:
        """The nearest key: one of the same name in another block, or a similar one."""
        everywhere = [*self.top, *self.blocks, *self.arguments]
        dotted = [f"{block}.{name}" for block, fields in self.blocks.items() for name in fields]
        same = [each for each in (*everywhere, *dotted) if each.rpartition(".")[2] == inner]
        if same:
            return f"; did you mean {same[0]!r}?"
        block = key.partition(".")[0]
        own = list(self.blocks.get(block, {})) if "." in key else everywhere
        close = nearest(inner, own)
        if close and "." in key:
            close = close.replace("'", f"'{block}.", 1)
        if "." in key:
            return close or f"; there are {', '.join(own)}"
        return close or f"; `loopwright args {inner}` searches the training arguments"


def argument_specs(kind: type[TrainingArguments]) -> dict[str, Spec]:
    """The training arguments that a configuration may set: no old names, and none for scripts only."""
    return {name: spec for name, spec in specs(kind).items() if spec.row is None and name not in FOR_SCRIPTS}
