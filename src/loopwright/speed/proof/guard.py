"""Checks of every update: only padding is removed, and only inputs covered by a proof are regrouped.

All checks read host tensors before they are copied to the device, so no update waits for the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..layouts.samples import DECODED, IGNORED, Axis, OddSamples, Samples, take_apart

PER_SAMPLE = "sample"
POSITIONS = "position_ids"
INPUTS = ("input_ids", "attention_mask", POSITIONS, DECODED, "decoder_attention_mask")
"""Names of tensors in which a loss counts nothing."""
TEXT = ("input_ids", "attention_mask", "labels", "token_type_ids", DECODED, "decoder_attention_mask")
"""Names of tensors that always have a token dimension."""
IMAGE_WORDS = ("pixel", "image", "video", "audio", "patch", "grid", "frame")
"""Words in the names of tensors that may have several rows per sample, or none."""
STRETCH = 2
"""How much longer than the longest sample of an update samples may be without a comparison of real ones."""
NEAR = 4
"""Tokens at the beginning of a sample that may be predicted from the sample before it in a row."""


class UnevenPadding(OddSamples):
    """A tensor has more than one value in the padding, so its second dimension may not be tokens."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name!r} has more than one value in the padding")
        self.name = name


def samples_of(
    batches: Sequence[Any], *, is_pair: bool, shifts: bool, whole: Collection[str], image_tokens: tuple[int, ...]
) -> Samples:
    """The samples of an update, with only padding outside them; raises `NoSamples` if they cannot be separated.

    `whole` are names of tensors without a token dimension, even if their width equals the number of tokens.
    """
    uneven, counts_trailing = set(whole), not shifts
    while True:
        samples = take_apart(batches, is_pair=is_pair, counts_trailing=counts_trailing, whole=uneven)
        try:
            samples.paddings = check_padding(samples)
            break
        except UnevenPadding as reason:
            if reason.name not in TEXT:
                uneven.add(reason.name)  # as wide as the text by coincidence: not a token dimension
            elif not counts_trailing and "attention_mask" not in samples.tensors:
                counts_trailing = True  # tokens after the last target are not padding
            else:
                raise
    check_images(samples, image_tokens)
    return samples


def check_padding(samples: Samples) -> dict[str, float]:
    """The padding value of each tensor; raises `OddSamples` if the padding holds other values or targets."""
    found: dict[str, float] = {}
    for axis in samples.axes.values():
        padding = padding_of(axis)
        if not padding.any():
            continue
        for name in axis.names:
            if name == POSITIONS:
                continue  # positions in the padding may keep counting; they are never used
            values, inside = samples.tensors[name], padding
            if name == DECODED and "labels" in axis.names:
                inside = padding & ~_is_shifted(values, samples.tensors["labels"])
            if inside is padding or inside.any():
                found[name] = _padding_value(name, values, inside)
    return found


def _padding_value(name: str, values: Tensor, padding: np.ndarray) -> float:
    """The one value in the padding of a tensor."""
    array = (values.float() if values.dtype is torch.bfloat16 else values).numpy()
    value = array[np.unravel_index(int(padding.argmax()), padding.shape)].flat[0]
    # numpy instead of torch: this runs for every update, and torch's call overhead exceeds the comparison.
    unequal = array != value if array.ndim == 2 else (array != value).reshape(*array.shape[:2], -1).any(-1)
    if (unequal & padding).any():
        raise UnevenPadding(name)
    if "label" in name and not values.is_floating_point() and value != IGNORED:
        raise OddSamples(f"{name!r} has targets in the padding")
    return float(value)


def _is_shifted(inputs: Tensor, labels: Tensor) -> np.ndarray:
    """Where the input of a decoder is the label before it: of the last label, that is in the padding."""
    found = np.zeros(tuple(inputs.shape[:2]), dtype=bool)
    if inputs.dim() == labels.dim() == 2 and inputs.shape == labels.shape:
        found[:, 1:] = (inputs[:, 1:] == labels[:, :-1]).numpy()
    return found


def padding_of(axis: Axis) -> np.ndarray:
    """Mask of the positions of an axis that hold no real token, (samples, width)."""
    along = np.arange(axis.width)
    return (along < axis.starts[:, None]) | (along >= axis.ends[:, None])


