"""The samples of an update, extracted from the collator's batches.

A layout needs the length of each sample, the tensors with a token dimension, and those with one value per sample. All
of that is read from the collated batches, so any collator works.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

IGNORED = -100
SOME_PADDING = 8
SOURCE, TARGET = "source", "target"
DECODED = "decoder_input_ids"


class NoSamples(Exception):
    """The batches cannot be split into samples; the message gives the reason."""


class OddSamples(NoSamples):
    """These samples cannot be split, but those of another update may be."""


@dataclass
class Axis:
    """One token dimension: the whole sample, or the source or the target of a pair."""

    names: list[str]
    """The tensors with this dimension, (samples, tokens, ...)."""
    starts: np.ndarray
    ends: np.ndarray
    """Start and end of each sample's real tokens."""
    width: int

    @property
    def lengths(self) -> np.ndarray:
        found: np.ndarray = self.ends - self.starts
        return found

    @property
    def is_right_padded(self) -> bool:
        return not self.starts.any()


@dataclass
class Samples:
    """All samples of an update, in the order of the sampler."""

    tensors: dict[str, Tensor]
    axes: dict[str, Axis]
    constants: dict[str, Any]
    """Values that are equal in every batch and belong to no sample."""
    paddings: dict[str, float] = field(default_factory=dict)
    """The padding value of each tensor, if it was determined."""

    def __len__(self) -> int:
        return len(next(iter(self.axes.values())).starts)

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each sample; of a pair, those of source and target together."""
        found: np.ndarray = np.sum([axis.lengths for axis in self.axes.values()], axis=0)
        return found

    @property
    def real_tokens(self) -> int:
        return int(sum(axis.lengths.sum() for axis in self.axes.values()))

    def share_rows(self) -> bool:
        """Whether positions restart within rows without a mask, as in batches a collator has flattened."""
        axis, positions = self.axes[SOURCE], self.tensors.get("position_ids")
        if positions is None or positions.dim() != 2 or "attention_mask" in self.tensors:
            return False
        return "position_ids" in axis.names and bool((positions[:, 1:] - positions[:, :-1] != 1).any())

    def first_targets_are_counted(self) -> bool:
        """Whether the first token of a left-padded sample is a target, which only padding before it can predict."""
        axis, labels = self.axes[SOURCE], self.tensors.get("labels")
        if axis.is_right_padded or labels is None or "labels" not in axis.names or labels.dim() != 2:
            return False
        firsts = labels[torch.arange(len(self)), torch.from_numpy(axis.starts)]
        return bool((firsts[torch.from_numpy(axis.starts > 0)] != IGNORED).any())

    @property
    def squared_lengths(self) -> int:
        """The sum of squared lengths, to which the cost of attention is proportional."""
        return int(sum((axis.lengths.astype(np.int64) ** 2).sum() for axis in self.axes.values()))

    def per_sample(self) -> list[str]:
        """The tensors with one value (or one row without tokens) per sample."""
        along = {name for axis in self.axes.values() for name in axis.names}
        return [name for name in self.tensors if name not in along]

    def have_targets(self) -> np.ndarray:
        """Which samples have a target: nothing of the others is in the loss, so that comparing them shows nothing."""
        labels = self.tensors.get("labels")
        if labels is None or labels.is_floating_point():
            return np.ones(len(self), dtype=bool)
        found: np.ndarray = (labels != IGNORED).reshape(len(self), -1).any(1).numpy()
        return found

    def in_batches(self, places: Sequence[int], sizes: Sequence[int]) -> Samples:
        """The samples of some of the micro-batches, all of which have these numbers of samples."""
        ends = np.cumsum(sizes)
        rows = np.concatenate([np.arange(ends[place] - sizes[place], ends[place]) for place in places])
        return replace(self.select(rows), paddings=self.paddings)

    def longest_with_targets(self) -> int:
        """The index of the longest sample with targets; of the longest one if none has any."""
        lengths = self.lengths
        has = self.have_targets()
        return int(np.where(has, lengths, 0).argmax() if has.any() else lengths.argmax())

    def select(self, indices: np.ndarray) -> Samples:
        """The samples at these indices."""
        chosen = torch.from_numpy(indices)
        axes = {
            name: Axis(axis.names, axis.starts[indices], axis.ends[indices], axis.width)
            for name, axis in self.axes.items()
        }
        return Samples({name: value[chosen] for name, value in self.tensors.items()}, axes, self.constants)

    def between(self, start: int, stop: int) -> Samples:
        """Consecutive samples, as views of the same tensors."""
        rows = slice(start, stop)
        axes = {
            name: Axis(axis.names, axis.starts[rows], axis.ends[rows], axis.width) for name, axis in self.axes.items()
        }
        return Samples({name: value[rows] for name, value in self.tensors.items()}, axes, self.constants)

    def narrowed(self, indices: np.ndarray) -> Samples:
        """The samples at these indices; right-padded ones without the columns in which all of them are padding."""
        tensors: dict[str, Tensor] = {}
        axes: dict[str, Axis] = {}
        for key, axis in self.axes.items():
            width = int(axis.ends[indices].max()) if axis.is_right_padded else axis.width
            axes[key] = Axis(axis.names, axis.starts[indices], axis.ends[indices], width)
            tensors.update((name, self.tensors[name][:, :width]) for name in axis.names)
        chosen = torch.from_numpy(indices)
        kept = {name: tensors.get(name, value)[chosen] for name, value in self.tensors.items()}
        return Samples(kept, axes, self.constants)

    def trimmed(self, widths: Mapping[str, int] | None = None) -> dict[str, Any]:
        """One batch of all samples, as wide as the longest (or as `widths`, if that is wider)."""
        batch = dict(self.tensors)
        for key, axis in self.axes.items():
            low, high = self._window(axis, (widths or {}).get(key, 0))
            for name in axis.names:
                batch[name] = batch[name][:, low:high].contiguous()
        return {**batch, **self.constants}

    def padded(self) -> dict[str, Any]:
        """One batch of all samples, with some of the collator's padding beyond the longest sample."""
        longest = {key: int(axis.ends.max() - axis.starts.min()) for key, axis in self.axes.items()}
        return self.trimmed({key: min(self.axes[key].width, longest[key] + SOME_PADDING) for key in longest})

    @staticmethod
    def _window(axis: Axis, width: int) -> tuple[int, int]:
        low, high = int(axis.starts.min()), int(axis.ends.max())
        if high - low >= width:
            return low, high
        if axis.is_right_padded:
            return 0, min(width, axis.width)
        return max(0, axis.width - width), axis.width


