"""What is accepted by name and not available yet: the table, the check and the text for the documentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .problems import Problems, shown

if TYPE_CHECKING:
    from .base import BaseArguments


def _is_given(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Missing:
    """A feature that is not available yet."""

    part: str
    asked: Callable[[Any], Any] = _is_given
    """Returns the part of a field's value that requests the feature; an empty value if none does."""
    when: str = "set"


def _only(name: str) -> Callable[[Any], Any]:
    return lambda value: value if value == name else None


MISSING: dict[str, Missing] = {
    "push_to_hub": Missing("pushing to the Hub"),
    "use_liger_kernel": Missing("Liger's kernels"),
    "liger_kernel_config": Missing("Liger's kernels"),
    "train_sampling_strategy": Missing("balancing micro-batches by cost", _only("batch_rebalance"), "batch_rebalance"),
    "debug": Missing("debugging aids", lambda options: [option.value for option in options]),
}
"""Each field that can request a feature that is not available yet."""


def apply_availability(args: BaseArguments, problems: Problems) -> None:
    """Add a problem for every requested feature that is not available yet."""
    for name, missing in MISSING.items():
        if name in problems.broken:
            continue
        value = getattr(args, name)
        asked = missing.asked(value)
        if asked:
            part = value if isinstance(asked, str) else asked
            problems.unavailable.append(f"{shown(name, part)}: not available yet ({missing.part}); leave it out")


def availability_table() -> str:
    """The table of what is not available yet, as Markdown."""
    rows = [f"| `{name}` | {missing.when} | {missing.part} |" for name, missing in MISSING.items()]
    return "\n".join(["| argument | when it is | what is not available yet |", "|---|---|---|", *rows]) + "\n"