def check_images(samples: Samples, image_tokens: tuple[int, ...]) -> None:
    """Raise `OddSamples` if a tensor may hold several images per sample, or none, so its rows have no clear sample."""
    doubtful = [name for name in samples.per_sample() if _may_be_images(name, samples.tensors[name])]
    if not doubtful:
        return
    ids = samples.tensors.get("input_ids")
    if ids is not None and image_tokens and not ids.is_floating_point():
        counts = torch.isin(ids, torch.tensor(image_tokens)).sum(1)
        if bool((counts > 0).all()) and bool((counts == counts[0]).all()):
            return
    raise OddSamples(f"it is not known which sample the rows of {doubtful[0]!r} belong to")


def _may_be_images(name: str, values: Tensor) -> bool:
    return values.dim() > 2 or any(word in name for word in IMAGE_WORDS)


def image_tokens_of(config: Any) -> tuple[int, ...]:
    """The token ids in a configuration that represent images, videos or audio."""
    found = [
        value
        for name, value in (vars(config) if hasattr(config, "__dict__") else {}).items()
        if name.endswith(("_token_id", "_token_index")) and any(word in name for word in IMAGE_WORDS)
    ]
    return tuple(value for value in found if isinstance(value, int))


@dataclass
class Seen:
    """Properties of updates that proofs have covered, as values a checkpoint can store."""

    entries: dict[str, list[Any]] = field(default_factory=dict)
    """For every tensor: its axis (or `PER_SAMPLE`), its dtype, and the remaining dimensions of its shape."""
    constants: dict[str, Any] = field(default_factory=dict)
    """Values that all samples share."""
    paddings: dict[str, list[float]] = field(default_factory=dict)
    """The padding values of every tensor."""
    sides: list[str] = field(default_factory=list)
    """The sides on which samples were padded: left, right."""
    shortest: dict[str, int] = field(default_factory=dict)
    longest: dict[str, int] = field(default_factory=dict)
    """The lengths of the shortest and of the longest sample, by axis."""
    ragged: bool = False
    """Whether samples had different lengths."""
    first_targets: dict[str, int] = field(default_factory=dict)
    """For labels, masks and weights of tokens: tokens before the first that counts, in any sample, at most `NEAR`."""
    without_targets: bool = False
    """Whether there were samples without any target."""
    row: int = 0
    """Tokens of the longest row."""
    stretched: dict[str, int] = field(default_factory=dict)
    """The length of the longest sample that was made from a shorter one, and compared with two others."""

    @classmethod
    def of(cls, samples: Samples, *, row: int) -> Seen:
        """The properties of one update."""
        axes = samples.axes
        kinds = {name: key for key, axis in axes.items() for name in axis.names}
        entries = {name: _described(kinds.get(name, PER_SAMPLE), value) for name, value in samples.tensors.items()}
        return cls(
            entries,
            dict(samples.constants),
            {name: [value] for name, value in samples.paddings.items()},
            sorted({side_of(axis) for axis in axes.values()} - {""}),
            {key: int(axis.lengths.min()) for key, axis in axes.items()},
            {key: int(axis.lengths.max()) for key, axis in axes.items()},
            any(bool((axis.lengths != axis.lengths[0]).any()) for axis in axes.values()),
            _first_targets(samples),
            not samples.have_targets().all(),
            row,
        )

    def form_differs(self, other: Seen) -> str | None:
        """Describes the first entry by which an update's form differs from this one; None if the forms are equal."""
        if set(other.entries) != set(self.entries):
            name = min(set(other.entries) ^ set(self.entries))
            return f"{name!r} {'is new' if name in other.entries else 'is missing'}"
        for name, entry in other.entries.items():
            if entry != self.entries[name]:
                return f"{name!r} has a different form"
        if other.constants != self.constants:
            return "a value shared by all samples has changed"
        return None

    def news_in(self, other: Seen) -> str | None:
        """Describes the first property of an update of the same form that no proof covers; None if all are covered."""
        for name, values in other.paddings.items():
            known = self.paddings.get(name, values)
            if not set(values) <= set(known):
                return f"{name!r} is padded with {values[0]:g}, not {known[0]:g}"
        if new := set(other.sides) - set(self.sides):
            return f"samples are padded on the {min(new)}"
        return self._news_of_lengths(other)

    def _news_of_lengths(self, other: Seen) -> str | None:
        for key, longest in other.longest.items():
            if longest > self.longest[key]:
                return f"a sample has {longest:,} tokens, more than the {self.longest[key]:,} compared so far"
            if other.shortest[key] < self.shortest[key]:
                return f"a sample has {other.shortest[key]:,} tokens, fewer than the {self.shortest[key]:,} so far"
        if other.ragged and not self.ragged:
            return "samples have different lengths"
        for name, place in other.first_targets.items():
            if place < self.first_targets.get(name, NEAR):
                return f"the first token of a sample that counts in {name!r} is number {place + 1}"
        if other.without_targets and not self.without_targets:
            return "a sample has no targets"
        if other.row > self.row:
            return f"a row has {other.row:,} tokens, more than the {self.row:,} compared so far"
        return None

    def cover(self, shortest: Mapping[str, int], longest: Mapping[str, int], real: Mapping[str, int]) -> None:
        """Extend the covered lengths by those of samples that were made, to `STRETCH` times the longest real one."""
        for key, length in longest.items():
            self.stretched[key] = max(self.stretched.get(key, 0), length)
            self.longest[key] = max(self.longest[key], min(length, STRETCH * real[key]))
            self.shortest[key] = min(self.shortest[key], shortest[key])

    def add(self, other: Seen) -> None:
        """Merge the properties covered by another proof."""
        for name, values in other.paddings.items():
            self.paddings[name] = sorted({*self.paddings.get(name, ()), *values})
        self.sides = sorted({*self.sides, *other.sides})
        for key, longest in other.longest.items():
            self.longest[key] = max(self.longest.get(key, 0), longest)
            self.shortest[key] = min(self.shortest.get(key, longest), other.shortest[key])
            self.stretched[key] = max(self.stretched.get(key, 0), other.stretched.get(key, 0))
        self.ragged |= other.ragged
        for name, place in other.first_targets.items():
            self.first_targets[name] = min(self.first_targets.get(name, NEAR), place)
        self.without_targets |= other.without_targets
        self.row = max(self.row, other.row)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Seen:
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})


