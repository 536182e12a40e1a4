"""Counting the work of a run: tokens and floating point operations, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...core.update import Update
from ...core.user_code.overrides import adapt
from ..data.columns import innermost

WHOLE = (torch.int64, torch.int32)
"""Dtypes of token ids; other main inputs (pixels, sound) have no tokens."""


class TorchWorkCounter:
    """Counts operations and tokens of batches while they are in host memory."""

    def __init__(
        self, model: nn.Module, input_name: str, *, tokens: str | bool, operations: Callable[[Any], float] | None = None
    ) -> None:
        self._input = input_name
        self._tokens = tokens
        self._operations = operations
        self._per_token = operations_per_token(model)
        self.counts = True
        """Whether there is anything to count, as found in the first update."""
        self._has_tokens = False
        self.squares = False
        """Whether squared lengths are counted."""
        self.keeps_sample = False
        self.sample: Any = None
        """The first batch, kept while `keeps_sample` is set, for counting FLOPs."""

    def measure(self, update: Update) -> None:
        """Set the operations and tokens of an update."""
        batches = update.batches
        elements = self._count_tokens(update)
        if self._operations is not None:
            update.flos = sum(float(self._operations(batch)) for batch in batches)
        else:
            update.flos = float(self._per_token * elements)
        if self._tokens not in ("no", False):
            update.tokens = sum(map(self._seen, batches))
        if self.keeps_sample and self.sample is None and elements:
            self.sample = batches[0]
        self.counts = elements > 0 or self._operations is not None or self._tokens not in ("no", False)

    def _count_tokens(self, update: Update) -> int:
        """Set the update's tokens, if its batches have any; returns the elements of the main input."""
        elements = 0
        real: Any = 0
        squared: Any = 0
        for batch in update.batches:
            named = type(batch) is dict or isinstance(batch, Mapping)
            main = batch[self._input] if named and self._input in batch else None
            if not isinstance(main, Tensor):
                real = squared = math.nan
                continue
            elements += main.numel()
            more, squares = self._real(main, batch)
            real, squared = real + more, squared + squares
        update.real_tokens, update.squared_lengths = real, squared
        update.computed_tokens = elements if self._has_tokens else math.nan
        return elements

    def _real(self, main: Tensor, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        """Tokens without padding, and their squared lengths; host tensors are not read here."""
        self._has_tokens = main.dtype in WHOLE
        if not self._has_tokens:
            return math.nan, math.nan
        rows, length = (*main.shape, 1)[:2]
        mask = batch["attention_mask"] if "attention_mask" in batch else None
        if mask is None:  # packed samples have unknown lengths
            return rows * length, math.nan if "position_ids" in batch else rows * length * length
        if type(mask) is not Tensor or mask.shape != main.shape or mask.device.type != "cpu":
            return math.nan, math.nan
        mask = mask != 0 if mask.is_floating_point() else mask  # half precision cannot count far
        if not self.squares:
            return mask.sum(), math.nan
        lengths = mask.sum(-1)
        return lengths.sum(), (lengths * lengths).sum()

    def _seen(self, batch: Any) -> int:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if self._tokens == "non_padding" and isinstance(mask, Tensor):
            return int(mask.sum())
        return tokens_in(batch, self._input)


def tokens_in(batch: Any, input_name: str) -> int:
    """The elements of the main input."""
    main = batch.get(input_name) if isinstance(batch, Mapping) else None
    return main.numel() if isinstance(main, Tensor) else 0


def operations_per_token(model: nn.Module) -> int:
    """6 x parameters outside the embeddings, for models that can count them; else 0."""
    count = getattr(innermost(model), "num_parameters", None)
    return 6 * int(adapt(count, "exclude_embeddings")(exclude_embeddings=True)) if callable(count) else 0
