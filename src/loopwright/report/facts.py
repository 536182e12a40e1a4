"""What does not change while a run trains: its arguments with their sources, and the environment."""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..args.field import UNSET, specs
from ..args.secrets import MASK, is_secret, masked_text
from ..core.checkpoint.folder import ARGUMENTS
from ..core.resuming.run_record import FILE as RECORD

if TYPE_CHECKING:
    from ..args.base import BaseArguments

PACKAGES = ("torch", "tensorflow", "jax", "keras", "numpy", "transformers", "datasets", "peft", "accelerate")
RESOLVED = "resolved_config.json"
LONGEST_VALUE = 300

Row = dict[str, str]
_ENCODER = json.JSONEncoder(default=str)


def facts_of(args: BaseArguments) -> dict[str, Any]:
    """The arguments of a run and its environment, in JSON types."""
    return {"config": arguments(args), "environment": environment(), "values": _plain(args)}


def arguments(args: BaseArguments) -> list[Row]:
    """Every argument as text, those that are not default first."""
    known, values = specs(type(args)), json.loads(args.to_json_string())  # without secrets
    rows = []
    for name, value in values.items():
        spec = known.get(name)
        default = UNSET if spec is None else spec.default
        source = "default" if value == default or str(value) == str(default) else "not default"
        rows.append(_row(name, value, source))
    return sorted(rows, key=lambda row: row["source"] == "default")


def resolved(folder: Path) -> list[Row]:
    """The configuration with the source of each value, as `resolved_config.json` has it; empty without one."""
    try:
        found = json.loads((folder / RESOLVED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    values = found.get("values", found) if isinstance(found, dict) else {}
    rows = []
    for name, each in values.items():
        if isinstance(each, dict) and "value" in each:
            rows.append(_row(str(name), each["value"], str(each.get("source", "default"))))
    return sorted(rows, key=lambda row: row["source"] == "default")


def saved_arguments(folder: Path) -> list[Row]:
    """The arguments in the newest checkpoint of a folder; empty without one."""
    steps = [(int(each.name[11:]), each) for each in folder.glob("checkpoint-*") if each.name[11:].isdigit()]
    for _, place in sorted(steps, reverse=True):
        try:
            found = json.loads((place / ARGUMENTS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return [_row(str(name), value, place.name) for name, value in found.items()]
    return []


@functools.cache
def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a build with another name
            found[package] = str(getattr(sys.modules[package], "__version__", "unknown"))
    return found


def environment() -> dict[str, str]:
    """Versions and the machine, without names of users or paths."""
    from .. import __version__

    return {
        "loopwright": __version__,
        "python": platform.python_version(),
        **_versions(tuple(each for each in PACKAGES if each in sys.modules)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": str(os.cpu_count()),
    }


def command(folder: Path) -> str:
    """The command that started the run, without secrets; empty if it is unknown."""
    try:
        words = json.loads((folder / RECORD).read_text(encoding="utf-8"))["argv"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return " ".join(map(str, words)) if isinstance(words, list) else ""


def _plain(args: BaseArguments) -> dict[str, Any]:
    """The arguments that the verdict reads."""
    names = ("dataloader_num_workers", "async_save", "eval_strategy", "save_strategy", "logging_steps")
    values = args.to_dict()
    return {name: values[name] for name in names if isinstance(values.get(name), (bool, int, float, str))}


def _row(name: str, value: Any, source: str) -> Row:
    return {"name": name, "value": MASK if is_secret(name) and value else _text(value), "source": source}


def _text(value: Any) -> str:
    text = masked_text(value if isinstance(value, str) else _ENCODER.encode(value))
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