class Coverage:
    """Everything covered by the proofs of a run: one `Seen` for every form of update."""

    def __init__(self) -> None:
        self.forms: list[Seen] = []

    def news_in(self, update: Seen) -> str | None:
        """Describes what is new about an update; None if proofs cover it."""
        if not self.forms:
            return "no such step was compared"
        for form in self.forms:
            if form.form_differs(update) is None:
                return form.news_in(update)
        return self.forms[0].form_differs(update)

    def with_new_lengths(self, update: Seen) -> Seen | None:
        """The covered form of an update in which nothing is new but lengths of samples; None if there is none."""
        for form in self.forms:
            if form.form_differs(update) is None:
                usual = replace(update, shortest=dict(form.shortest), longest=dict(form.longest))
                return form if form.news_in(usual) is None else None
        return None

    def add(self, update: Seen) -> None:
        for form in self.forms:
            if form.form_differs(update) is None:
                form.add(update)
                return
        self.forms.append(update)

    def as_list(self) -> list[dict[str, Any]]:
        return [asdict(form) for form in self.forms]

    def load(self, forms: list[dict[str, Any]]) -> None:
        self.forms = [Seen.from_dict(form) for form in forms]


def side_of(axis: Axis) -> str:
    if int(axis.lengths.min()) == axis.width:
        return ""
    return "right" if axis.is_right_padded else "left"


def _described(kind: str, value: Tensor) -> list[Any]:
    return [kind, str(value.dtype), list(value.shape[1 if kind == PER_SAMPLE else 2 :])]


def _first_targets(samples: Samples) -> dict[str, int]:
    """Tokens before the first that counts: where samples share a row, a loss may count it for the sample before."""
    found = {}
    for axis in samples.axes.values():
        near = np.minimum(np.arange(NEAR), axis.lengths[:, None] - 1)
        rows, places = np.arange(len(samples))[:, None], axis.starts[:, None] + near
        for name in axis.names:
            if name not in INPUTS:
                values = samples.tensors[name]
                array = (values.float() if values.dtype is torch.bfloat16 else values).numpy()[rows, places]
                is_class = "label" in name and not values.is_floating_point()
                counts = (array != IGNORED) if is_class else (array != IGNORED) & (array != 0)
                some = counts.swapaxes(0, 1).reshape(NEAR, -1).any(1)
                found[name] = int(some.argmax()) if some.any() else NEAR
    return found
