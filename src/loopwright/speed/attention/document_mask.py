"""Document boundaries in a row that holds several documents, in a form every model passes on to its attention.

A model is given the boundaries of the documents in place of a padding mask, as integers in five dimensions: with fewer
it may take them for padding, and with four for a finished mask. transformers passes them to the mask function that is
registered for the attention's name, here: its result has four dimensions and is passed on unchanged. The boundaries
lie along the last dimension; the size of the one before is the length of the longest document, and that of the second
says which positions a token sees, so that no number is read from the device.
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


def as_given(borders: Tensor, longest: int) -> Tensor:
    """The borders as a model is given them; takes no memory."""
    return borders.view(1, 1, 1, 1, -1).expand(1, 1, 1, longest, -1)


def is_given(mask: Tensor) -> bool:
    """Whether a mask is one of ours that a model was given."""
    return mask.dtype is torch.int32 and mask.dim() == 5


def with_pattern(given: Tensor, *, causal: bool, window: int | None = None) -> Tensor:
    """What the attention gets: the same with which places a token sees as the size of another dimension."""
    code = 2 * (window or 0) + (1 if causal else 2)
    return given[0].expand(-1, code, -1, -1)


def as_mask(borders: Tensor, longest: int, *, causal: bool = True, window: int | None = None) -> Tensor:
    """The borders as the attention gets them."""
    return with_pattern(as_given(borders, longest), causal=causal, window=window)


def is_documents(mask: Tensor | None) -> bool:
    """Whether a mask is one of ours that the attention gets."""
    return mask is not None and mask.dtype is torch.int32 and mask.dim() == 4


def borders_in(mask: Tensor) -> Tensor:
    """The borders a mask holds."""
    return mask[0, 0, 0]


def longest_in(mask: Tensor) -> int:
    """The length of the longest document."""
    longest: int = mask.shape[2]
    return longest


def pattern_in(mask: Tensor) -> tuple[bool, int | None]:
    """Whether a token sees earlier places only, and how many."""
    code = mask.shape[1] - 1
    return code % 2 == 0, code // 2 or None


def split_at_chunks(given: Tensor, chunk: int, tokens: int) -> Tensor:
    """Every document cut into pieces of `chunk` tokens, of a row of at most `tokens`; nothing waits for the device."""
    borders = given[0, 0, 0, 0]
    places = torch.arange(tokens, device=borders.device, dtype=torch.int32)
    document = torch.searchsorted(borders.contiguous(), places, right=True) - 1
    begins = (places - borders[document]) % chunk == 0
    end = borders[-1]
    cuts = torch.where(begins & (places < end), places, end)
    most = borders.shape[0] + tokens // chunk
    pieces = torch.cat([cuts.sort().values[: most - 1], end.expand(max(1, most - tokens))])
    return as_given(pieces, min(given.shape[3], chunk))
