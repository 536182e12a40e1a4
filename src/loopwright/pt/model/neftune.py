"""NEFTune: uniform noise on the input embeddings during training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...errors import ModelError


def add_embedding_noise(model: nn.Module, alpha: float) -> Any:
    """Add noise of size alpha / sqrt(tokens * width) to embeddings in training; returns a handle to remove it."""
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    if embeddings is None:
        raise ModelError("neftune_noise_alpha needs a model with get_input_embeddings()")

    def noisy(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        size = alpha / (output.shape[1] * output.shape[2]) ** 0.5
        return output + torch.zeros_like(output).uniform_(-size, size)

    return embeddings.register_forward_hook(noisy)
