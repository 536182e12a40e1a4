"""Random states while two paths are compared: whether a model uses them, and reseeding them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn


def random_streams(model: nn.Module) -> tuple[Any, ...]:
    """Where all random streams stand, in a form that can be compared."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    own = bytes(torch.cuda.get_rng_state(device).numpy()) if device.type == "cuda" else b""
    _, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), bytes(np.asarray(keys)), *rest, bytes(torch.get_rng_state().numpy()), own


def seed_all(seed: int) -> None:
    """Put all streams elsewhere; the caller's sandbox puts them back."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def drops_no_layers(model: nn.Module) -> bool:
    """Whether all that is drawn are numbers that models of transformers compare with a layerdrop of zero."""
    rates = [module.__dict__["layerdrop"] for module in model.modules() if "layerdrop" in module.__dict__]
    return bool(rates) and not any(rates)
