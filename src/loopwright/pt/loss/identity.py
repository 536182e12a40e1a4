"""The identity of a loss: inferences about a loss apply only to the same loss."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ...speed.model_stamp import fingerprint
from ...speed.users_loss import users_loss_of
from ..data.columns import innermost


def stamp_of(trainer: Any) -> str:
    """A digest of the model's class and configuration, the loss functions and the names of labels."""
    model = innermost(trainer.model)
    parts = [
        f"{type(model).__module__}.{type(model).__qualname__}",
        _configuration(getattr(model, "config", None)),
        fingerprint(type(model).forward),
        fingerprint(users_loss_of(model)),
        fingerprint(getattr(type(trainer), "compute_loss", None)),
        fingerprint(vars(trainer).get("compute_loss")),
        fingerprint(trainer.compute_loss_func),
        *sorted(trainer.label_names),
        str(trainer.args.label_smoothing_factor),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _configuration(config: Any) -> str:
    """The plain values of a configuration, without its source path."""
    if config is None or not hasattr(config, "to_dict"):
        return ""
    values = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    for name in ("transformers_version", "problem_type", "architectures", "dtype", "torch_dtype"):
        values.pop(name, None)  # written by a save or by the first forward
    return json.dumps(values, sort_keys=True, default=lambda value: type(value).__name__)
