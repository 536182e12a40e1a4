"""Document boundaries of a row that holds several documents, in a form that every model passes to its attention.

A model gets the boundaries of the documents instead of a padding mask, as an integer tensor of five dimensions: with
fewer it could be treated as padding, and with four as a finished mask. transformers passes it to the mask function
registered for the attention's name, `mask_of_documents`: its result has four dimensions and is used unchanged. The
boundaries are along the last dimension. The size of the dimension before it is the length of the longest document, and
the size of the second encodes the visible positions, so that no value is read from the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

PAD_BORDERS_TO = 64
"""Boundaries are padded to a multiple of this with empty documents, so that few shapes occur."""


def borders_of(lengths: np.ndarray, *, fill: bool = False) -> Tensor:
    """The start of each document of a row, and the end of the last one."""
    borders = np.concatenate([[0], np.cumsum(lengths)])
    if fill:
        missing = -(len(borders) - 1) % PAD_BORDERS_TO
        borders = np.concatenate([borders, np.full(missing, borders[-1])])
    return torch.from_numpy(borders.astype(np.int32))


def as_given(borders: Tensor, longest: int) -> Tensor:
    """The boundaries as the mask passed to a model; an expanded view without memory."""
    return borders.view(1, 1, 1, 1, -1).expand(1, 1, 1, longest, -1)


def is_given(mask: Tensor) -> bool:
    """Whether a mask is one made by `as_given`."""
    return mask.dtype is torch.int32 and mask.dim() == 5


def with_pattern(given: Tensor, *, causal: bool, window: int | None = None) -> Tensor:
    """The mask for the attention: the same with the visible positions encoded as the size of its second dimension."""
    code = 2 * (window or 0) + (1 if causal else 2)
    return given[0].expand(-1, code, -1, -1)


def as_mask(borders: Tensor, longest: int, *, causal: bool = True, window: int | None = None) -> Tensor:
    """The boundaries as the mask for the attention."""
    return with_pattern(as_given(borders, longest), causal=causal, window=window)


def is_documents(mask: Tensor | None) -> bool:
    """Whether a mask is one made by `with_pattern`."""
    return mask is not None and mask.dtype is torch.int32 and mask.dim() == 4


def borders_in(mask: Tensor) -> Tensor:
    """The boundaries in a mask."""
    return mask[0, 0, 0]


def longest_in(mask: Tensor) -> int:
    """The length of the longest document."""
    longest: int = mask.shape[2]
    return longest


def pattern_in(mask: Tensor) -> tuple[bool, int | None]:
    """Whether a token sees only earlier positions, and the size of its window, if any."""
    code = mask.shape[1] - 1
    return code % 2 == 0, code // 2 or None


def split_at_chunks(given: Tensor, chunk: int, tokens: int) -> Tensor:
    """Split every document of a row of at most `tokens` into pieces of `chunk` tokens; no synchronization."""
    borders = given[0, 0, 0, 0]
    places = torch.arange(tokens, device=borders.device, dtype=torch.int32)
    document = torch.searchsorted(borders.contiguous(), places, right=True) - 1
    begins = (places - borders[document]) % chunk == 0
    end = borders[-1]
    cuts = torch.where(begins & (places < end), places, end)
    most = borders.shape[0] + tokens // chunk
    pieces = torch.cat([cuts.sort().values[: most - 1], end.expand(max(1, most - tokens))])
    return as_given(pieces, min(given.shape[3], chunk))
