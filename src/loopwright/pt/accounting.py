"""The denominator of an update: what a loss is the mean of, and what each micro-batch's loss is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.batches import Update
from .denominators import ITEMS, NOTHING, SAMPLES, Denominator, candidates
from .looking import Finding, Pieces, look, may_be_ignored, pieces_of
from .loss import LossKind, check_loss, count_samples, count_targets, find_targets
from .oom import is_out_of_memory
from .probing import LossProbe
from .shapes import IGNORED
from .splitting import BatchSplitter, CannotSplit, split_all

ENOUGH_TOKENS = 16_384
"""Tokens that tell what a loss is; the logits of a very long row would take more memory than training it."""
LOOKS = 16
"""How often a loss is looked at; what is not known then stays as it was first believed to be."""
WEIGHED = (LossKind.MEAN, LossKind.SAMPLES, LossKind.TOTAL, LossKind.MIXED, LossKind.OTHER, None)
"""Losses that a micro-batch's share of the update is multiplied with."""


ARGUMENTS, UPDATE = "arguments", "update"
"""Where a loss that divides by the accumulation may find it."""


class LossAccounting:
    """Knows, or finds out, what a loss is, and weighs micro-batches by what it is the mean of."""

    def __init__(
        self,
        label_names: list[str],
        *,
        guessed_shift: bool,
        shift: bool | None = None,
        kind: LossKind | None = None,
        wants_items: bool = False,
        tells_items: bool = True,
        is_trusted: bool = False,
        padding: int | None = None,
    ) -> None:
        self.label_names = label_names
        self.kind = kind
        self.wants_items = wants_items
        """Whether somebody is told the number of items even when an update is one micro-batch."""
        self.tells_items = tells_items
        """Whether the loss can be told the number of items at all."""
        self.is_trusted = is_trusted
        """Whether a loss that is scaled by the items needs no further look: it is that of a library."""
        self.is_additive: bool | None = True if kind is LossKind.SCALED and is_trusted else None
        """Whether the loss of a batch is made of those of its parts in training; None while nobody knows."""
        self.reason = "nobody has looked at the loss yet"
        """Why the loss is not known to be additive."""
        self.trouble: str | None = None
        """What the user should be told, once."""
        self.divides: str | None = None
        """Whether the loss is already divided by the accumulation."""
        self.rivals: tuple[Denominator, ...] = ()
        """What the loss may be the mean of; the first is believed."""
        self.may_pad_labels = False
        """Whether a label of -100 does no harm where none was seen: on a GPU it may end the run."""
        self.may_compare = True
        """Whether parts of batches may be computed: not on a device that compiles for each shape."""
        self.is_claimed = kind is not None
        """Whether the kind was said, not found."""
        self._padding = padding
        self._guessed_shift = guessed_shift
        self._shift = shift
        self._share: Any = None
        self._idle = False
        self._looks = 0
        self._knows_division = False
        self._ratios: tuple[float, ...] | None = None
        self.summed: Any = None
        """The counts of (sum, count) losses, which the update's gradients are to be divided by."""

    # ---- what is known ----------------------------------------------------------------------------------------------

    @property
    def shifts(self) -> bool:
        """Whether the loss leaves out the first target of each row."""
        return self._guessed_shift if self._shift is None else self._shift

    @property
    def undecided_shift(self) -> bool:
        """Whether it is still a guess which targets the loss counts."""
        return self._shift is None

    @property
    def is_open(self) -> bool:
        """Whether any batch may still tell something about the loss."""
        if self._looks >= LOOKS or self.is_claimed:
            return False
        return self.kind is None or self._shift is None or self.is_additive is None

    @property
    def denominator(self) -> Denominator:
        """What the loss is believed to be the mean of."""
        return self.rivals[0] if self.rivals else Denominator(shifted=self.shifts)

    def wants_look(self, batches: list[Any]) -> bool:
        """Whether these micro-batches should be looked at: something is unknown, or they are shared out differently."""
        return self.is_open or self.disagrees(batches)

    def disagrees(self, batches: list[Any]) -> bool:
        """Whether denominators that fitted so far would weigh these micro-batches differently; asks the host only."""
        if len(self.rivals) < 2:
            return False
        if self._looks >= LOOKS:
            self.trouble = (
                f"the loss may be the mean over {self.rivals[0].described()} or over {self.rivals[1].described()}, and "
                "no update has told: it is taken for the first; return (sum, count) from compute_loss to be exact"
            )
            self.rivals = self.rivals[:1]
            return False
        for batch in batches:
            counts = [by.count(batch, self.label_names) for by in self.rivals]
            if any(not isinstance(count, int) for count in counts):
                return False
            ratios = tuple(float(count / counts[0]) if counts[0] else float("nan") for count in counts)
            if self._ratios is None:
                self._ratios = ratios
            if ratios != self._ratios:
                return True
        return False

    def state_dict(self) -> dict[str, Any]:
        """What was found out about the loss, as JSON values."""
        return {
            "kind": None if self.kind is None else self.kind.name,
            "shift": self._shift,
            "additive": self.is_additive,
            "reason": self.reason,
            "divides": self.divides,
            "looks": self._looks,
            "rivals": [each.as_dict() for each in self.rivals],
            "ratios": self._ratios,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kind = None if state["kind"] is None else LossKind[state["kind"]]
        self._shift, self.is_additive, self.reason = state["shift"], state["additive"], state["reason"]
        self.divides, self._looks = state["divides"], state["looks"]
        self.rivals = tuple(Denominator(**each) for each in state["rivals"])
        self._ratios = None if state["ratios"] is None else tuple(state["ratios"])

    # ---- finding out ------------------------------------------------------------------------------------------------

    def learn(self, batches: Any, probe: LossProbe, splitter: BatchSplitter | None = None) -> None:
        """Compute the loss of a batch and of its parts to see which targets it counts and what it is the mean of.

        A batch may be unable to tell; then the next one is asked. Of a very long one a part is. Whatever goes wrong
        leaves the question open.
        """
        batches = batches if _is_several(batches) else [batches]
        splitter = BatchSplitter(self.label_names) if splitter is None else splitter
        if self._shift is None and self._knows_all_but_shift() and self._shift_is_no_matter(batches[0]):
            return  # nothing to see here, and nothing was computed
        self._looks += 1
        part = [_part_of(batch, self.label_names) for batch in batches[:4]]
        is_part = any(mine is not theirs for mine, theirs in zip(part, batches, strict=False))
        error = self._tried(part, probe, splitter, batches)
        if error is not None and is_part:  # a model may want its samples whole
            error = self._tried(batches, probe, splitter)
        if error is not None:
            text = (str(error).splitlines() or [""])[0][:200]
            self.reason = f"the loss could not be tried out: {type(error).__name__}: {text}"
            self.trouble = (
                f"{self.reason}. It is taken for {self._believed()}; compute_loss may return (sum, count) to be exact"
            )

    def _tried(
        self, batches: list[Any], probe: LossProbe, splitter: BatchSplitter, whole: list[Any] | None = None
    ) -> Exception | None:
        while True:
            whole = batches if whole is None else whole
            try:
                with probe.trying():
                    self._learn(batches, probe)
                    if self._wants_comparison():
                        self._look([_rows_of(batch, self.label_names) for batch in whole], probe, splitter)
                return None
            except Exception as error:
                if not is_out_of_memory(error) or count_samples(batches[0]) == 1:
                    return error
            try:
                batches = whole = splitter.split_all(batches[:1], 2)[:1]  # half a batch tells as much
            except CannotSplit as reason:
                return reason

    def _knows_all_but_shift(self) -> bool:
        return self.kind is not None and self.is_additive is not None and len(self.rivals) < 2

    def _learn(self, batches: list[Any], probe: LossProbe) -> None:
        inputs = batches[0]
        failed = self.learn_shift(inputs, probe)
        knows_targets = self._shift is not None or not isinstance(inputs, Mapping) or self._shift_is_no_matter(inputs)
        knows_targets |= failed  # a guess has to do
        if self.kind is None and knows_targets:
            self.kind = self._form(inputs, probe)
        if self.kind is LossKind.SCALED and self.is_trusted:
            self.is_additive, self.reason = True, ""

    def _wants_comparison(self) -> bool:
        if self.kind is None or not self.may_compare:
            return False
        return self.is_additive is None or len(self.rivals) > 1

    def _form(self, inputs: Any, probe: LossProbe) -> LossKind | None:
        items = self.items_in(inputs)
        items = int(items if items is not None else count_samples(inputs)) or 1
        if self.tells_items:
            return probe.kind(inputs, items)
        found = probe.measure(inputs, items)
        if found.count is not None:
            return LossKind.SUM
        return LossKind.MEAN if found.is_defined and (found.value or found.gradient is not None) else None

    def _shift_is_no_matter(self, inputs: Any) -> bool:
        """Whether the first targets of this batch are ignored anyway, as those of prompts are."""
        counts = [count_targets(inputs, self.label_names, shifted=shifted) for shifted in (False, True)]
        return counts[0] is not None and bool(counts[0] == counts[1])

    def learn_shift(self, inputs: Any, probe: LossProbe) -> bool:
        """See which targets the loss counts, unless that is known; returns whether an error came in between."""
        if self._shift is not None or not isinstance(inputs, Mapping):
            return False
        try:
            self._shift = probe.shifted(dict(inputs), self.label_names)
        except Exception as error:  # a loss may not take labels of another sample
            if is_out_of_memory(error):
                raise
            return True
        return False

    def _look(self, batches: list[Any], probe: LossProbe, splitter: BatchSplitter) -> None:
        """Compare the loss of a batch with those of its parts: in training mode, and where that fails without it."""
        try:
            pieces = self._pieces(batches, probe, splitter)
        except CannotSplit as reason:
            self.reason = f"the loss could not be compared with that of its parts: {reason}"
            self._say_what_is_believed(batches)
            return
        found, error = self._compared(pieces, probe, training=None)
        if found is not None and found.rivals:
            if found.tells:
                self._take(found)
            return
        quiet, _ = self._compared(pieces, probe, training=False)
        self._take_without_training(quiet, found, error)

    def _pieces(self, batches: list[Any], probe: LossProbe, splitter: BatchSplitter) -> Pieces:
        """Something to compare; what is joined is padded where that changes nothing, and cut to one length else."""
        rivals = self.rivals if len(self.rivals) > 1 else (Denominator(shifted=self.shifts), Denominator(SAMPLES))
        make = partial(pieces_of, self._telling_first(batches), splitter, self.label_names, rivals=rivals)
        if self.may_pad_labels or may_be_ignored(batches, self.label_names):
            pieces = make(may_ignore=True, pad_token=self._padding or 0)
            if self._padding_is_neutral(batches, pieces, probe):
                return pieces
        return make(may_ignore=False, pad_token=0)

    def _telling_first(self, batches: list[Any]) -> list[Any]:
        """Micro-batches with one first that rivals weigh differently from those before, if there is one."""
        told = next((batch for batch in batches if self.disagrees([batch])), None)
        return batches if told is None else [told, *(batch for batch in batches if batch is not told)]

    def _compared(
        self, pieces: Pieces, probe: LossProbe, training: bool | None
    ) -> tuple[Finding | None, Exception | None]:
        """What a look showed, or the error it ended with: a part of a batch may be no batch to the model."""
        try:
            with probe.trying(training=training):
                return self._looked(pieces, probe), None
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None, error

    def _looked(self, pieces: Pieces, probe: LossProbe) -> Finding:
        whole = pieces[0][0]
        wanted, told = [Denominator(NOTHING)], self.items_in
        if self.kind is LossKind.SCALED:
            all_items = self.items_in(whole)
            told = lambda batch: all_items if all_items is not None else count_samples(whole)  # noqa: E731
        elif self.kind is LossKind.MIXED:
            wanted = [Denominator(shifted=self.shifts)]
        elif self.kind is not LossKind.SUM:
            wanted = list(self.rivals) if len(self.rivals) > 1 else self._candidates(whole)
        return look(probe, pieces, wanted, label_names=self.label_names, told=told, check_seed=len(self.rivals) < 2)

    def _candidates(self, batch: Any) -> list[Denominator]:
        shifts = (self.shifts,) if self._shift is not None else (self._guessed_shift, not self._guessed_shift)
        return candidates(batch, self.label_names, shifts=shifts, padding=self._padding)

    def _padding_is_neutral(self, batches: list[Any], pieces: Pieces, probe: LossProbe) -> bool:
        """Whether the loss of a batch is the same once it is padded to be joined with others."""
        wide = [value.shape[1] for value in _tensors(pieces[0][0]) if value.dim() > 1]
        short = next((b for b in batches if [v.shape[1] for v in _tensors(b) if v.dim() > 1] != wide), None)
        if short is None:
            return True
        padded = BatchSplitter.widened(short, pieces[0][0], pad_token=self._padding or 0)
        try:
            found = [probe.measure(each, self.items_in(each)).value for each in (short, padded)]
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return False
        return probe.close(*found)

    def _take(self, found: Finding) -> None:
        """The loss is what fitted, the likeliest first."""
        self.is_additive, self.reason = True, ""
        if self.kind in (LossKind.SCALED, LossKind.SUM):
            return
        if self.is_claimed and not any(by.is_usual for by in found.rivals):
            self.is_additive, self.reason = False, "the loss is not what loss_is_scaled_for_ga says"
        if self.is_claimed:
            return
        self.rivals = found.rivals
        if self.kind is not LossKind.MIXED:
            self.kind = _kind_of(self.rivals[0])
        shifts = {by.shifted for by in self.rivals if by.what == ITEMS and by.column is None}
        if self._shift is None and len(shifts) == 1 and self.kind is LossKind.MEAN:
            self._shift = shifts.pop()
        if self.kind is LossKind.TOTAL:
            self.trouble = (
                "the loss is a sum over its batch: the sums of an update's micro-batches are added up, so that the "
                "update does not depend on how it is cut; return the mean if the average of micro-batches is wanted"
            )

    def _take_without_training(self, quiet: Finding | None, found: Finding | None, error: Exception | None) -> None:
        """In training the loss fits nothing, or cannot be compared: weights follow what fits without training mode."""
        by_samples = Denominator(SAMPLES)
        weighed = self.kind not in (LossKind.SCALED, LossKind.SUM, LossKind.MIXED) and not self.is_claimed
        fits = quiet is not None and quiet.tells and bool(quiet.rivals)
        if weighed and not fits and any(each is not None and each.counts_empty for each in (found, quiet)):
            return self.sees_loss_without_items()
        if weighed:
            usual = (Denominator(shifted=self.shifts), by_samples)
            near = next((each.closest for each in (quiet, found) if each is not None and each.closest), None)
            self.rivals = quiet.rivals if fits and quiet is not None else (near if near in usual else by_samples,)  # type: ignore[assignment]
            self.kind = _kind_of(self.rivals[0]) if fits else LossKind.OTHER
        if error is not None:
            text = (str(error).splitlines() or [""])[0][:200]
            self.is_additive, self.reason = False, f"a part of a batch has no loss of its own: {text}"
            self.trouble = None if fits else self._coupled()
        elif found is not None and found.draws:
            self.is_additive, self.reason = False, "in training the loss draws random numbers, besides those of dropout"
        else:
            self.is_additive, self.reason = False, "the loss of a batch is not made of the losses of its samples"
            self.trouble = self._coupled()

    def _coupled(self) -> str:
        return (
            "the loss of a batch is neither the mean nor the sum of the losses of its parts (class weights, several "
            "means in one, samples that are compared with each other, BatchNorm): the update depends on how it is cut "
            f"into micro-batches, which are weighed by {self.denominator.described()}. Return (sum, count) from "
            "compute_loss where there is such a pair, or make each update one micro-batch "
            "(gradient_accumulation_steps=1, one process)"
        )

    def _say_what_is_believed(self, batches: list[Any]) -> None:
        """A guess is worth a word where the other guess would weigh these micro-batches differently."""
        if self.kind not in (LossKind.MEAN, None) or self.rivals:
            return
        counts = [self.items_in(batch) for batch in batches]
        if all(isinstance(count, int) for count in counts) and len(set(counts)) > 1:
            self.trouble = f"{self.reason}. It is taken for {self._believed()}"

    def _believed(self) -> str:
        return f"the mean over {self.denominator.described()}"

    def learn_division(
        self, batch: Any, probe: LossProbe, said: Callable[..., AbstractContextManager[Any]]
    ) -> None:
        """See whether the loss halves when the accumulation is said to be twice as long.

        `said(arguments=2)` is entered around a loss that finds twice the accumulation in the arguments, and
        `said(update=2)` around one that finds twice as many micro-batches in the current update.
        """
        if self._knows_division:
            return
        self._knows_division = True
        batch, items = _part_of(batch, self.label_names), self.items_in(batch)
        try:
            with probe.trying():
                with said():
                    once = probe.measure(batch, items)
                halved = []
                for what in (ARGUMENTS, UPDATE):
                    with said(**{what: 2}):
                        twice = probe.measure(batch, items)
                    halved += [what] if probe.close(once.value, 2 * twice.value) else []
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return
        self.divides = halved[0] if halved and once.value != 0 and once.is_defined else None
        if self.divides is not None:
            self.trouble = (
                "the loss is already divided by gradient_accumulation_steps: it is taken times that number, since "
                "micro-batches are weighed here; leave the division out"
            )

    def give_up(self, reason: str) -> None:
        """Nothing more will be found out."""
        if self._looks < LOOKS:
            self._looks, self.reason = LOOKS, reason
            self.trouble = f"the loss is not tried out: {reason}. It is taken for {self._believed()}"

    def sees_loss_without_items(self) -> None:
        """A micro-batch without items has a loss: it is no mean over items, and samples are what is left."""
        self.rivals, self.kind = (Denominator(SAMPLES),), LossKind.SAMPLES
        self.is_additive, self.reason = False, "a batch without label tokens has a loss"
        self.trouble = (
            "a micro-batch whose labels all are -100 has a loss that is not zero, so the loss is no mean over label "
            "tokens: from here on micro-batches are weighed by their samples"
        )

    # ---- counting ---------------------------------------------------------------------------------------------------

    def items_in(self, batch: Any) -> Any:
        """The targets of a batch, or None if it has no labels."""
        return count_targets(batch, self.label_names, shifted=self.shifts)

    def weight_in(self, batch: Any) -> Any:
        """What the mean loss of a batch counts for."""
        count = self.denominator.count(batch, self.label_names)
        return count_samples(batch) if count is None else count

    def total(self, batches: list[Any]) -> Any:
        """The targets of several micro-batches, or None if any of them has no labels."""
        counts = [self.items_in(batch) for batch in batches]
        return None if not counts or any(count is None for count in counts) else sum(counts[1:], counts[0])

    def empty_in(self, batches: list[Any]) -> list[Any]:
        """Micro-batches without a single item, where items are what the loss is believed to be the mean of."""
        if self.kind not in (LossKind.MEAN, LossKind.OTHER, None) or self.denominator.what != ITEMS:
            return []
        counts = [self.denominator.count(batch, self.label_names) for batch in batches]
        return [batch for batch, count in zip(batches, counts, strict=True) if isinstance(count, int) and count == 0]

    def count(self, update: Update) -> None:
        """Count the targets of an update; where there are no labels, samples are counted instead."""
        counts = [self.items_in(batch) for batch in update.batches]
        update.counted = all(count is not None for count in counts)
        update.items = counts if update.counted else [count_samples(batch) for batch in update.batches]
        update.weights = None
        if self.kind in WEIGHED and self.rivals and not self.denominator.is_usual:
            update.weights = [self.weight_in(batch) for batch in update.batches]
        if self.kind in WEIGHED:
            _drop_empty(update)
        update.total_items = _one_if_none(sum(update.items[1:], update.items[0]))
        if update.weights is not None:
            update.total_weight = _one_if_none(sum(update.weights[1:], update.weights[0]))
        if self.kind is LossKind.TOTAL:
            update.total_weight = 1

    # ---- weighing ---------------------------------------------------------------------------------------------------

    def begin(self, update: Update, index: int) -> Any:
        """Note the share of a micro-batch; returns the num_items_in_batch its loss is told."""
        if index == 0:
            self.summed = self._share = None
        self._idle = update.real is not None and index >= update.real
        if not update.items:
            self._share = update.factor if update.factor != 1 else None
            return None
        if self.kind in WEIGHED:
            self._share = update.share(index)
        else:
            self._share = update.factor if update.factor != 1 else None
        if not update.counted:
            return None
        # Told its own items and then weighed, a loss is right whatever its kind: so also while that is unknown.
        return _one_if_none(update.items[index]) if self.kind in (LossKind.MIXED, None) else update.total_items

    def weigh(self, loss: Any) -> Tensor:
        """The loss times the micro-batch's share of the update's targets; a (sum, count) pair is noted."""
        if type(loss) in (tuple, list):
            loss, count = loss
            count = 0 * count if self._idle else count
            self.kind, self._share = LossKind.SUM, None
            self.summed = count if self.summed is None else self.summed + count
        if type(loss) is not Tensor or loss.ndim:
            loss = check_loss(loss)
        return loss if self._share is None else loss * self._share

    def settle(self, loss: Any, strategy: Any) -> Any:
        """The update's loss; gradients of summed losses are divided by all their counts, once."""
        if self.summed is None:
            return loss
        self.summed = strategy.total(self.summed)
        strategy.scale_gradients(1 / self._all_counts(loss))
        return self.divided(loss)

    def divided(self, loss: Any) -> Any:
        """The update's loss from the weighed losses of its micro-batches."""
        return loss if self.summed is None else loss / self._all_counts(loss)

    def _all_counts(self, loss: Any) -> Any:
        count = _one_if_none(self.summed)
        if isinstance(count, Tensor):  # a whole number would be divided in single precision
            count = count.to(torch.promote_types(loss.dtype, torch.float32))
        return count


def _tensors(batch: Any) -> list[Tensor]:
    values = batch.values() if isinstance(batch, Mapping) else batch
    return [value for value in values if isinstance(value, Tensor) and value.dim()]


def _kind_of(by: Denominator) -> LossKind:
    return {SAMPLES: LossKind.SAMPLES, NOTHING: LossKind.TOTAL}.get(by.what, LossKind.MEAN)


def _is_several(batches: Any) -> bool:
    """Whether this is a list of micro-batches, not one that is a list of tensors."""
    return type(batches) is list and bool(batches) and isinstance(batches[0], (Mapping, list, tuple))


def _part_of(inputs: Any, label_names: list[str]) -> Any:
    """Not many more tokens of a batch than are enough: a few of its rows, or of its only row the end of its targets."""
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
        return _part_of(half, label_names) if is_less else inputs
    width, counted = targets.shape[1], (targets[0] != IGNORED).nonzero()
    tensors = [value for value in inputs.values() if isinstance(value, Tensor) and value.dim()]
    if any(width in value.shape[2:] or len(value) != 1 for value in tensors):
        return inputs  # a mask of every token with every other, say, or where the documents of a row begin
    end = max(int(counted.max()) + 1, ENOUGH_TOKENS) if len(counted) else width

    def cut(value: Any) -> Any:
        is_along = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == width
        return value[:, end - ENOUGH_TOKENS : end] if is_along else value

    return {name: cut(value) for name, value in inputs.items()}


def _rows_of(inputs: Any, label_names: list[str]) -> Any:
    """A few whole rows of a batch: two at least, which is what a comparison takes."""
    targets = find_targets(inputs, label_names)
    if targets is None or targets.dim() < 2 or targets.numel() <= ENOUGH_TOKENS or count_samples(inputs) < 4:
        return inputs
    try:
        half = split_all([inputs], 2)[0]
    except CannotSplit:
        return inputs
    return _rows_of(half, label_names) if count_samples(half) < count_samples(inputs) else inputs


def _one_if_none(count: Any) -> Any:
    """The count, or 1 in place of 0: an update without targets has nothing to divide, and teaches nothing."""
    return torch.where(count == 0, 1, count) if isinstance(count, Tensor) else count or 1


def _drop_empty(update: Update) -> None:
    """Leave out micro-batches without any target: their mean does not exist."""
    counts = update.items if update.weights is None else update.weights
    full = [i for i, count in enumerate(counts) if not (isinstance(count, int) and count == 0)]
    if full and len(full) < len(counts):
        update.batches = [update.batches[i] for i in full]
        update.items = [update.items[i] for i in full]
        update.weights = None if update.weights is None else [update.weights[i] for i in full]
