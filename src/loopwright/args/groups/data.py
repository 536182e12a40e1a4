"""How samples are loaded and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..field import Group, arg, between, list_of_names, positive, whole_lengths
from ..nested.mixing import mixture_weights


@dataclass
class DataArgs(Group):
    """How samples are loaded and in which order."""

    title = "Data"

    dataloader_drop_last: bool = arg(False, "Drop the last batch of an epoch if it is incomplete.")
    dataloader_num_workers: int = arg(
        0,
        ("Number of data loading worker processes; 0 loads in the main process."),
        check=between(0, 4096),
        ranks="any",
    )
    dataloader_pin_memory: bool = arg(
        True, "Use pinned host memory, from which copies to the device are faster.", ranks="any"
    )
    dataloader_persistent_workers: bool = arg(False, "Keep the data loading workers alive between epochs.", ranks="any")
    dataloader_prefetch_factor: int | None = arg(
        None, ("Batches prefetched by each data loading worker."), check=positive, ranks="any"
    )
    dataloader_multiprocessing_context: str | None = arg(
        None, "Start method of the data loading workers.", choices=("fork", "spawn", "forkserver"), ranks="any"
    )
    dataloader_in_order: bool = arg(True, "Return batches in order; otherwise as soon as one is ready.")
    remove_unused_columns: bool = arg(True, "Remove columns that the model's forward does not accept.")
    label_names: list[str] | None = arg(
        None, "The inputs that are labels; inferred from the model by default.", check=list_of_names
    )
    train_sampling_strategy: str = arg(
        "random",
        "random, sequential, group_by_length, or batch_rebalance: random, with micro-batches of similar cost.",
        choices=("random", "sequential", "group_by_length", "batch_rebalance"),
    )
    train_dataset_weights: dict[str, Any] | str | None = arg(
        None,
        "Weights of train_dataset={name: dataset}: a number each, or [[step, weight], ...]; by default their sizes.",
        check=mixture_weights,
    )
    length_column_name: str = arg("length", "The column with lengths: group_by_length, batch_rebalance, packing.")
    per_device_train_batch_tokens: int | None = arg(
        None,
        "Tokens per device in one forward pass of training; samples of a step are regrouped to stay within it.",
        check=positive,
    )
    static_lengths: list[int] | None = arg(
        None,
        (
            "Pad batches to these lengths, with the same results; devices that compile for each shape default to "
            "powers of two."
        ),
        check=whole_lengths,
    )
    batch_packing: str | None = arg(
        None,
        (
            "across_updates: fill each micro-batch with as many consecutive samples as fit in "
            "per_device_train_batch_tokens."
        ),
        choices=("across_updates",),
    )
