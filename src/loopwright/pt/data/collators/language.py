"""Collators that derive the labels of a language model from its inputs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....errors import ArgumentsError, DataError
from .padding import pad
from .stacking import IGNORED, DataCollatorMixin, as_list


@dataclass
class DataCollatorForLanguageModeling(DataCollatorMixin):
    """Pad inputs and derive labels: masked language modelling, or with `mlm=False` a copy of the inputs.

    Masked tokens are replaced by the mask token, by a random one, or kept, with the given probabilities; the label of
    every other token is -100. `whole_word_mask` needs samples with `offset_mapping`. With `seed` the collator has a
    separate random generator, one per data loader worker.
    """

    tokenizer: Any
    mlm: bool = True
    whole_word_mask: bool = False
    mlm_probability: float | None = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"
    seed: int | None = None

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ArgumentsError(problems)
        self._streams: dict[int, torch.Generator] = {}
        if self.whole_word_mask:  # random replacement would split words
            self.mask_replace_prob, self.random_replace_prob = 1.0, 0.0

    def _problems(self) -> list[str]:
        shares = ("mlm_probability", "mask_replace_prob", "random_replace_prob") if self.mlm else ()
        problems = [
            f"{name}={getattr(self, name)}: a probability is between 0 and 1."
            for name in shares
            if getattr(self, name) is None or not 0 <= getattr(self, name) <= 1
        ]
        if self.mlm and self.tokenizer.mask_token is None:
            problems.append("This tokenizer has no mask token, which masked language modeling needs; pass mlm=False.")
        if self.whole_word_mask and not self.mlm:
            problems.append("whole_word_mask=True needs masked language modeling; pass mlm=True.")
        if self.mask_replace_prob + self.random_replace_prob > 1:
            problems.append("mask_replace_prob and random_replace_prob together exceed 1.")
        return problems

    def _collate(self, features: list[Any], kind: str) -> Any:
        features, offsets = _split_offsets(features)
        batch = self._padded(features)
        special = batch.pop("special_tokens_mask", None)
        if self.mlm:
            batch["input_ids"], batch["labels"] = self._masked(batch["input_ids"], special, offsets)
        else:
            batch["labels"] = self._copied(batch["input_ids"])
        if kind == "np":
            batch.update({key: value.numpy() for key, value in batch.items()})
        return batch

    def _masked(self, inputs: torch.Tensor, special: Any, offsets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.whole_word_mask:  # older subclasses accept only two arguments
            return self.torch_mask_tokens(inputs, special_tokens_mask=special)
        if offsets is None:
            raise DataError(
                "whole_word_mask=True needs the column 'offset_mapping' to find word boundaries. Tokenize with "
                "return_offsets_mapping=True and keep the column (remove_unused_columns=False)."
            )
        return self.torch_mask_tokens(inputs, special_tokens_mask=special, offset_mapping=offsets)

    def _padded(self, features: list[Any]) -> Any:
        if isinstance(features[0], Mapping):
            return pad(self.tokenizer, features, pad_to_multiple_of=self.pad_to_multiple_of, return_tensors="pt")
        rows = [as_list(feature) for feature in features]
        if len({len(row) for row in rows}) == 1 and len(rows[0]) % (self.pad_to_multiple_of or 1) == 0:
            return {"input_ids": torch.tensor(rows)}  # also for tokenizers without a padding token
        return {"input_ids": self._padded([{"input_ids": row} for row in rows])["input_ids"]}

    def _copied(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.tokenizer.pad_token_id is None:
            return inputs.clone()
        return inputs.masked_fill(inputs == self.tokenizer.pad_token_id, IGNORED)

    def torch_mask_tokens(
        self, inputs: torch.Tensor, special_tokens_mask: Any = None, offset_mapping: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs with some tokens replaced, and labels with the original tokens."""
        special = self._special(inputs) if special_tokens_mask is None else special_tokens_mask.bool()
        draws = self._draw(inputs.shape)
        if offset_mapping is not None:
            words = _word_numbers(offset_mapping, special, self.tokenizer.padding_side)
            draws = draws.gather(1, words)  # all tokens of a word use the same draw
        chosen = (draws < self.mlm_probability) & ~special
        fate = self._draw(inputs.shape)
        to_mask = chosen & (fate < self.mask_replace_prob)
        to_random = chosen & ~to_mask & (fate < self.mask_replace_prob + self.random_replace_prob)
        replaced = inputs.masked_fill(to_mask, self.tokenizer.convert_tokens_to_ids(self.tokenizer.mask_token))
        anything = (self._draw(inputs.shape) * len(self.tokenizer)).to(inputs.dtype)
        return torch.where(to_random, anything, replaced), inputs.masked_fill(~chosen, IGNORED)

    def _special(self, inputs: torch.Tensor) -> torch.Tensor:
        mark = self.tokenizer.get_special_tokens_mask
        return torch.tensor([mark(row, already_has_special_tokens=True) for row in inputs.tolist()]).bool()

    def _draw(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.rand(tuple(shape), generator=None if self.seed is None else self._stream(self.seed))

    def _stream(self, seed: int) -> torch.Generator:
        worker = torch.utils.data.get_worker_info()
        number = worker.id if worker else 0
        # Keyed by process: a forked worker must not continue its parent's generator.
        key = os.getpid()
        if key not in self._streams:
            self._streams[key] = torch.Generator().manual_seed(seed + number)
        return self._streams[key]


@dataclass
class DataCollatorForWholeWordMask(DataCollatorForLanguageModeling):
    """`DataCollatorForLanguageModeling` with `whole_word_mask=True`."""

    whole_word_mask: bool = True


def _split_offsets(features: list[Any]) -> tuple[list[Any], list[Any] | None]:
    """The features without `offset_mapping`, which tokenizers do not pad, and the offsets."""
    if not isinstance(features[0], Mapping) or "offset_mapping" not in features[0]:
        return features, None
    offsets = [as_list(feature["offset_mapping"]) for feature in features]
    return [{key: feature[key] for key in feature if key != "offset_mapping"} for feature in features], offsets


def _word_numbers(offsets: list[Any], special: torch.Tensor, side: str) -> torch.Tensor:
    """The index of each token's word in its row; a token that starts where the last one ends is in the same word."""
    numbers = torch.zeros(special.shape, dtype=torch.int64)
    for row, (spans, flags) in enumerate(zip(offsets, special.tolist(), strict=True)):
        first = special.shape[1] - len(spans) if side == "left" else 0
        number, end = 0, None
        for column, (start, stop) in enumerate(spans, start=first):
            number += start != end
            numbers[row, column] = number - 1
            end = None if flags[column] else stop
    return numbers
