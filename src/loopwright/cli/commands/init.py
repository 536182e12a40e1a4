"""`loopwright init TASK`: print a configuration to begin with."""

from __future__ import annotations

from typing import Any

from ...args.field import nearest
from ...errors import ArgumentsError
from ...tasks.declaration import Task
from ...tasks.table import TASKS
from ..command import Result, Usage, Words, run_command

SCHEMA_FILE = "loopwright.schema.json"
ARGUMENTS: dict[str, Any] = {
    "output_dir": "runs",
    "num_train_epochs": 3,
    "per_device_train_batch_size": 8,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.03,
    "logging_steps": 10,
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "seed": 42,
}
"""Training arguments of a new configuration."""
USAGE = Usage(
    "init",
    "TASK",
    "Print a configuration for a task, such as: loopwright init chat > run.yaml\n\ntasks:\n"
    + "\n".join(f"  {name:<22}{task.help}" for name, task in TASKS.items()),
)


def run(words: list[str]) -> int:
    """Print the configuration; returns the exit code."""
    return run_command(USAGE, words, _init)


def _init(words: Words) -> Result:
    name = words.first(f"a task: {', '.join(TASKS)}")
    if name not in TASKS:
        raise ArgumentsError(f"{name!r} is not a task{nearest(name, TASKS) or '.'} There are {', '.join(TASKS)}")
    values = example_of(TASKS[name])
    return Result({"task": name, "config": values}, text_of(values, TASKS[name]).rstrip("\n"))


def example_of(task: Task) -> dict[str, Any]:
    """The values of a new configuration."""
    arguments = {**ARGUMENTS, "output_dir": f"runs/{task.name}"}
    if task.name.startswith("table"):
        arguments["learning_rate"] = 1e-3
    elif "lora" in task.example:
        arguments["learning_rate"] = 2e-4
    return {"task": task.name, **task.example, "metrics": list(task.default_metrics), **arguments}


def text_of(values: dict[str, Any], task: Task) -> str:
    """A configuration as YAML, with the schema for editors first."""
    import yaml

    lines = [f"# yaml-language-server: $schema={SCHEMA_FILE}"]
    lines += [f"# {task.help}. Write the schema for your editor with: loopwright schema > {SCHEMA_FILE}"]
    for key, value in values.items():
        if key in ("data", "lora", "metrics", "output_dir"):
            lines.append("")
        style = None if isinstance(value, list) else False
        lines.append(yaml.safe_dump({key: value}, sort_keys=False, default_flow_style=style).rstrip("\n"))
    return "\n".join(lines) + "\n"
