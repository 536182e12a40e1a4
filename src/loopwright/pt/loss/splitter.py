"""Splitting a batch along its samples, and joining batches of one sample; only per-sample values are split."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.static_shapes import FILLERS, IGNORED, MASKABLE
from .targets import count_samples

BY_SAMPLE = frozenset(
    {
        "input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask", "inputs_embeds",
        "position_ids", "special_tokens_mask", "global_attention_mask", "start_positions", "end_positions", "labels",
        "label", "label_ids", "shift_labels", "input_values", "input_features",
    }
)  # fmt: skip
"""Model inputs that have one row per sample."""
IMAGE_LIKE = ("pixel", "image", "video", "patch", "crop", "audio", "vision")
"""Next to text, these have a row per image or patch; that number may equal the number of samples by coincidence."""
OF_ROWS = ("cu_seq", "cu_", "_thw", "seq_idx", "spatial_shapes")
"""Names of entries that describe the rows of the batch as a whole."""
ODD_NAMES = ("weight", "class", "prior", "table", "matrix", "vocab", "graph", "edge", "anchor", "codebook")
"""Names of entries that belong to no single sample."""
CUT, WHOLE, UNSAFE = "cut", "whole", "unsafe"

Path = tuple[Any, ...]


class CannotSplit(Exception):
    """A batch has an entry that may or may not have one row per sample."""


ENOUGH = 8
"""Samples of a batch of which half are just as informative: fewer may not show how a loss couples samples."""
ENOUGH_PLACES = 2048
"""Rows times columns of a batch below which it is not made smaller again."""
SHORTEST, FIRST, ALL = "shortest", "first", "all"
"""What `half_of` gives: the half with the shortest rows, without their common padding; the first half; all samples."""


class BatchSplitter:
    """Infers which entries of batches have one row per sample: by name, from several batch sizes, or from two samples.

    `two_samples` returns batches of one sample, of another, and of both, for entries that names and sizes leave open: a
    per-sample row is the same in the batch of its sample.
    """

    def __init__(
        self,
        label_names: list[str] | None = None,
        *,
        image_token: int | None = None,
        has_images_in_text: bool = True,
        two_samples: Callable[[], tuple[Any, Any, Any] | None] | None = None,
    ) -> None:
        self._names = BY_SAMPLE | set(label_names or ())
        self._image_token, self._two_samples = image_token, two_samples
        self._has_images_in_text = has_images_in_text
        self._seen: dict[Path, dict[int, int]] = {}
        self._proved: dict[Path, bool] = {}
        """Whether an entry has one row per sample, where that was tested."""
        self._asked = False
        self._half = SHORTEST
        """What `half_of` gives."""

    def see(self, batch: Any) -> None:
        """Record the length of every entry of a batch of this size."""
        size = count_samples(batch)
        for path, value in _entries(batch):
            length = _length(value)
            if length is not None:
                self._seen.setdefault(path, {}).setdefault(size, length)

    def why_whole(self, batch: Any) -> str | None:
        """Why a batch cannot be split, or None if it can."""
        try:
            self._plan(batch)
        except CannotSplit as reason:
            return str(reason)
        return None

    def split(self, batch: Any, sizes: list[int]) -> list[Any]:
        """The batch in parts of these sizes; raises `CannotSplit`."""
        how, size, start, pieces = self._plan(batch), count_samples(batch), 0, []
        for each in sizes:
            pieces.append(_piece(batch, how, start, min(start + each, size)))
            start += each
        return pieces

    def split_all(self, batches: list[Any], parts: int) -> list[Any]:
        """Every batch in up to `parts` parts; raises `CannotSplit`."""
        pieces = []
        for batch in batches:
            size = count_samples(batch)
            step = max(-(-size // parts), 1)
            pieces += self.split(batch, [min(step, size - start) for start in range(0, max(size, 1), step)])
        return pieces

    @contextmanager
    def halving(self, half: str) -> Iterator[None]:
        """A context in which `half_of` gives this instead of the shortest half."""
        self._half = half
        try:
            yield
        finally:
            self._half = SHORTEST

    def half_of(self, batch: Any) -> Any:
        """Half of a batch's samples, or fewer; all of them if they are few or cannot be split.

        In single precision they take the memory that all of them take in half precision, and short ones less time.
        """
        if count_samples(batch) < ENOUGH or self._half == ALL:
            return batch
        try:
            if self._half == FIRST:
                return self.split_all([batch], 2)[0]
            half = self._shortest_half(batch)
        except CannotSplit:
            return batch
        return self.half_of(half) if places_in(half) > ENOUGH_PLACES else half

    def _shortest_half(self, batch: Any) -> Any:
        """Half of the samples, beside each other, whose longest is the shortest, without common padding."""
        how, size, lengths = self._plan(batch), count_samples(batch), row_lengths(batch)
        half, start = size // 2, 0
        if lengths is not None:
            windows = [lengths[begin : begin + half] for begin in range(size - half + 1)]
            # Samples of one length fit every denominator.
            start = min(range(len(windows)), key=lambda begin: (len(set(windows[begin])) == 1, max(windows[begin])))
        return without_common_padding(_piece(batch, how, start, start + half), self._names)

    # ---- deciding ---------------------------------------------------------------------------------------------------

    def _plan(self, batch: Any) -> dict[Path, str]:
        self.see(batch)
        size = count_samples(batch)
        how = {path: self._verdict(path, value, size, batch) for path, value in _entries(batch)}
        if UNSAFE in how.values() and self._ask_for_two():
            how = {path: self._verdict(path, value, size, batch) for path, value in _entries(batch)}
        unsafe = [path for path, verdict in how.items() if verdict == UNSAFE]
        if unsafe:
            name, length = ".".join(map(str, unsafe[0])), self._seen.get(unsafe[0], {}).get(size)
            raise CannotSplit(
                f"the batch has {size} samples but {name!r} has {length} rows, which may not be one per sample"
            )
        return how

    def _ask_for_two(self) -> bool:
        """Compare the rows of a batch of two samples with batches of one."""
        if self._asked or self._two_samples is None:
            return False
        self._asked = True
        found = self._two_samples()
        if found is None or [count_samples(each) for each in found] != [1, 1, 2]:
            return False
        first, second, both = (dict(_entries(each)) for each in found)
        for path, value in both.items():
            if path in first and path in second:
                lengths = [_length(each) for each in (first[path], second[path], value)]
                rows = lengths == [1, 1, 2] and _is_row(first[path], value[0]) and _is_row(second[path], value[1])
                self._proved[path] = rows
                if not rows and lengths[0] != 1:
                    self.see(found[0])
        return True

    def _verdict(self, path: Path, value: Any, size: int, batch: Any) -> str:
        length, name = _length(value), str(path[-1]) if path else ""
        about_rows = self._is_about_rows(path, batch)
        if length is None or (length == 1 and size > 1 and not about_rows):
            return WHOLE
        seen = self._seen[path]
        if len(seen) > 1 and any(each != of for of, each in seen.items()):
            return WHOLE if len(set(seen.values())) == 1 and not about_rows else UNSAFE
        if length != size:
            return UNSAFE if about_rows or name in self._names else WHOLE
        if about_rows:
            may_cut = self._has_an_image_each(batch, path) and not _has(name, OF_ROWS)
            return CUT if may_cut else UNSAFE
        if (name in self._names or "sample" in name) and not (name == "position_ids" and value.dim() > 2):
            return CUT
        if _is_odd(name, value, size):
            return CUT if self._proved.get(path, False) else UNSAFE
        return CUT if self._proved.get(path, True) else UNSAFE

    def _is_about_rows(self, path: Path, batch: Any) -> bool:
        """Whether an entry may have rows that are not samples: images next to text, starts of documents."""
        name = str(path[-1])
        beside_text = isinstance(batch, Mapping) and "input_ids" in batch
        return _has(name, OF_ROWS) or (beside_text and name not in self._names and _has(name, IMAGE_LIKE))

    def _has_an_image_each(self, batch: Any, path: Path) -> bool:
        """Whether images can be split by sample: equal image tokens per text, or text without images."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if self._image_token is None or not isinstance(ids, Tensor) or ids.dim() != 2:
            return not self._has_images_in_text and self._proved.get(path, False)
        counts = (ids == self._image_token).sum(-1)
        return bool(counts[0] > 0) and bool((counts == counts[0]).all())

    # ---- joining ----------------------------------------------------------------------------------------------------

    def join(self, batches: list[Any], *, may_ignore: bool, pad_token: int = 0) -> Any:
        """Batches joined to one, padded to the longest; None if that is not possible.

        With `may_ignore`, labels are padded with -100; otherwise all rows are truncated to the shortest.
        """
        if not all(isinstance(batch, Mapping) and batch.keys() == batches[0].keys() for batch in batches):
            return None
        joined = {}
        for name in batches[0]:
            values = [batch[name] for batch in batches]
            if not all(isinstance(value, Tensor) and value.dim() for value in values):
                if any(value is not values[0] and not _same(value, values[0]) for value in values):
                    return None
                joined[name] = values[0]
                continue
            if any(len(value) != count_samples(batch) for value, batch in zip(values, batches, strict=True)):
                return None
            widths = [value.shape[1] if value.dim() > 1 else 0 for value in values]
            width = max(widths) if may_ignore else min(widths)
            values = [_as_wide(value, width, _filler(name, pad_token)) for value in values]
            if len({value.shape[1:] for value in values}) > 1:
                return None
            joined[name] = torch.cat(values)
        return joined

    @staticmethod
    def widened(batch: Mapping[str, Any], like: Mapping[str, Any], *, pad_token: int) -> dict[str, Any]:
        """A batch padded to the length of another one."""
        return {
            name: _as_wide(value, like[name].shape[1], _filler(name, pad_token))
            if isinstance(value, Tensor) and value.dim() > 1 and isinstance(like.get(name), Tensor)
            else value
            for name, value in batch.items()
        }


