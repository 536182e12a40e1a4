"""Inferring the properties of a loss: a batch is computed as a whole and in parts, with several item counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from ...errors import first_line
from ...speed.memory.out_of_memory import is_out_of_memory
from . import messages
from .comparison import (
    Finding,
    Pieces,
    find_denominators,
    fitting_all,
    may_be_ignored,
    padding_is_neutral,
    part_of,
    pieces_of,
    rows_of,
    width_of,
)
from .denominator import ITEMS, NOTHING, SAMPLES, Denominator, candidates
from .findings import LossFindings
from .probe import LossProbe
from .splitter import ALL, FIRST, BatchSplitter, CannotSplit
from .targets import LossKind, count_samples, count_targets


class LossInference(LossFindings):
    """Computes the loss in different ways, and concludes from the results."""

    def learn_from_all(self, batches: Any, probe: LossProbe, splitter: BatchSplitter | None = None) -> None:
        """Learn, and once more if denominators remain that weight later micro-batches differently."""
        self.learn(batches, probe, splitter)
        if _is_several(batches) and self.disagrees(batches):
            self.learn(batches, probe, splitter)

    def learn(self, batches: Any, probe: LossProbe, splitter: BatchSplitter | None = None) -> None:
        """Compute the loss of a batch and of its parts to infer which targets it counts and its denominator.

        Where losses are computed in higher precision than in training, half of the samples are tested first, which need
        no more memory. If what they show does not hold for all samples, all are tested. After an error the question
        stays open.
        """
        batches = batches if _is_several(batches) else [batches]
        splitter = BatchSplitter(self.label_names) if splitter is None else splitter
        halves = [splitter.half_of(each) for each in batches] if probe.may_leave_half else batches
        before, trouble = self.state_dict(), self.trouble

        def again(these: list[Any]) -> None:
            self.load_state_dict(before)
            self.trouble = trouble
            self._test(these, probe, splitter)

        self._test(halves, probe, splitter)
        if all(splitter.half_of(each) is each for each in batches[:2]) or (halves is batches and len(batches) == 1):
            return  # nothing was left out
        if halves is not batches and not self.is_additive:  # a model may need rows of one width
            with splitter.halving(FIRST):
                again([splitter.half_of(each) for each in batches])
        with splitter.halving(ALL):
            if not self._holds_for_all(batches, probe, splitter):
                again(batches)

    def _test(self, batches: list[Any], probe: LossProbe, splitter: BatchSplitter) -> None:
        """Compute losses of these micro-batches, first of parts of them, and adopt what they show."""
        if self._shift is None and self._knows_all_but_shift() and self._shift_does_not_matter(batches[0]):
            return  # not informative; nothing was computed
        self._may_join = None
        self._looks += 1
        part = [part_of(batch, self.label_names) for batch in batches[:4]]
        is_part = any(mine is not other for mine, other in zip(part, batches, strict=False))
        error = self._error_of_test(part, batches, probe, splitter)
        if error is not None and is_part:  # a model may need complete samples
            error = self._error_of_test(batches, batches, probe, splitter)
        if error is not None:
            self.reason = f"the loss could not be tested: {type(error).__name__}: {first_line(error)[:200]}"
            self.trouble = (
                f"{self.reason}. It is weighted by {self.denominator.described()}; return (sum, count) to be exact"
            )

    def _holds_for_all(self, batches: list[Any], probe: LossProbe, splitter: BatchSplitter) -> bool:
        """Whether what half of the samples showed fits all of them: losses may choose samples, or count to a limit."""
        if not self.is_additive or (self.kind is LossKind.SCALED and self.is_trusted):
            return True  # nothing was concluded, or nothing was compared
        found, rows = self._assumed_denominators(), [rows_of(batch, self.label_names) for batch in batches[:2]]
        most = max(map(count_samples, rows))
        try:
            pieces = self._pieces(rows, probe, splitter)
            if all(count_samples(whole) > most for whole, _ in pieces) and most > 1:
                pieces = [*self._pieces(rows[:1], probe, splitter), *pieces]  # also one that is not joined
        except Exception:  # an error of the user's loss, or a batch that cannot be split: what is known stays
            return True
        for each in pieces:
            is_joined, items_of = count_samples(each[0]) > most, self._items_passed(each[0])
            found = fitting_all(
                probe, each, found, label_names=self.label_names, items_of=items_of, is_joined=is_joined
            )
        if len(self.rivals) > 1 and found:
            self._narrow_to(found)
        return bool(found)

    def _assumed_denominators(self) -> tuple[Denominator, ...]:
        """The denominators of a loss that has been compared."""
        if self.kind in (LossKind.SCALED, LossKind.SUM):
            return (Denominator(NOTHING),)
        return self.rivals or (Denominator(shifted=self.shifts),)

    def _error_of_test(
        self, batches: list[Any], whole: list[Any], probe: LossProbe, splitter: BatchSplitter
    ) -> Exception | None:
        """Learn shift and kind from `batches`, and the denominator from parts of `whole`; returns the error, if any."""
        while True:
            try:
                with probe.trying():
                    self._learn_shift_and_kind(batches[0], probe)
                    if self._wants_comparison():
                        rows = [rows_of(batch, self.label_names) for batch in whole]
                        self._compare_with_parts(rows, probe, splitter)
                return None
            except Exception as error:  # a user's loss may raise anything: the error is the result
                if not is_out_of_memory(error) or count_samples(batches[0]) == 1:
                    return error
            try:
                batches = whole = splitter.split_all(batches[:1], 2)[:1]  # half a batch is just as informative
            except CannotSplit as reason:
                return reason

    def _knows_all_but_shift(self) -> bool:
        return self.kind is not None and self.is_additive is not None and len(self.rivals) < 2

    def _learn_shift_and_kind(self, inputs: Any, probe: LossProbe) -> None:
        failed = self.learn_shift(inputs, probe)
        knows_targets = (
            self._shift is not None or not isinstance(inputs, Mapping) or self._shift_does_not_matter(inputs)
        )
        knows_targets |= failed  # continue with the guess
        if self.kind is None and knows_targets:
            self.kind = self._kind_by_items(inputs, probe)
        if self.kind is LossKind.SCALED and self.is_trusted:
            self.is_additive, self.reason = True, ""

    def _wants_comparison(self) -> bool:
        if self.kind is None or not self.may_compare:
            return False
        return self.is_additive is None or len(self.rivals) > 1

    def _kind_by_items(self, inputs: Any, probe: LossProbe) -> LossKind | None:
        """The kind of the loss, as far as it shows with different item counts; None if this batch shows nothing."""
        items = self.items_in(inputs)
        items = int(items if items is not None else count_samples(inputs)) or 1
        if self.accepts_items:
            return probe.kind(inputs, items)
        found = probe.measure(inputs, items)
        if found.count is not None:
            return LossKind.SUM
        return LossKind.MEAN if found.is_defined and (found.value or found.gradient is not None) else None

    def _shift_does_not_matter(self, inputs: Any) -> bool:
        """Whether the first targets of this batch are ignored anyway, like those of prompts."""
        counts = [count_targets(inputs, self.label_names, shifted=shifted) for shifted in (False, True)]
        return counts[0] is not None and bool(counts[0] == counts[1])

    def learn_shift(self, inputs: Any, probe: LossProbe) -> bool:
        """Infer which targets the loss counts, unless known; returns whether an error occurred."""
        if self._shift is not None or not isinstance(inputs, Mapping):
            return False
        try:
            self._shift = probe.shifted(dict(inputs), self.label_names)
        except Exception as error:  # a loss may not accept the labels of another sample
            if is_out_of_memory(error):
                raise
            return True
        return False

    def _compare_with_parts(self, batches: list[Any], probe: LossProbe, splitter: BatchSplitter) -> None:
        """Compare the loss of a batch with those of its parts, in training mode or, after a failure, in eval mode."""
        try:
            pieces = self._pieces(batches, probe, splitter)
        except CannotSplit as reason:
            self.reason = f"the loss could not be compared with the losses of parts of the batch: {reason}"
            self._warn_about_assumption(batches)
            return
        is_first = self.is_additive is None
        found, error = self._compared(pieces, probe, training=None)
        if found is not None and found.rivals:
            if found.is_informative:
                self._take(found)
                if is_first:
                    self._check_padding(batches, probe)
            return
        evaluated, _ = self._compared(pieces, probe, training=False)
        self._take_evaluated(evaluated, found, error)

    def _warn_about_assumption(self, batches: list[Any]) -> None:
        """Warn about an assumption if the alternative would weight these micro-batches differently."""
        if self.kind not in (LossKind.MEAN, None) or self.rivals:
            return
        counts = [self.items_in(batch) for batch in batches]
        if all(isinstance(count, int) for count in counts) and len(set(counts)) > 1:
            self.trouble = f"{self.reason}. It is weighted by {self.denominator.described()}"

    def _pieces(self, batches: list[Any], probe: LossProbe, splitter: BatchSplitter) -> Pieces:
        """Batches with their parts; joined batches are padded if that changes nothing, otherwise truncated."""
        rivals = self.rivals if len(self.rivals) > 1 else (Denominator(shifted=self.shifts), Denominator(SAMPLES))
        make = partial(pieces_of, self._informative_first(batches), splitter, self.label_names, rivals=rivals)
        if self.may_pad_labels or may_be_ignored(batches, self.label_names):
            pad_token = self._padding or 0
            pieces = make(may_ignore=True, pad_token=pad_token)
            if self._may_join is None:
                self._may_join = padding_is_neutral(
                    batches, pieces[0][0], probe, items_of=self.items_in, pad_token=pad_token
                )
            if self._may_join:
                return pieces
        return make(may_ignore=False, pad_token=0)

    def _informative_first(self, batches: list[Any]) -> list[Any]:
        """The micro-batches, starting with one that the possible denominators weight differently, if there is one."""
        first = next((batch for batch in batches if self.disagrees([batch])), None)
        return batches if first is None else [first, *(batch for batch in batches if batch is not first)]

    def _compared(
        self, pieces: Pieces, probe: LossProbe, training: bool | None
    ) -> tuple[Finding | None, Exception | None]:
        """The result of a comparison, or its error: a model may not accept a part of a batch."""
        try:
            with probe.trying(training=training):
                return self._find_denominators(pieces, probe), None
        except Exception as error:  # the caller interprets an error of the user's loss
            if is_out_of_memory(error):
                raise
            return None, error

    def _find_denominators(self, pieces: Pieces, probe: LossProbe) -> Finding:
        whole = pieces[0][0]
        wanted, items_of = [Denominator(NOTHING)], self._items_passed(whole)
        if self.kind is LossKind.MIXED:
            wanted = [Denominator(shifted=self.shifts)]
        elif self.kind not in (LossKind.SCALED, LossKind.SUM):
            wanted = list(self.rivals) if len(self.rivals) > 1 else self._candidates(whole)
        return find_denominators(
            probe, pieces, wanted, label_names=self.label_names, items_of=items_of, check_seed=len(self.rivals) < 2
        )

    def _items_passed(self, whole: Any) -> Callable[[Any], Any]:
        """The num_items_in_batch of a batch and of its parts: a loss that divides by it gets that of the whole."""
        if self.kind is not LossKind.SCALED:
            return self.items_in
        items = self.items_in(whole)
        return lambda batch: items if items is not None else count_samples(whole)

    def _candidates(self, batch: Any) -> list[Denominator]:
        shifts = (self.shifts,) if self._shift is not None else (self._guessed_shift, not self._guessed_shift)
        return candidates(batch, self.label_names, shifts=shifts, padding=self._padding)

    def _check_padding(self, batches: list[Any], probe: LossProbe) -> None:
        """Check whether an additive loss counts padding, which differs between micro-batches."""
        if not (self.may_pad_labels or may_be_ignored(batches, self.label_names)):
            return
        like = max(batches, key=width_of)
        if padding_is_neutral(batches, like, probe, items_of=self.items_in, pad_token=self._padding or 0):
            return
        self.is_additive, self.reason = False, "the loss of a batch changes with its padding"
        self.trouble = messages.COUNTS_PADDING

    def _take(self, found: Finding) -> None:
        """Adopt the denominators that fit, the most likely first."""
        self.is_additive, self.reason = True, ""
        if self.kind in (LossKind.SCALED, LossKind.SUM):
            return
        if self.is_claimed and not any(by.is_usual for by in found.rivals):
            self.is_additive, self.reason = False, "the loss does not match loss_is_scaled_for_ga"
        if self.is_claimed:
            return
        self._narrow_to(found.rivals)
        if self.kind is not LossKind.MIXED:
            self.kind = _kind_of(self.rivals[0])
        shifts = {by.shifted for by in self.rivals if by.what == ITEMS and by.column is None}
        if self._shift is None and len(shifts) == 1 and self.kind is LossKind.MEAN:
            self._shift = shifts.pop()
        if self.kind is LossKind.TOTAL:
            self.trouble = messages.IS_A_SUM

    def _narrow_to(self, rivals: tuple[Denominator, ...]) -> None:
        """Keep these denominators, and how they weighted the micro-batches so far."""
        known = dict(zip(self.rivals, self._ratios or (), strict=False))
        if all(known.get(by) for by in rivals):
            self._ratios = tuple(known[by] / known[rivals[0]] for by in rivals)
        else:
            self._ratios = None
        self.rivals = rivals

    def _take_evaluated(self, evaluated: Finding | None, trained: Finding | None, error: Exception | None) -> None:
        """Adopt the result of evaluation mode, because in train mode nothing fits or the comparison failed."""
        weighed = self.kind not in (LossKind.SCALED, LossKind.SUM, LossKind.MIXED) and not self.is_claimed
        fits = evaluated is not None and evaluated.is_informative and bool(evaluated.rivals)
        compared = [
            each for each in (evaluated, trained) if each is not None and each.is_informative and not each.draws
        ]
        if weighed and not fits and any(each.counts_empty for each in compared):
            return self.record_loss_without_items()
        self.is_additive, self.reason = False, "the loss of a batch is not made of the losses of its samples"
        if error is not None:
            self.reason = f"a part of a batch has no loss of its own: {first_line(error)[:200]}"
        elif trained is not None and trained.draws:
            self.reason = "the loss uses random numbers in training, besides dropout"
        if weighed and evaluated is not None and fits:
            self.rivals, self.kind = evaluated.rivals, _kind_of(evaluated.rivals[0])
        elif self.kind is LossKind.MIXED and not self.is_claimed:
            self.rivals = (Denominator(SAMPLES),)
        elif weighed:  # like a hand-written loop: the mean over micro-batches
            self.rivals, self.kind = (Denominator(SAMPLES),), LossKind.OTHER
        if (trained is None and fits) or (trained is not None and not trained.draws):
            self.trouble = messages.COUPLED.format(self.denominator.described())
        elif not fits:
            self.trouble = f"{self.reason}. It is weighted by {self.denominator.described()}"

    def learn_division(self, batch: Any, probe: LossProbe, said: Callable[..., AbstractContextManager[Any]]) -> None:
        """Infer whether the loss halves when the accumulation is reported as twice as long.

        Inside `said(arguments=2)` the loss finds twice the accumulation in the arguments, and inside `said(update=2)`
        twice as many micro-batches in the current update.
        """
        if self._knows_division:
            return
        self._knows_division = True
        batch, items = part_of(batch, self.label_names), self.items_in(batch)
        try:
            self.divides = probe.divided_by(batch, items, said)
        except Exception as error:  # a loss that cannot be tested is assumed not to divide
            if is_out_of_memory(error):
                raise
            return
        if self.divides is not None:
            self.trouble = messages.IS_DIVIDED


def _kind_of(by: Denominator) -> LossKind:
    return {SAMPLES: LossKind.SAMPLES, NOTHING: LossKind.TOTAL}.get(by.what, LossKind.MEAN)


def _is_several(batches: Any) -> bool:
    """Whether this is a list of micro-batches, not one micro-batch that is a list of tensors."""
    return type(batches) is list and bool(batches) and isinstance(batches[0], (Mapping, list, tuple))
