"""What is known of a loss: which targets it counts, its denominator, and whether it is divided already.

The values are given (by the user, or by a library's model) or inferred from batches, in inference.py.
"""

from __future__ import annotations

from functools import partial
from math import isclose
from typing import Any

from . import messages
from .denominator import SAMPLES, Denominator
from .targets import LossKind, count_samples, count_targets

LOOKS = 16
"""Most tests of a loss; after that, the first assumptions are kept."""
WATCHED = 32
"""Updates in each of which a loss is tested after it has changed by itself."""


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
        """The id of the padding token."""
        self._guessed_shift = guessed_shift
        self._shift = shift
        """Whether the loss ignores the first target of each row, as that of next tokens does; None while unknown."""
        self.watched_until = 0
        """The update up to which the loss is tested in each one, because it has changed by itself."""
        self.is_postponed = False
        """Whether the last test that was due is to be made in the next update of several micro-batches."""
        self._looks = 0
        """Number of tests so far."""
        self._knows_division = False
        self._ratios: tuple[float, ...] | None = None
        """The counts of the possible denominators in the micro-batches so far, relative to those of the first one."""
        self._may_join: bool | None = None
        """Whether batches may be padded to be joined, as far as these batches show it."""

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
        self.trouble = messages.MAY_BE_EITHER.format(*(by.described() for by in self.rivals[:2]))
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

    def items_in(self, batch: Any) -> Any:
        """The targets of a batch, or None if it has no labels."""
        return count_targets(batch, self.label_names, shifted=self.shifts)

    def weight_in(self, batch: Any) -> Any:
        """The weight of a batch's mean loss."""
        count = self.denominator.count(batch, self.label_names)
        return count_samples(batch) if count is None else count

    # ---- conclusions without a comparison ---------------------------------------------------------------------------

    def record_mean_over_samples(self) -> None:
        """Record that the loss is the mean over samples, which is known without a test."""
        self.kind, self.rivals = LossKind.SAMPLES, (Denominator(SAMPLES),)
        self.is_additive, self.reason, self._shift = True, "", False

    def record_loss_without_items(self) -> None:
        """Record that a micro-batch without items has a loss: it is not a mean over items, so samples are used."""
        self.rivals, self.kind = (Denominator(SAMPLES),), LossKind.SAMPLES
        self.is_additive, self.reason = False, "a batch without label tokens has a nonzero loss"
        self.trouble = messages.WITHOUT_ITEMS

    def keep_weights_of(self, before: LossFindings) -> None:
        """If no denominator fits after a change of the model, keep the weights that fitted before."""
        if self.kind is LossKind.OTHER and before.kind not in (None, LossKind.OTHER):
            self.kind, self.rivals = before.kind, before.rivals[:1]  # a coupled loss does not distinguish denominators
            self.trouble = messages.COUPLED.format(self.denominator.described())

    def record_change(self, before: LossFindings, update: int) -> None:
        """Record that the loss has another denominator than when it was last tested, without a change of the model."""
        self.watched_until = update + WATCHED
        if self.is_additive and self.trouble is None:
            self.trouble = messages.HAS_CHANGED.format(self.denominator.described(), before.denominator.described())

    def give_up(self, reason: str) -> None:
        """End the inference, keeping the assumptions."""
        if self._looks < LOOKS:
            self._looks, self.reason = LOOKS, reason
            self.trouble = f"the loss is not tested: {reason}. It is weighted by {self.denominator.described()}"

    # ---- state ------------------------------------------------------------------------------------------------------

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
            "watched_until": self.watched_until,
            "postponed": self.is_postponed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kind = None if state["kind"] is None else LossKind[state["kind"]]
        self._shift, self.is_additive, self.reason = state["shift"], state["additive"], state["reason"]
        self.divides, self._looks = state["divides"], state["looks"]
        self.rivals = tuple(Denominator(**each) for each in state["rivals"])
        self.watched_until, self.is_postponed = state.get("watched_until", 0), state.get("postponed", False)
        ratios = state["ratios"] or ()
        self._ratios = tuple(ratios) if len(ratios) == len(self.rivals) and ratios else None


_is_same = partial(isclose, rel_tol=1e-12)