def places_in(inputs: Any) -> int:
    """Rows times columns of the largest tensor, which the time of a forward depends on."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, (list, tuple)) else ()
    sizes = [value.shape[0] * value.shape[1] for value in values if isinstance(value, Tensor) and value.dim() > 1]
    return max(sizes, default=0)


def row_lengths(batch: Any) -> list[int] | None:
    """The tokens of each row by its mask; None without a mask on the host."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.device.type != "cpu":
        return None
    return [int(length) for length in mask.ne(0).sum(1)]


def without_common_padding(batch: Any, names: Collection[str]) -> Any:
    """A batch without the columns at its ends that are padding in all rows; unchanged where that is not clear.

    `names` are the entries known to have one column per token; any other with as many columns leaves all as they are.
    """
    if row_lengths(batch) is None:
        return batch
    mask = batch["attention_mask"]
    width, used = mask.shape[1], mask != 0
    wide = {name: value for name, value in batch.items() if isinstance(value, Tensor) and width in value.shape[1:]}
    if any(name not in names or width in value.shape[2:] or value.device.type != "cpu" for name, value in wide.items()):
        return batch
    for name in (name for name in wide if _is_label(name)):
        used = used | (wide[name].flatten(2).any(-1) if wide[name].dim() > 2 else wide[name] != IGNORED)
    columns = used.any(0).nonzero()
    if not len(columns):
        return batch
    first, last = int(columns[0]), int(columns[-1])
    return {name: value[:, first : last + 1] if name in wide else value for name, value in batch.items()}


