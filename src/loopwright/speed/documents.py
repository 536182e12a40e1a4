"""Where documents begin in a row that holds several of them, in a form every model hands on to its attention.

Models that look up their attention by name take an attention mask of four dimensions as ready-made and pass it on as it
is. The borders of the documents travel as such a mask: whole numbers, the borders along the last dimension, and the
length of the longest document as the size of the third, so that nobody has to read a number from the device for it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

PAD_BORDERS_TO = 64
"""Borders are filled up to a multiple of this with documents of no length, so that few shapes occur."""


def borders_of(lengths: np.ndarray, *, fill: bool = False) -> Tensor:
    """Where the documents of a row begin, and where the last one ends."""
    borders = np.concatenate([[0], np.cumsum(lengths)])
    if fill:
        missing = -(len(borders) - 1) % PAD_BORDERS_TO
        borders = np.concatenate([borders, np.full(missing, borders[-1])])
    return torch.from_numpy(borders.astype(np.int32))


def as_mask(borders: Tensor, longest: int) -> Tensor:
    """The borders as a mask of four dimensions; takes no memory."""
    return borders.view(1, 1, 1, -1).expand(1, 1, longest, -1)


def is_documents(mask: Tensor | None) -> bool:
    """Whether a mask is one of ours."""
    return mask is not None and mask.dtype is torch.int32 and mask.dim() == 4


def borders_in(mask: Tensor) -> Tensor:
    """The borders a mask holds."""
    return mask[0, 0, 0]


def longest_in(mask: Tensor) -> int:
    """The length of the longest document."""
    return mask.shape[2]
