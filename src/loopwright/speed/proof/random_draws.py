"""Random states during a comparison: whether a model draws from them, and reseeding them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn


def random_streams(model: nn.Module) -> tuple[Any, ...]:
    """The states of all random generators, in a form that can be compared."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    own = bytes(torch.cuda.get_rng_state(device).numpy()) if device.type == "cuda" else b""
    _, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), bytes(np.asarray(keys)), *rest, bytes(torch.get_rng_state().numpy()), own


def seed_all(seed: int) -> None:
    """Reseed all random generators; the caller's sandbox restores their states."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draws_without_effect(model: nn.Module) -> int:
    """How many numbers a forward pass in training draws for layerdrop rates of zero: one for each layer."""
    if not drops_no_layers(model):
        return 0
    lists = (getattr(module, "layers", ()) for module in model.modules() if "layerdrop" in module.__dict__)
    return sum(len(layers) for layers in lists if isinstance(layers, nn.ModuleList))


def drops_no_layers(model: nn.Module) -> bool:
    """Whether all layerdrop rates are zero: transformers then draws numbers to compare with them, without effect."""
    rates = [module.__dict__["layerdrop"] for module in model.modules() if "layerdrop" in module.__dict__]
    return bool(rates) and not any(rates)
