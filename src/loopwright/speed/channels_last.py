"""Images with their channels as the last dimension in memory, for which GPUs have the fastest convolutions.

The values are the same, and weights are not converted. It is used in CUDA graphs, where the conversion is one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .training_setup import TrainingSetup

CHANNELS_LAST = "channels-last images"
LEAST_CONVOLUTIONS = 4
"""Convolutions from which it may help: models of patches have one."""


def images_last(batch: Any) -> Any:
    """The batch with its images in this memory order; everything else is unchanged."""
    if not isinstance(batch, Mapping):
        return batch
    return {name: _last(value) if is_image(value) else value for name, value in batch.items()}


def _last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def is_image(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point() and value.shape[1] > 1


def may_help(setup: TrainingSetup, batch: Any) -> bool:
    """Whether a model of convolutions computes in half precision, and its batches have images."""
    images = isinstance(batch, Mapping) and any(is_image(value) for value in batch.values())
    convolutions = sum(isinstance(module, nn.Conv2d) for module in setup.model.modules())
    return images and setup.computes_half and setup.may_measure and convolutions >= LEAST_CONVOLUTIONS
