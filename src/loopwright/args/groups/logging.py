"""What is printed, and when."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..field import Group, arg, one_of, steps_or_share
from ..names import IntervalStrategy

LEVELS = {
    "detail": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "passive": logging.NOTSET,
}
"""Names of log levels; passive keeps the current level."""


@dataclass
class LoggingArgs(Group):
    """What is printed, and when."""

    title = "Logging"

    logging_strategy: IntervalStrategy | str = arg("steps", "When to log: no, steps or epoch.")
    logging_steps: float = arg(500, ("Steps between two logs; below 1, a fraction of all steps."), check=steps_or_share)
    logging_first_step: bool = arg(False, "Log the first step too.")
    log_on_each_node: bool = arg(True, "Log on the first rank of each node instead of rank 0 only.")
    logging_nan_inf_filter: bool = arg(
        True, "Exclude NaN and infinite losses from the logged mean; they are counted either way."
    )
    logging_source_losses: bool = arg(
        True, "Log the loss of each of several train_datasets as loss_NAME; each forward then has samples of one."
    )
    include_num_input_tokens_seen: str = arg(
        "no",
        "Count input tokens: all, non_padding or no; True means all and False no.",
        check=one_of("all", "non_padding", "no"),  # not choices: a command line may also pass True or False
        as_given=True,
        nargs="?",
        const="all",
    )
    log_level: str = arg("passive", "Log level of the main process.", choices=tuple(LEVELS), ranks="any")
    log_level_replica: str = arg("warning", "Log level of the other ranks.", choices=tuple(LEVELS), ranks="any")
    disable_tqdm: bool | None = arg(
        None, "Plain lines instead of a progress bar; by default only where warnings are not shown.", ranks="any"
    )
    chart: bool = arg(False, "Draw the loss as a chart above the progress bar of a terminal.", ranks="any")
    html_report: bool = arg(
        True, "Keep report.html in the output folder up to date: curves, time ledger and incidents.", ranks="any"
    )
    skip_memory_metrics: bool = arg(True, "Leave memory statistics out of the metrics.")
