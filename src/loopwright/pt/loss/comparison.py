"""Inferring the denominator of a loss: the loss of a batch compared with the losses of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...speed.memory.out_of_memory import is_out_of_memory
from ..data.static_shapes import IGNORED
from .denominator import NOTHING, Denominator
from .probe import ANOTHER_SEED, LossProbe, Measured
from .splitter import BatchSplitter, CannotSplit, places_in, split_all
from .targets import count_samples, count_targets, find_targets

MANY = 64
"""Most samples that are counted one at a time to find the best split."""
ENOUGH_TOKENS = 16_384
"""Tokens sufficient to identify a loss; the logits of a very long row would need more memory than training it."""
JOINED = 3
"""Batches of one sample that are joined to have something to split."""

Pieces = list[tuple[Any, list[Any]]]
"""Batches, each with its parts."""


SINGLE = 1e-6
"""Relative rounding error of a loss in single precision."""
LOW_MEMORY_MODES = ((False, False), (True, False), (True, True))
"""Whether half precision is allowed, and whether gradients are kept: modes for losses of all samples, tried in order.

Half precision comes second: it could hide a small part of a loss that compares samples. A loss may need gradients
itself, so the last mode keeps them.
"""
FEW_PLACES = 8192
"""Positions of a batch up to which all of it is used; of a larger one, some samples are used."""


@dataclass
class Equation:
    """The loss of a batch and the losses of its parts."""

    whole: Measured
    parts: list[Measured]
    batches: list[Any]

    @property
    def is_informative(self) -> bool:
        """Whether it distinguishes denominators: a loss of zero without a gradient fits all of them."""
        gradient = self.whole.gradient
        moves = gradient is not None and bool(gradient.any())
        return self.whole.is_defined and (self.whole.value != 0 or moves)

    def fits(self, by: Denominator, label_names: list[str], probe: LossProbe) -> bool:
        """Whether loss, count and gradient of the batch follow from those of the parts."""
        predicted = self._predicted(by, label_names)
        if predicted is None:
            return not self.whole.is_defined
        defined = [part for part in self.parts if part.is_defined]
        if not probe.close(predicted.value, self.whole.value, max(abs(part.value) for part in defined)):
            return False
        if predicted.count is not None and not probe.close(predicted.count, self.whole.count or 0.0):
            return False
        return probe.alike(predicted.gradient, self.whole.gradient, *(part.gradient for part in defined))

    def has_loss_without_items(self, label_names: list[str]) -> bool:
        """Whether a part without any counted label has a loss anyway."""
        for batch, part in zip(self.batches, self.parts, strict=True):
            count = count_targets(batch, label_names, shifted=False)
            if count is not None and int(count) == 0 and part.is_defined and part.value:
                return True
        return False

    def _predicted(self, by: Denominator, label_names: list[str]) -> Measured | None:
        """The loss of the batch computed from those of the parts; None if it would be undefined."""
        counts = [by.count(batch, label_names) for batch in self.batches]
        if any(count is None for count in counts):
            return None
        weights = [float(count) for count in counts]
        total = 1.0 if by.what == NOTHING else sum(weights)
        terms = [(weight / total, part) for weight, part in zip(weights, self.parts, strict=True) if weight and total]
        if not terms or not all(part.is_defined for _, part in terms):
            return None
        gradient = None
        if all(part.gradient is not None for _, part in terms):
            gradient = torch.stack([share * part.gradient for share, part in terms]).sum(0)  # type: ignore[operator]
        counted = [part.count for _, part in terms if part.count is not None]
        value = sum(share * part.value for share, part in terms)
        return Measured(value, sum(counted) if counted else None, gradient)


@dataclass
class Finding:
    """The result of a comparison."""

    rivals: tuple[Denominator, ...] = ()
    """Denominators that fit; several if the batch does not distinguish them."""
    is_informative: bool = True
    draws: bool = False
    """Whether the loss changes with the seed."""
    counts_empty: bool = False
    """Whether a part without items had a loss."""


def find_denominators(
    probe: LossProbe,
    pieces: Pieces,
    wanted: list[Denominator],
    *,
    label_names: list[str],
    items_of: Callable[[Any], Any],
    check_seed: bool = True,
) -> Finding:
    """Find the denominators for which the losses of the parts give the loss of the batch."""
    whole = probe.measure(pieces[0][0], items_of(pieces[0][0]))
    if check_seed:
        again = probe.measure(pieces[0][0], items_of(pieces[0][0]), seed=ANOTHER_SEED)
        if not probe.close(whole.value, again.value) and (whole.is_defined or again.is_defined):
            return Finding(draws=True)
        if not probe.alike(whole.gradient, again.gradient):
            return Finding(draws=True)
    equations = []
    for batch, parts in pieces:
        first = whole if batch is pieces[0][0] else probe.measure(batch, items_of(batch))
        equations.append(Equation(first, [probe.measure(part, items_of(part)) for part in parts], parts))
    equations = [equation for equation in equations if equation.is_informative]
    if not equations:
        return Finding(tuple(wanted), is_informative=False)
    fitting = [by for by in wanted if all(each.fits(by, label_names, probe) for each in equations)]
    empty = any(each.has_loss_without_items(label_names) for each in equations)
    return Finding(tuple(fitting), counts_empty=empty)


def fitting_all(
    probe: LossProbe,
    pieces: tuple[Any, list[Any]],
    assumed: tuple[Denominator, ...],
    *,
    label_names: list[str],
    items_of: Callable[[Any], Any],
    is_joined: bool,
) -> tuple[Denominator, ...]:
    """Those of the assumed denominators that fit a batch and its parts; all of them if it is not informative.

    This needs no more memory than training: without gradients, one micro-batch fits in single precision, and joined
    ones fit in the precision of training.
    """
    whole, parts = pieces
    for in_half, keeps_graph in LOW_MEMORY_MODES[is_joined:]:
        try:
            with probe.in_less_memory(in_half=in_half, keeps_graph=keeps_graph), probe.trying():
                found = [probe.measure(each, items_of(each), with_gradient=False) for each in (whole, *parts)]
                equation = Equation(found[0], found[1:], parts)
                fitting = tuple(by for by in assumed if equation.fits(by, label_names, probe))
            return fitting if equation.is_informative else assumed
        except Exception:  # any error of the user's loss: what is known stays
            continue
    return assumed


def pieces_of(
    batches: list[Any],
    splitter: BatchSplitter,
    label_names: list[str],
    *,
    rivals: tuple[Denominator, ...],
    may_ignore: bool,
    pad_token: int,
) -> Pieces:
    """A batch split in two, at two positions; batches of one sample are joined first. Raises `CannotSplit`."""
    first, size = batches[0], count_samples(batches[0])
    cuts = _cuts(first, size, splitter, label_names, rivals) if size > 1 else []
    if size == 1 or (cuts[0][0] == 0 and len(batches) > 1):  # not informative without another batch
        alike = [batch for batch in batches[1:] if count_samples(batch) == 1] if size == 1 else []
        alike = alike or batches[1:2]
        # Half of each, if they have many samples: together they take the memory of one micro-batch.
        halves = [splitter.half_of(batch) for batch in [first, *alike[: JOINED - 1]]]
        joined = splitter.join(halves, may_ignore=may_ignore, pad_token=pad_token)
        if joined is not None and count_samples(joined) > count_samples(halves[0]):
            first, size = joined, count_samples(joined)
            cuts = _cuts(first, size, splitter, label_names, rivals)
        elif size == 1:
            raise CannotSplit("micro-batches have one sample each and cannot be joined")
    pieces = [(first, splitter.split(first, [cut, size - cut])) for _, cut in cuts]
    if first is batches[0] and len(batches) > 1 and places_in(first) + places_in(batches[1]) <= FEW_PLACES:
        halves = [splitter.half_of(batch) for batch in batches[:2]]
        size, both = count_samples(halves[0]), splitter.join(halves, may_ignore=may_ignore, pad_token=pad_token)
        if both is not None and count_samples(both) > size:  # the split in question
            pieces.append((both, splitter.split(both, [size, count_samples(both) - size])))
    return pieces


def part_of(inputs: Any, label_names: list[str]) -> Any:
    """About ENOUGH_TOKENS tokens of a batch: a few of its rows, or the end of the targets of its only row."""
    targets = find_targets(inputs, label_names)
    if targets is None or targets.dim() != 2 or targets.numel() <= ENOUGH_TOKENS:
        return inputs
    if len(targets) > 1:
        try:
            half = split_all([inputs], 2)[0]
        except CannotSplit:
            return inputs
        fewer = find_targets(half, label_names)
        is_less = fewer is not None and len(fewer) < len(targets)
        return part_of(half, label_names) if is_less else inputs
    width, counted = targets.shape[1], (targets[0] != IGNORED).nonzero()
    tensors = [value for value in inputs.values() if isinstance(value, Tensor) and value.dim()]
    if any(width in value.shape[2:] or len(value) != 1 for value in tensors):
        return inputs  # for example a token-by-token mask, or the starts of documents in a row
    end = max(int(counted.max()) + 1, ENOUGH_TOKENS) if len(counted) else width

    def cut(value: Any) -> Any:
        is_along = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == width
        return value[:, end - ENOUGH_TOKENS : end] if is_along else value

    return {name: cut(value) for name, value in inputs.items()}


def rows_of(inputs: Any, label_names: list[str]) -> Any:
    """A few complete rows of a batch, at least two, for a comparison."""
    if places_in(inputs) <= FEW_PLACES or count_samples(inputs) < 8:
        return inputs
    try:
        half = split_all([inputs], 2)[0]
    except CannotSplit:
        return inputs
    return rows_of(half, label_names) if count_samples(half) < count_samples(inputs) else inputs


def padding_is_neutral(
    batches: list[Any], joined: Any, probe: LossProbe, *, items_of: Callable[[Any], Any], pad_token: int
) -> bool:
    """Whether padding a batch to the width of the joined one leaves its loss unchanged."""
    wide = _widths(joined)
    narrower = [batch for batch in batches if _widths(batch) != wide and _is_narrower(_widths(batch), wide)]
    short = narrower[0] if narrower else None
    if short is None or not isinstance(short, Mapping):
        return True
    padded = BatchSplitter.widened(short, joined, pad_token=pad_token)
    try:
        found = [probe.measure(each, items_of(each), with_gradient=False).value for each in (dict(short), padded)]
    except Exception as error:  # a model that fails on the padded batch shows that padding matters
        if is_out_of_memory(error):
            raise
        return False
    # Models in double precision may compute attention in single precision, whose rounding depends on the padding.
    return probe.close(*found) or math.isclose(*found, rel_tol=SINGLE)


def _is_narrower(widths: list[int], wide: list[int]) -> bool:
    """Whether no tensor is wider: sources and targets of pairs have different lengths."""
    return len(widths) == len(wide) and all(a <= b for a, b in zip(widths, wide, strict=True))


def width_of(batch: Any) -> int:
    """The length of the longest rows of a batch."""
    return max(_widths(batch), default=0)


def _widths(batch: Any) -> list[int]:
    values = batch.values() if isinstance(batch, Mapping) else batch
    return [value.shape[1] for value in values if isinstance(value, Tensor) and value.dim() > 1]


def may_be_ignored(batches: list[Any], label_names: list[str]) -> bool:
    """Whether labels are known to accept -100: on a GPU a class index out of range ends the process."""
    found = [find_targets(batch, label_names) for batch in batches]
    targets = [each for each in found if each is not None]
    return any(each.device.type == "cpu" and bool((each == IGNORED).any()) for each in targets if each.dim() > 1)


def _cuts(
    batch: Any, size: int, splitter: BatchSplitter, label_names: list[str], rivals: tuple[Denominator, ...]
) -> list[tuple[float, int]]:
    """Split positions with their information: where the denominators' shares differ most, preferring unequal parts."""
    places = list(range(1, size)) if size <= MANY else [size // 3, size - size // 4]
    rows = splitter.split(batch, [1] * size) if size <= MANY else []
    shares = [_shares(rows, by, label_names) for by in rivals]
    known = [each for each in shares if each is not None]

    def differs(cut: int) -> float:
        taken = [sum(each[:cut]) for each in known]
        return round(max(taken) - min(taken), 6) if len(taken) > 1 else 0.0

    found = [(differs(cut), cut) for cut in places]
    found.sort(key=lambda pair: (-pair[0], 2 * pair[1] == size, abs(pair[1] - size // 3)))
    return found[:2]


def _shares(rows: list[Any], by: Denominator, label_names: list[str]) -> list[float] | None:
    """Each row's fraction of the batch; None if it cannot be counted on the host."""
    counts = [by.count(row, label_names) for row in rows]
    if not counts or not all(isinstance(count, int) for count in counts) or not sum(counts):
        return None
    return [count / sum(counts) for count in counts]
