"""What scripts and launchers pass along, debugging and strictness."""

from __future__ import annotations

from dataclasses import dataclass

from ..field import Group, arg
from ..names import DebugOption


@dataclass
class ScriptArgs(Group):
    """Arguments for scripts and launchers, debugging and strict mode."""

    title = "Scripts and debugging"

    do_train: bool = arg(False, "For the script: whether to train.")
    do_eval: bool = arg(False, "For the script: whether to evaluate; True when eval_strategy is not 'no'.")
    do_predict: bool = arg(False, "For the script: whether to predict.")
    local_rank: int = arg(-1, "Accepted for old launchers that pass it; use local_process_index instead.", ranks="any")
    debug: str | list[DebugOption] = arg(
        "",
        "underflow_overflow: stop at an infinite value inside the model; tpu_metrics_debug: print XLA's counters.",
        as_given=True,
    )
    strict: bool = arg(False, "Raise an error wherever something would be dropped, guessed or changed with a warning.")
