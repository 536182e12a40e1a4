"""Arguments that differ between a checkpoint and the run that resumes from it, as text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..checkpoint.folder import STATE
from ..state import TrainerState

CHANGES = {
    ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"):
        "the checkpoint's optimizer and schedule are restored, so these are unchanged",
    ("seed", "data_seed", "train_sampling_strategy"):
        "the order of samples differs from now on, so some samples of this epoch are repeated and others skipped",
}  # fmt: skip
"""Arguments whose change has a different effect, or none, on resuming, with the message for each group."""


def changed_arguments(
    before: Mapping[str, Any], now: Mapping[str, Any], known: Collection[str]
) -> Iterator[tuple[str, str]]:
    """The changed arguments of each group of `CHANGES`, and the effect; without those of `known`."""
    for names, effect in CHANGES.items():
        changed = [
            f"{name} ({before[name]} -> {now[name]})"
            for name in names
            if name in before and before[name] != now[name] and name not in known
        ]
        if changed:
            yield ", ".join(changed), effect


def changed_intervals(saved: TrainerState, now: TrainerState) -> str:
    """Intervals and batch sizes that differ, in the words of transformers."""
    changed = [
        f"{name}: {new} (from args) != {old} (from {STATE})"
        for name, new, old in (
            ("logging_steps", now.logging_steps, saved.logging_steps),
            ("eval_steps", now.eval_steps, saved.eval_steps),
            ("save_steps", now.save_steps, saved.save_steps),
            ("per_device_train_batch_size", now.train_batch_size, saved.train_batch_size),
        )
        if old is not None and new != old
    ]
    return "; ".join(changed)
