"""Arguments of checkpoints, the best model and resuming."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..field import Group, arg, path_or_flag, positive, steps_or_share
from ..names import SaveStrategy

if TYPE_CHECKING:
    Checkpoint = str | bool | None
else:
    Checkpoint = str | None  # parsers of command lines build a reader from the type, and cannot do so for the other one


@dataclass
class SavingArgs(Group):
    """Arguments of checkpoints, the best model and resuming."""

    title = "Saving, best model and resume"

    save_strategy: SaveStrategy | str = arg("steps", "When to save: no, steps, epoch or best.")
    save_steps: float = arg(500, "Steps between two saves; below 1, a fraction of all steps.", check=steps_or_share)
    save_minutes: float | None = arg(
        None, "Also save when the last checkpoint is this many minutes old.", check=positive
    )
    save_samples: int | None = arg(None, "Also save every time this many samples have been seen.", check=positive)
    save_trigger_file: str | None = arg(None, "Also save when this file appears; it is deleted.", ranks="any")
    save_total_limit: int | None = arg(
        None, ("Number of checkpoints to keep; older ones are deleted. 0 or less keeps all.")
    )
    save_only_model: bool = arg(False, "Save the weights only; such a checkpoint cannot be resumed from.")
    save_on_each_node: bool = arg(False, "Save on each node instead of only on the first one.")
    checkpoint_format: str = arg(
        "auto",
        "Checkpoint file format: native, transformers, or auto: native unless install() has replaced transformers.",
        choices=("auto", "native", "transformers"),
    )
    async_save: bool = arg(True, "Write checkpoints in the background while training continues.")
    enable_jit_checkpoint: bool = arg(True, "On SIGTERM, SIGUSR1 or SIGHUP save a checkpoint, then stop.")
    load_best_model_at_end: bool = arg(False, "Load the weights of the best evaluation at the end of training.")
    metric_for_best_model: str | None = arg(None, "The metric that selects the best model; defaults to the loss.")
    greater_is_better: bool | None = arg(
        None, "Whether a larger metric is better; by default True unless its name ends in 'loss'."
    )
    ignore_data_skip: bool = arg(False, "When resuming, restart the epoch's data instead of continuing within it.")
    restore_callback_states_from_checkpoint: bool = arg(True, "When resuming, restore the saved state of callbacks.")
    save_on_interrupt: bool = arg(False, "On Ctrl-C save a checkpoint after the current step, then stop.")
    resume_from_checkpoint: Checkpoint = arg(
        None,
        "Path of a checkpoint, True: the last one, 'auto': the last one if any, False: none. Default: that of an "
        "interrupted run.",
        check=path_or_flag,
        as_given=True,
    )
    take_over: bool = arg(False, "Take output_dir from another run that is using it; that run stops with an error.")
