"""The options of an optimizer in a checkpoint, compared with those it has now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.checkpoint.folder import OPTIMIZER
from ...core.checkpoint.schema import Shape, anything, check, like, list_of, maybe, one_of, record
from ...errors import CheckpointError

FILE = Path(f"{OPTIMIZER}.json")
CHOSEN_BY_TORCH = ("foreach", "fused", "capturable")
"""Flags that are null where torch chooses by the kind of the tensors."""
LARGEST_SLOT = "max_exp_avg_sq"
"""The value that an optimizer with amsgrad has of each parameter."""


def check_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]], described: Mapping[str, Any]) -> None:
    """Raise unless the saved options are of the kind that the groups of the optimizer have."""
    if len(saved) != len(groups):
        raise CheckpointError(
            f"{FILE}: the checkpoint's optimizer has {len(saved)} parameter groups, but this one has {len(groups)}; "
            "resume with the same optimizer, or from another checkpoint"
        )
    for number, (group, options) in enumerate(zip(groups, saved, strict=True)):
        name = f"group {number}"
        own = {key: _shape(key, value) for key, value in group.items() if key != "params"}
        check({name: options}, record({name: record({}, own)}), FILE)
        if options.get("amsgrad"):
            _check_slots(name, described["groups"][number]["params"], described["state"])


def _shape(name: str, value: Any) -> Shape:
    if isinstance(value, tuple):
        return list_of(like(value[0], complete=False) if value else anything, length=len(value))
    if name == "differentiable":  # how updates are computed, which no argument of a run changes
        return one_of(value)
    shape = like(value, complete=False)
    return maybe(shape) if name in CHOSEN_BY_TORCH and isinstance(value, bool) else shape


def _check_slots(group: str, names: list[str], states: Mapping[str, Any]) -> None:
    for name in names:
        if "exp_avg_sq" in states.get(name, {}) and LARGEST_SLOT not in states[name]:
            raise CheckpointError(
                f"{FILE}: amsgrad of {group} is true, but there is no {LARGEST_SLOT} of {name}. The file was damaged "
                "or changed; resume from another checkpoint"
            )
