"""Which files the checkpoints of a run have: loopwright's own, or those of transformers if they can hold everything."""

from __future__ import annotations

import io
from typing import Any

import torch

from ...errors import CheckpointError
from ..arguments import TrainingArguments
from .described_values import check_plain
from .round_trip import export_warning
from .tensors import encode_optimizer, rehearsed
from .transformers_format import loaded_safely, their_schedule, without_tokens


def why_not_transformers_files(
    args: TrainingArguments, model: Any, optimizer: Any, schedule: Any, *, is_sharded: bool
) -> str | None:
    """Why a checkpoint in transformers' files could not restore this run; None if it can."""
    if is_sharded:
        return "every rank saves its own shards"
    if args.push_to_hub and args.hub_strategy in ("checkpoint", "all_checkpoints"):
        return "pickles are not pushed to the Hub, so a pushed checkpoint could not be resumed"
    if export_warning(model) is not None:
        return f"transformers cannot load the files of {type(model).__name__}.save_pretrained into this model"
    try:
        if optimizer is not None:
            check_plain(encode_optimizer(rehearsed(optimizer), model)[0])
    except CheckpointError as error:
        return str(error).partition(";")[0]
    if schedule is not None and not _is_restored(their_schedule(schedule.state_dict())):
        return f"the state of {type(schedule).__name__} cannot be read back without running code"
    try:
        torch.save(without_tokens(args), io.BytesIO())
    except Exception as error:  # values of the user may fail in any way
        return f"the arguments cannot be saved in training_args.bin: {error}"
    return None


def _is_restored(state: Any) -> bool:
    """Whether a state can be written as a pickle and read back safely."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        loaded_safely(file)
    except Exception:  # values of the user may fail in any way
        return False
    return True
