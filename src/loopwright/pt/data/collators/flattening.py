"""The collator that concatenates the sequences of a batch instead of padding them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

from .stacking import IGNORED, DefaultDataCollator, as_list, to_array


class DataCollatorWithFlattening(DefaultDataCollator):
    """Concatenate a batch into one sequence of shape (1, tokens), without padding; position ids restart in each.

    The first label of every sequence is `separator_id`, so that no sequence is predicted from the one before it.
    """

    def __init__(
        self,
        return_tensors: str = "pt",
        *,
        return_position_ids: bool = True,
        separator_id: int = IGNORED,
        return_flash_attn_kwargs: bool = False,
        return_seq_idx: bool = False,
        position_ids_start: int = 0,
    ) -> None:
        super().__init__(return_tensors)
        self.return_position_ids, self.position_ids_start = return_position_ids, position_ids_start
        self.return_flash_attn_kwargs, self.return_seq_idx = return_flash_attn_kwargs, return_seq_idx
        self.separator_id = separator_id

    def __call__(
        self, features: list[Any], return_tensors: str | None = None, separator_id: int | None = None
    ) -> dict[str, Any]:
        kind = return_tensors or self.return_tensors
        separator = self.separator_id if separator_id is None else separator_id
        rows = [as_list(feature["input_ids"]) for feature in features]
        labels = [as_list(each["labels"]) for each in features] if "labels" in features[0] else rows
        batch = {
            "input_ids": _flat(rows, kind),
            "labels": _flat([[separator, *label[1:]] for label in labels], kind),
        }
        return {**batch, **self._places([len(row) for row in rows], kind)}

    def _places(self, lengths: list[int], kind: str) -> dict[str, Any]:
        """The sequence boundaries, in the requested forms."""
        places: dict[str, Any] = {}
        if self.return_position_ids:
            start = self.position_ids_start
            places["position_ids"] = _flat([range(start, start + length) for length in lengths], kind)
        if self.return_seq_idx:
            places["seq_idx"] = _flat([[index] * length for index, length in enumerate(lengths)], kind, "int32")
        if self.return_flash_attn_kwargs:
            for side in ("q", "k"):
                places[f"cu_seq_lens_{side}"] = to_array([0, *accumulate(lengths)], kind, "int32")
                places[f"max_length_{side}"] = max(lengths)
        return places


def _flat(rows: Sequence[Iterable[int]], kind: str, dtype: str = "int64") -> Any:
    return to_array([list(chain.from_iterable(rows))], kind, dtype)
