"""Inferring properties of a loss: which targets it counts, its denominator, and whether it is divided already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from math import isclose
from typing import Any

from . import messages as notices
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
from .out_of_memory import is_out_of_memory
from .probe import LossProbe
from .splitter import BatchSplitter, CannotSplit
from .targets import LossKind, count_samples, count_targets

LOOKS = 16  # most tests of a loss; after that, the first assumptions are kept


class LossFindings:
    """The properties of a loss, given or inferred; unknown ones are assumed, with a warning."""

    def __init__(
        self,
        label_names: list[str],
        *,
        guessed_shift: bool,
        shift: bool | None = None,
        kind: LossKind | None = None,
        wants_items: bool = False,
        accepts_items: bool = True,
        is_trusted: bool = False,
        padding: int | None = None,
    ) -> None:
        self.label_names = label_names
        self.kind = kind
        self.wants_items = wants_items
        """Whether num_items_in_batch is passed even if an update is one micro-batch."""
        self.accepts_items = accepts_items
        """Whether the loss accepts num_items_in_batch at all."""
        self.is_trusted = is_trusted
        """Whether a loss scaled by the items is a library's and needs no further test."""
        self.is_additive: bool | None = True if kind is LossKind.SCALED and is_trusted else None
        """Whether, in training, the loss of a batch is composed of those of its parts; None while unknown."""
        self.reason = "the loss has not been tested yet"
        """Why the loss is not known to be additive."""
        self.trouble: str | None = None
        """A warning that has not been logged yet."""
        self.divides: str | None = None
        """What the loss is already divided by, if it is: the accumulation of the arguments or of the update."""
        self.rivals: tuple[Denominator, ...] = ()
        """Possible denominators of the loss; the first is assumed."""
        self.may_pad_labels = False
        """Whether a label of -100 is safe where none was seen: on a GPU it may end the run."""
        self.may_compare = True
        """Whether parts of batches may be computed: not on a device that compiles for each shape."""
        self.is_claimed = kind is not None
        """Whether the kind was given, not inferred."""
        self._padding = padding
        self._guessed_shift = guessed_shift
        self._shift = shift
        self._looks = 0
        self._knows_division = False
        self._ratios: tuple[float, ...] | None = None
        self._may_join: bool | None = None
        """Whether batches may be padded to be joined, as far as these batches show it."""

    # ---- known properties --------------------------------------------------------------------------------------------

    @property
    def shifts(self) -> bool:
        """Whether the loss ignores the first target of each row."""
        return self._guessed_shift if self._shift is None else self._shift

    @property
    def undecided_shift(self) -> bool:
        """Whether the targets that the loss counts are still a guess."""
        return self._shift is None

    @property
    def is_open(self) -> bool:
        """Whether another batch may still reveal something about the loss."""
        if self._looks >= LOOKS or self.is_claimed:
            return False
        return self.kind is None or self._shift is None or self.is_additive is None

    @property
    def is_settled(self) -> bool:
        """Whether the loss is not tested any more."""
        return self._looks >= LOOKS

    @property
    def denominator(self) -> Denominator:
        """The assumed denominator of the loss."""
        return self.rivals[0] if self.rivals else Denominator(shifted=self.shifts)

    def wants_test(self, batches: list[Any]) -> bool:
        """Whether to test these micro-batches: a property is unknown, or possible denominators disagree on them."""
        return self.is_open or self.disagrees(batches)

    def disagrees(self, batches: list[Any]) -> bool:
        """Whether the possible denominators would weight these micro-batches differently; computed on the host only."""
        if len(self.rivals) < 2:
            return False
        if not any(map(self._is_weighted_differently, batches)):
            return False
        if self._looks < LOOKS:
            return True
        self.trouble = notices.MAY_BE_EITHER.format(*(by.described() for by in self.rivals[:2]))
        self.rivals = self.rivals[:1]
        return False

    def _is_weighted_differently(self, batch: Any) -> bool:
        """Whether the possible denominators have other ratios in this micro-batch than in those before it."""
        counts = [by.count(batch, self.label_names) for by in self.rivals]
        if any(not isinstance(count, int) for count in counts):
            return False
        ratios = tuple(float(count / counts[0]) if counts[0] else float("nan") for count in counts)
        if self._ratios is None:
            self._ratios = ratios
        return not all(map(_is_same, ratios, self._ratios))

    def state_dict(self) -> dict[str, Any]:
        """The inferred properties of the loss, as JSON values."""
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
        ratios = state["ratios"] or ()
        self._ratios = tuple(ratios) if len(ratios) == len(self.rivals) and ratios else None

    def items_in(self, batch: Any) -> Any:
        """The targets of a batch, or None if it has no labels."""
        return count_targets(batch, self.label_names, shifted=self.shifts)

    def weight_in(self, batch: Any) -> Any:
        """The weight of a batch's mean loss."""
        count = self.denominator.count(batch, self.label_names)
        return count_samples(batch) if count is None else count

    # ---- inference ---------------------------------------------------------------------------------------------------

    def know_mean_over_samples(self) -> None:
        """Take what is known without a test."""
        self.kind, self.rivals = LossKind.SAMPLES, (Denominator(SAMPLES),)
        self.is_additive, self.reason, self._shift = True, "", False

    def learn_from_all(self, batches: Any, probe: LossProbe, splitter: BatchSplitter | None = None) -> None:
        """Learn, and once more if the first micro-batches leave denominators open that weight others differently."""
        self.learn(batches, probe, splitter)
        if _is_several(batches) and self.disagrees(batches):
            self.learn(batches, probe, splitter)

    def learn(self, batches: Any, probe: LossProbe, splitter: BatchSplitter | None = None) -> None:
        """Compute the loss of a batch and of its parts to infer which targets it counts and its denominator.

        Of long batches a part is used. If one is not informative, the next is; after an error the question stays open.
        """
        batches = batches if _is_several(batches) else [batches]
        splitter = BatchSplitter(self.label_names) if splitter is None else splitter
        halves = [splitter.half_of(each) for each in batches] if probe.may_leave_half else batches
        before, trouble = self.state_dict(), self.trouble

        def again(these: list[Any]) -> None:
            self.load_state_dict(before)
            self.trouble = trouble
            self._learn_from(these, probe, splitter)

        self._learn_from(halves, probe, splitter)
        if all(splitter.half_of(each) is each for each in batches[:2]) or (halves is batches and len(batches) == 1):
            return  # nothing was left out
        try:
            if halves is not batches and not self.is_additive:  # a model may need rows of one width
                splitter.may_trim = False
                again([splitter.half_of(each) for each in batches])
            splitter.may_halve = False
            if not self._holds_for_all(batches, probe, splitter):
                again(batches)
        finally:
            splitter.may_halve = splitter.may_trim = True

    def _learn_from(self, batches: list[Any], probe: LossProbe, splitter: BatchSplitter) -> None:
        if self._shift is None and self._knows_all_but_shift() and self._shift_is_no_matter(batches[0]):
            return  # not informative; nothing was computed
        self._may_join = None
        self._looks += 1
        part = [part_of(batch, self.label_names) for batch in batches[:4]]
        is_part = any(mine is not other for mine, other in zip(part, batches, strict=False))
        error = self._tried(part, probe, splitter, batches)
        if error is not None and is_part:  # a model may need complete samples
            error = self._tried(batches, probe, splitter)
        if error is not None:
            text = (str(error).splitlines() or [""])[0][:200]
            self.reason = f"the loss could not be tested: {type(error).__name__}: {text}"
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

    def _tried(
        self, batches: list[Any], probe: LossProbe, splitter: BatchSplitter, whole: list[Any] | None = None
    ) -> Exception | None:
        while True:
            whole = batches if whole is None else whole
            try:
                with probe.trying():
                    self._learn(batches, probe)
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

    def _learn(self, batches: list[Any], probe: LossProbe) -> None:
        inputs = batches[0]
        failed = self.learn_shift(inputs, probe)
        knows_targets = self._shift is not None or not isinstance(inputs, Mapping) or self._shift_is_no_matter(inputs)
        knows_targets |= failed  # continue with the guess
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
        if self.accepts_items:
            return probe.kind(inputs, items)
        found = probe.measure(inputs, items)
        if found.count is not None:
            return LossKind.SUM
        return LossKind.MEAN if found.is_defined and (found.value or found.gradient is not None) else None

    def _shift_is_no_matter(self, inputs: Any) -> bool:
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
        quiet, _ = self._compared(pieces, probe, training=False)
        self._take_without_training(quiet, found, error)

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
        self.trouble = notices.COUNTS_PADDING

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
            self.trouble = notices.IS_A_SUM

    def _narrow_to(self, rivals: tuple[Denominator, ...]) -> None:
        """Keep these denominators, and how they weighted the micro-batches so far."""
        known = dict(zip(self.rivals, self._ratios or (), strict=False))
        if all(known.get(by) for by in rivals):
            self._ratios = tuple(known[by] / known[rivals[0]] for by in rivals)
        else:
            self._ratios = None
        self.rivals = rivals

    def _take_without_training(self, quiet: Finding | None, found: Finding | None, error: Exception | None) -> None:
        """Adopt the result of evaluation mode, because in training nothing fits or the comparison failed."""
        weighed = self.kind not in (LossKind.SCALED, LossKind.SUM, LossKind.MIXED) and not self.is_claimed
        fits = quiet is not None and quiet.is_informative and bool(quiet.rivals)
        compared = [each for each in (quiet, found) if each is not None and each.is_informative and not each.draws]
        if weighed and not fits and any(each.counts_empty for each in compared):
            return self.sees_loss_without_items()
        self.is_additive, self.reason = False, "the loss of a batch is not made of the losses of its samples"
        if error is not None:
            text = (str(error).splitlines() or [""])[0][:200]
            self.reason = f"a part of a batch has no loss of its own: {text}"
        elif found is not None and found.draws:
            self.reason = "the loss uses random numbers in training, besides dropout"
        if weighed and quiet is not None and fits:
            self.rivals, self.kind = quiet.rivals, _kind_of(quiet.rivals[0])
        elif self.kind is LossKind.MIXED and not self.is_claimed:
            self.rivals = (Denominator(SAMPLES),)
        elif weighed:  # like a hand-written loop: the mean over micro-batches
            self.rivals, self.kind = (Denominator(SAMPLES),), LossKind.OTHER
        if (found is None and fits) or (found is not None and not found.draws):
            self.trouble = notices.COUPLED.format(self.denominator.described())
        elif not fits:
            self.trouble = f"{self.reason}. It is weighted by {self.denominator.described()}"

    def _warn_about_assumption(self, batches: list[Any]) -> None:
        """Warn about an assumption if the alternative would weight these micro-batches differently."""
        if self.kind not in (LossKind.MEAN, None) or self.rivals:
            return
        counts = [self.items_in(batch) for batch in batches]
        if all(isinstance(count, int) for count in counts) and len(set(counts)) > 1:
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
            self.trouble = notices.IS_DIVIDED

    def give_up(self, reason: str) -> None:
        """End the inference, keeping the assumptions."""
        if self._looks < LOOKS:
            self._looks, self.reason = LOOKS, reason
            self.trouble = f"the loss is not tested: {reason}. It is weighted by {self.denominator.described()}"

    def keep_weights_of(self, before: LossFindings) -> None:
        """If no denominator fits after a change of the model, keep the weights that fitted before."""
        if self.kind is LossKind.OTHER and before.kind not in (None, LossKind.OTHER):
            self.kind, self.rivals = before.kind, before.rivals[:1]  # a coupled loss does not distinguish denominators
            self.trouble = notices.COUPLED.format(self.denominator.described())

    def sees_loss_without_items(self) -> None:
        """Record that a micro-batch without items has a loss: it is not a mean over items, so samples are used."""
        self.rivals, self.kind = (Denominator(SAMPLES),), LossKind.SAMPLES
        self.is_additive, self.reason = False, "a batch without label tokens has a nonzero loss"
        self.trouble = notices.WITHOUT_ITEMS


_is_same = partial(isclose, rel_tol=1e-12)


def _kind_of(by: Denominator) -> LossKind:
    return {SAMPLES: LossKind.SAMPLES, NOTHING: LossKind.TOTAL}.get(by.what, LossKind.MEAN)


def _is_several(batches: Any) -> bool:
    """Whether this is a list of micro-batches, not one micro-batch that is a list of tensors."""
    return type(batches) is list and bool(batches) and isinstance(batches[0], (Mapping, list, tuple))
