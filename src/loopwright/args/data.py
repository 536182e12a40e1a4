"""How samples are loaded and in which order."""

from __future__ import annotations

from dataclasses import dataclass

from .field import Group, arg, list_of_names, non_negative, positive


@dataclass
class DataArgs(Group):
    """How samples are loaded and in which order."""

    title = "Data"

    dataloader_drop_last: bool = arg(False, "Leave out the last batch of an epoch when it is not full.")
    dataloader_num_workers: int = arg(0, "Processes that load data; 0 loads in this one.", check=non_negative)
    dataloader_pin_memory: bool = arg(True, "Load into memory from which copies to the device are fast.")
    dataloader_persistent_workers: bool = arg(False, "Keep the loading processes from epoch to epoch.")
    dataloader_prefetch_factor: int | None = arg(None, "Batches each loading process keeps ready.", check=positive)
    dataloader_multiprocessing_context: str | None = arg(
        None, "How loading processes are started.", choices=("fork", "spawn", "forkserver")
    )
    dataloader_in_order: bool = arg(True, "Batches come in their order; otherwise as soon as one is ready.")
    remove_unused_columns: bool = arg(True, "Withhold columns the model does not take.")
    label_names: list[str] | None = arg(
        None, "The inputs that are labels; found from the model when not given.", check=list_of_names
    )
    train_sampling_strategy: str = arg(
        "random",
        "The order of samples: random, sequential, group_by_length or batch_rebalance.",
        choices=("random", "sequential", "group_by_length", "batch_rebalance"),
    )
    length_column_name: str = arg("length", "The column with lengths, for group_by_length and packing.")
    per_device_train_batch_tokens: int | None = arg(
        None,
        "Tokens per device in one forward pass of training; samples of an update are laid out to keep it.",
        check=positive,
    )
    packing: str | None = arg(
        None,
        "across_updates: a micro-batch is as many following samples as fit into per_device_train_batch_tokens.",
        choices=("across_updates",),
    )
