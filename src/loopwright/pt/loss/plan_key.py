"""What a speed plan depends on, as the key under which later runs of the same training find it."""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from ...speed.compile.cache import cache_key
from ...speed.model_stamp import described, plain_settings
from ...speed.source_code import source_digest
from ...speed.users_loss import users_loss_of
from ..arguments import TrainingArguments
from ..data.columns import innermost, without_wrappers

KEEPING = "LOOPWRIGHT_KEPT_PLANS"
"""The environment variable that turns off, with "off", what is kept of plans for later runs."""
PLANNED_BY = (
    "speed", "bf16", "fp16", "fp8", "tf32", "train_batch_size", "gradient_accumulation_steps", "batch_packing",
    "per_device_train_batch_tokens", "gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_compile",
    "label_smoothing_factor", "average_tokens_across_devices",
)  # fmt: skip
"""Arguments on which the proofs of a plan depend."""
DATA = ("train_dataset", "eval_dataset")
"""Attributes of a trainer on which they do not."""


def plan_key(trainer: Any, model: nn.Module, args: TrainingArguments, *, identity: str) -> str | None:
    """The key; None if code is not in files, or if the user keeps no plans."""
    code = None if os.environ.get(KEEPING) == "off" else code_key(trainer, model, with_values=True)
    if code is None:
        return None
    plain = without_wrappers(model)
    options = [repr(getattr(args, name, None)) for name in PLANNED_BY]
    precision = (torch.get_float32_matmul_precision(), torch.get_default_dtype())
    settings = (plain_settings(plain), _settings_of_user(trainer, args))
    return cache_key(plain, args.device, code, identity, settings, options, precision)


def code_key(trainer: Any, model: nn.Module, *, with_values: bool = False) -> str | None:
    """A digest of the code that computes the loss, as far as it is imported; None if it is not all in files."""
    attention = _attention_of(getattr(innermost(model), "config", None))
    others = (trainer, trainer.data_collator, trainer.compute_loss_func, users_loss_of(innermost(model)), attention)
    return source_digest(without_wrappers(model), *others, with_values=with_values)


def _settings_of_user(trainer: Any, args: TrainingArguments) -> list[str]:
    """What the user's own loss may read: arguments, attributes of the trainer and of the collator."""
    known = {each.name for each in fields(TrainingArguments)}
    arguments = {name: value for name, value in vars(args).items() if name not in known}
    own = {name: value for name, value in vars(trainer).items() if name not in DATA}
    return [described(each) for each in (arguments, own, getattr(trainer.data_collator, "__dict__", {}))]


def _attention_of(config: Any) -> Any:
    """The function that transformers calls for the attention of a model; a user may have registered it."""
    functions = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    name = getattr(config, "_attn_implementation", None)
    return functions.get(name) if functions is not None and isinstance(name, str) else None