def split_all(batches: list[Any], parts: int) -> list[Any]:
    """Every batch split into up to `parts` parts along its samples."""
    return BatchSplitter().split_all(batches, parts)


def _filler(name: str, pad_token: int) -> int:
    filler = FILLERS.get(name, IGNORED if _is_label(name) else 0)
    return pad_token if filler is None else filler


def _is_label(name: str) -> bool:
    return name in MASKABLE or "label" in name


def _same(a: Any, b: Any) -> bool:
    """Whether values are equal and have no rows: neither they nor what they contain are tensors or arrays."""
    if isinstance(a, (Tensor, np.ndarray)) or type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _as_wide(value: Tensor, new: int, filler: Any) -> Tensor:
    if value.dim() < 2 or value.shape[1] == new:
        return value
    if new < value.shape[1]:
        return value[:, :new]
    return F.pad(value, [0, 0] * (value.dim() - 2) + [0, new - value.shape[1]], value=filler)


def _is_row(alone: Any, row: Any) -> bool:
    """Whether the only row of one batch equals a row of another, except for padding."""
    if not isinstance(alone, Tensor):
        return isinstance(alone, (list, tuple)) and type(alone[0]) is type(row) and not isinstance(row, Tensor)
    alone = alone[0]
    if not isinstance(row, Tensor) or alone.dim() != row.dim():
        return False
    common = tuple(slice(0, min(a, b)) for a, b in zip(alone.shape, row.shape, strict=True))
    one, other = alone[common], row[common]
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())  # a sample may hold NaN


def _is_odd(name: str, value: Any, size: int) -> bool:
    """Whether a length equal to the number of samples may be a coincidence."""
    if isinstance(value, (list, tuple)):  # one per sample, or several tensors that each hold all samples?
        return all(isinstance(each, Tensor) and each.dim() and len(each) == size for each in value)
    square = value.dim() >= 2 and value.shape[1] == size and size > 1 and value.is_floating_point()
    return _has(name, ODD_NAMES) or square or (name == "position_ids" and value.dim() > 2)


def _has(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name.lower() for part in parts)


def _length(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else None
    return len(value) if isinstance(value, (list, tuple)) else None


def _entries(batch: Any) -> list[tuple[Path, Any]]:
    """Every value of a batch with its path; lists of the batch's length are one value."""
    if type(batch) in (list, tuple):  # a list of tensors: its length is unrelated to the batch size
        return [found for i, each in enumerate(batch) for found in _walk((i,), each, count_samples(batch))]
    return _walk((), batch, count_samples(batch))


def _walk(path: Path, value: Any, size: int) -> list[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        return [found for name, each in value.items() for found in _walk((*path, name), each, size)]
    if isinstance(value, (list, tuple)) and len(value) != size:
        return [found for i, each in enumerate(value) for found in _walk((*path, i), each, size)]
    return [(path, value)]


def _piece(batch: Any, how: dict[Path, str], start: int, stop: int) -> Any:
    def cut(path: Path, value: Any) -> Any:
        verdict = how.get(path)
        if verdict == CUT:
            return value[start:stop]
        if verdict is not None:
            return value
        if isinstance(value, Mapping):
            return {name: cut((*path, name), each) for name, each in value.items()}
        return type(value)(cut((*path, i), each) for i, each in enumerate(value))

    return cut((), batch)