def take_apart(
    batches: Sequence[Any], *, is_pair: bool, counts_trailing: bool = True, whole: Collection[str] = ()
) -> Samples:
    """The samples of these batches; raises `NoSamples` with the reason if they cannot be separated.

    `is_pair`: the batches hold sources and targets (of an encoder and a decoder). `counts_trailing`: without an
    attention mask every token is real; otherwise tokens after the last target are padding. `whole` are names of tensors
    without a token dimension, even if their width equals the number of tokens.
    """
    _check(batches)
    sizes = [rows_of(batch) for batch in batches]
    names = list(batches[0])
    constants = {name: batches[0][name] for name in names if not isinstance(batches[0][name], Tensor)}
    tensors = {name: [batch[name] for batch in batches] for name in names if name not in constants}
    for name, parts in tensors.items():
        if any(part.dim() == 0 or part.shape[0] != size for part, size in zip(parts, sizes, strict=True)):
            raise NoSamples(f"{name!r} does not have one row per sample")
    axes = {}
    joined: dict[str, Tensor] = {}
    for key, members in _members(tensors, is_pair, whole).items():
        width = max(part.shape[1] for part in tensors[members[0]])
        found = [_spans(batch, key, members, counts_trailing) for batch in batches]
        lefts = {bool(starts.any()) for starts, _, _ in found}
        if lefts == {True, False} and any((ends < size).any() for starts, ends, size in found if not starts.any()):
            raise OddSamples("some batches are left-padded and some right-padded")
        on_left = True in lefts
        joined.update(
            (name, _join(tensors[name], width, on_left, _padding_of(name, tensors[name], found))) for name in members
        )
        shifts = [width - size if on_left else 0 for _, _, size in found]
        axes[key] = Axis(
            members,
            np.concatenate([starts + shift for (starts, _, _), shift in zip(found, shifts, strict=True)]),
            np.concatenate([ends + shift for (_, ends, _), shift in zip(found, shifts, strict=True)]),
            width,
        )
    _check_positions(joined, axes[SOURCE])
    for name, parts in tensors.items():
        if name not in joined:
            if len({part.shape[1:] for part in parts}) > 1:
                raise NoSamples(f"{name!r} has a different shape in every batch")
            joined[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return Samples({name: joined[name] for name in names if name in joined}, axes, constants)


def _check(batches: Sequence[Any]) -> None:
    first = batches[0]
    if not isinstance(first, Mapping):
        raise NoSamples("the batches are not dicts")
    for batch in batches:
        if list(batch) != list(first):
            raise NoSamples("the batches have different keys")
        for name, value in batch.items():
            if isinstance(value, Tensor):
                if value.device.type != "cpu":
                    raise NoSamples("the batches are already on the device")
            elif value is not None and not isinstance(value, (bool, int, float, str)):
                raise NoSamples(f"{name!r} is a {type(value).__name__}, not a tensor")
            elif value != first[name]:
                raise NoSamples(f"{name!r} differs from batch to batch")


def place_of(sample: int, sizes: Sequence[int]) -> int:
    """The micro-batch of a sample, where all have these numbers of samples."""
    return int(np.searchsorted(np.cumsum(sizes), sample, side="right"))


def rows_of(batch: Mapping[str, Any]) -> int:
    """The samples of a batch; raises `NoSamples` if it holds no tensors."""
    for value in batch.values():
        if isinstance(value, Tensor) and value.dim():
            rows: int = value.shape[0]
            return rows
    raise NoSamples("the batches hold no tensors")


def _members(tensors: Mapping[str, list[Tensor]], is_pair: bool, whole: Collection[str]) -> dict[str, list[str]]:
    """The names of the tensors along each axis."""
    tensors = {name: parts for name, parts in tensors.items() if name not in whole}
    main = "attention_mask" if "attention_mask" in tensors else "input_ids"
    if main not in tensors or any(part.dim() != 2 for part in tensors[main]):
        raise NoSamples("there is no attention_mask of shape (samples, tokens)")
    members = {SOURCE: _along(tensors, main, lambda name: not (is_pair and _is_target(name)))}
    if is_pair:
        targets = [name for name in ("labels", DECODED) if name in tensors and tensors[name][0].dim() == 2]
        if not targets:
            raise NoSamples("there are no labels to infer the target lengths from")
        members[TARGET] = _along(tensors, targets[0], _is_target)
    return members


def _is_target(name: str) -> bool:
    return name == "labels" or name.startswith("decoder_")


def _along(tensors: Mapping[str, list[Tensor]], main: str, belongs: Any) -> list[str]:
    """The tensors whose second dimension equals that of the main tensor in every batch."""
    widths = [part.shape[1] for part in tensors[main]]
    found = [main]
    for name, parts in tensors.items():
        if not belongs(name) or name == main or _are_features(name, parts, tensors[main]):
            continue
        runs = [part.dim() > 1 and part.shape[1] == width for part, width in zip(parts, widths, strict=True)]
        elsewhere = [width > 1 and width in part.shape[2:] for part, width in zip(parts, widths, strict=True)]
        if all(runs) and not all(elsewhere):
            found.append(name)
        elif any(elsewhere):
            raise NoSamples(f"{name!r} has its tokens along a dimension other than the second")
    return found


def _are_features(name: str, parts: list[Tensor], main: list[Tensor]) -> bool:
    """Whether a float tensor holds features per sample, whose number may equal that of the tokens: class scores in
    `labels`, or values that differ within the padding.
    """
    if not parts[0].is_floating_point() or parts[0].dim() != 2:
        return False
    paddings = [
        part[mask == 0] for part, mask in zip(parts, main, strict=True) if part.shape == mask.shape and name != "labels"
    ]
    return name == "labels" or any(bool((values != values[:1]).any()) for values in paddings)


def _spans(
    batch: Mapping[str, Tensor], key: str, members: list[str], counts_trailing: bool
) -> tuple[np.ndarray, np.ndarray, int]:
    """Start and end of the real tokens of every sample of a batch, and the width of the batch."""
    real = _real(batch, key, members, counts_trailing)
    size = real.shape[1]
    if not real.any(axis=1).all():
        raise OddSamples("a sample has no tokens")
    starts = real.argmax(axis=1)
    ends = size - real[:, ::-1].argmax(axis=1)
    if (real.sum(axis=1) != ends - starts).any():
        raise OddSamples("an attention_mask has gaps")
    if starts.any() and (ends < size).any():
        raise OddSamples("a batch is padded on both sides")
    return starts, ends, size


def _real(batch: Mapping[str, Tensor], key: str, members: list[str], counts_trailing: bool) -> np.ndarray:
    mask = batch.get("attention_mask" if key == SOURCE else "decoder_attention_mask")
    if mask is not None:
        return real_tokens(mask)
    labels = batch.get("labels")
    if key == TARGET or not counts_trailing:
        if labels is not None and members and "labels" in members:
            real = (labels != IGNORED).numpy()
            # Everything up to the last target is real: prompts have no targets.
            return np.maximum.accumulate(real[:, ::-1], axis=1)[:, ::-1]
    return np.ones(tuple(batch[members[0]].shape[:2]), dtype=bool)


def real_tokens(mask: Tensor) -> np.ndarray:
    """The real tokens of a mask of any dtype; raises `NoSamples` if it has values other than 0 and 1."""
    values = (mask.float() if mask.dtype is torch.bfloat16 else mask).numpy()
    real: np.ndarray = values != 0
    if np.count_nonzero(values == 1) != np.count_nonzero(real):
        raise NoSamples("an attention_mask has values other than 0 and 1")
    return real


def _check_positions(joined: Mapping[str, Tensor], axis: Axis) -> None:
    """Raise `OddSamples` if positions jump within a masked sample: without the mask they would start a new document."""
    if not {"position_ids", "attention_mask"} <= set(axis.names) or joined["position_ids"].dim() != 2:
        return
    places = np.arange(1, axis.width)
    inside = (places > axis.starts[:, None]) & (places < axis.ends[:, None])
    if (np.diff(joined["position_ids"].numpy(), axis=1)[inside] != 1).any():
        raise OddSamples("position_ids do not increase by one")


def _padding_of(name: str, parts: list[Tensor], found: list[Any]) -> Any:
    """The collator's padding value of this tensor, or the usual one if it has no padding."""
    for part, (starts, ends, size) in zip(parts, found, strict=True):
        on_right, on_left = np.flatnonzero(ends < size), np.flatnonzero(starts > 0)
        if on_right.size:
            value = part[int(on_right[0]), size - 1]
        elif on_left.size:
            value = part[int(on_left[0]), 0]
        else:
            continue
        return value.item() if value.dim() == 0 else 0
    return IGNORED if "labels" in name and not parts[0].is_floating_point() else 0


def _join(parts: list[Tensor], width: int, on_left: bool, padding: Any) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    total = sum(part.shape[0] for part in parts)
    joined = parts[0].new_full((total, width, *parts[0].shape[2:]), padding)
    row = 0
    for part in parts:
        place = joined[row : row + part.shape[0]]
        (place[:, width - part.shape[1] :] if on_left else place[:, : part.shape[1]]).copy_(part)
        row += part.shape[0]
    return joined


# ---- selecting a few samples ----------------------------------------------------------------------------------------


def few_of(samples: Samples, count: int, tokens: int) -> Samples:
    """A few samples of different lengths, the longest first, truncated to `tokens` if they are right-padded."""
    lengths = samples.lengths
    order = np.argsort(-lengths, kind="stable")
    places = np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))
    chosen = samples.select(order[places])
    return _shortened(chosen, tokens) if all(axis.is_right_padded for axis in chosen.axes.values()) else chosen


def _shortened(samples: Samples, tokens: int) -> Samples:
    """Truncate samples to their last tokens, which contain the answers, in proportion, so that lengths still differ."""
    tensors, axes = dict(samples.tensors), dict(samples.axes)
    for key, axis in samples.axes.items():
        longest = int(axis.lengths.max())
        if longest <= tokens:
            continue
        width = min(axis.width, tokens + SOME_PADDING)
        ends = np.maximum(np.minimum(axis.lengths, 2), axis.lengths * tokens // longest)
        for name in axis.names:
            whole = tensors[name]
            tensors[name] = whole.new_full((len(ends), width, *whole.shape[2:]), IGNORED if "label" in name else 0)
            for row, (length, kept) in enumerate(zip(axis.lengths, ends, strict=True)):
                tensors[name][row, :kept] = whole[row, length - kept : length]
        axes[key] = replace(axis, ends=ends, width=width)
    return Samples(tensors, axes, samples.constants)
