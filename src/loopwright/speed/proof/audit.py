"""Auditing a plan during training: new inputs are proved again, and some updates are computed both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..device.prefetch import leaves
from ..layouts.candidates import Layout
from ..layouts.rows import Laid, Limits, longest_row, padded_tokens
from ..layouts.samples import Samples, place_of, rows_of
from ..output_layer import ReplacedHead
from ..planner.decision import ONE_ROW, SpeedPlan
from ..training_setup import TrainingSetup
from .guard import Coverage, Seen
from .prober import Proof, ProofRefused
from .prover import NOISE, WHOLE_TOKENS, Lengths, Prover

MOST_FAILURES = 3
"""Failed proofs after which updates with new inputs keep the collator's batches without being compared."""
MOST_PROOFS = 32
"""How many updates may be proved again because their inputs are new."""
EVERY = 4096
"""Every so many updates, one is compared as a whole, regardless of its size."""


class Verification:
    """Allows an update to be laid out if a proof covers it, and counts the comparisons."""

    def __init__(
        self,
        setup: TrainingSetup,
        plan: SpeedPlan,
        layout: Layout | None,
        head: ReplacedHead | None,
        *,
        tell: Callable[[str], None],
    ) -> None:
        self._setup, self._plan, self._layout, self._head, self._tell = setup, plan, layout, head, tell
        self.coverage = Coverage()
        self.updates = 0
        """Updates since the plan was made."""
        self.audits = 0
        """Updates that were computed both ways as a sample of all."""
        self.proofs = 0
        """Updates that were computed both ways because their inputs were new."""
        self.failures = 0
        """Of these, the ones that differed."""
        self.left = 0
        """Updates with new inputs that kept the collator's batches."""
        self._last_audit = 0
        """The last update that was audited and agreed."""
        self._refused = 0
        """Consecutive audits that had no reference, for example because the loss was not finite."""

    # ---- new inputs -------------------------------------------------------------------------------------------------

    def allows(self, batches: Sequence[Any], samples: Samples, laid: Laid, limits: Limits) -> bool:
        """Whether an update may be laid out: its inputs are covered by a proof, or it agrees when compared now."""
        assert self._layout is not None
        row = longest_row(laid.batches) if self._plan.layout in ONE_ROW else 0
        update = Seen.of(samples, row=row)
        news = self.coverage.news_in(update)
        if news is None or self._agrees(batches, samples, limits, update, news):
            return True
        self.left += 1
        return False

    def _agrees(self, batches: Sequence[Any], samples: Samples, limits: Limits, update: Seen, news: str) -> bool:
        if self.failures >= MOST_FAILURES or self.proofs >= MOST_PROOFS:
            self._tell(f"speed: steps with new inputs keep the collator's batches: {news}")
            return False
        self.proofs += 1
        if self._covers_lengths(batches, samples, limits, update):
            return True
        proof = self.prove(batches, samples, limits, covers=True)
        if not proof.accepted:
            self.failures += 1
            self._tell(f"speed: steps like this one keep the collator's batches: {news}, and then {proof.reason}")
        return proof.accepted

    def _covers_lengths(self, batches: Sequence[Any], samples: Samples, limits: Limits, update: Seen) -> bool:
        """Whether only lengths are new, and its longest, its shortest and a usual sample agree: seconds are saved.

        The micro-batch of the longest sample is compared too, as it is: a stretched sample has another length, and the
        loss may depend on the number of rows. Where samples of these lengths have been made and compared before, its
        loss is enough.
        """
        form, plan = self.coverage.with_new_lengths(update), self._plan
        if form is None:
            return False
        longest = {key: max(length, form.stretched.get(key, 0)) for key, length in form.longest.items()}
        lengths = Lengths(form.shortest, longest)
        was_made = lengths.reach(update)
        if not was_made:
            prover = self._prover()
            candidate = prover.candidate(plan.layout, plan, self._layout, self._head)
            found = prover.prove_lengths(candidate, samples, batches)
            if found is None:
                return False
            lengths = lengths.and_those(found)
            if not lengths.reach(update):
                return False
        if not self._longest_agrees(batches, samples, limits, loss_only=was_made):
            return False
        form.add(update)  # also its padding, if there was none before
        form.cover(lengths.shortest, lengths.longest, update.longest)
        return True

    def _longest_agrees(self, batches: Sequence[Any], samples: Samples, limits: Limits, *, loss_only: bool) -> bool:
        sizes = [rows_of(batch) for batch in batches]
        place = place_of(samples.longest_with_targets(), sizes)
        part, prover, plan = samples.in_batches([place], sizes), self._prover(), self._plan
        if loss_only:
            more = prover.sparing(plan)
            candidate = prover.candidate(plan.layout, plan, self._layout, self._head, limits=limits, more=more)
            return prover.prove_loss(candidate, part, [batches[place]], plan).accepted
        try:
            reference = prover.update(part, [batches[place]], repeats=False, sparing=plan)
        except ProofRefused:
            return False
        candidate = prover.candidate(plan.layout, plan, self._layout, self._head, limits=limits)
        return prover.prove_update(candidate, reference).accepted

    def prove(self, batches: Sequence[Any], samples: Samples | None, limits: Limits | None, *, covers: bool) -> Proof:
        """Compare a whole update with the normal path; with `covers`, inputs that agree are covered from now on."""
        prover, plan = self._prover(), self._plan
        spared = plan if samples is None else None  # a layout is compared as it is used
        try:
            reference = prover.update(samples, batches, repeats=covers, sparing=spared)
        except ProofRefused as reason:
            return Proof(plan.layout, has_no_reference=True).refuse(str(reason))
        more = prover.sparing(plan) if spared is not None else lambda stack: None
        candidate = prover.candidate(plan.layout, plan, self._layout, self._head, limits=limits, more=more)
        proof = prover.prove_update(candidate, reference)
        if proof.accepted and covers and self._layout is not None and samples is not None:
            assert limits is not None
            self.coverage.add(prover.covered(plan, self._layout, self._head, reference, limits))
        return proof

    def _prover(self) -> Prover:
        return Prover(self._setup, noise=self._plan.number(NOISE))

    # ---- audits -----------------------------------------------------------------------------------------------------

    def audit(self, batches: Sequence[Any], samples: Samples | None, limits: Limits | None) -> Proof | None:
        """Count an update and, if it is due, compare it both ways; returns the proof if it failed, else None."""
        self.updates += 1
        tokens = _numbers_in(batches) if samples is None else padded_tokens(batches, samples)
        if not self._refused and not is_turn(self.updates, is_small=tokens <= WHOLE_TOKENS):
            return None
        if samples is None or tokens <= WHOLE_TOKENS or self.updates % EVERY == 0:
            proof = self.prove(batches, samples, limits, covers=False)
        else:
            proof = self._prove_part(samples)
        if proof.has_no_reference and self._refused < MOST_FAILURES:
            self._refused += 1  # try again with the next update
            return None
        self.audits += 1
        self._refused = 0
        if not proof.accepted:
            return proof
        self._last_audit = self.updates
        return None

    @property
    def checks(self) -> dict[str, int]:
        """The counts, under the names used in the report."""
        return {"laid out": self.updates, "computed both ways": self.audits, "proved again": self.proofs,
                "with new inputs not laid out": self.left}  # fmt: skip

    @property
    def since(self) -> int:
        """Updates since the last one that agreed."""
        return self.updates - self._last_audit

    def _prove_part(self, samples: Samples) -> Proof:
        prover, plan = self._prover(), self._plan
        try:
            reference = prover.part(samples, self.updates)
        except ProofRefused as reason:
            return Proof(plan.layout, has_no_reference=True).refuse(str(reason))
        candidate = prover.candidate(plan.layout, plan, self._layout, self._head)
        return prover.prove_part(candidate, reference)

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name) for name in ("updates", "audits", "proofs", "failures", "left")}
        return {**numbers, "last_audit": self._last_audit, "coverage": self.coverage.as_list()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("updates", "audits", "proofs", "failures", "left"):
            setattr(self, name, state.get(name, 0))
        self._last_audit = state.get("last_audit", 0)
        self.coverage.load(state.get("coverage", []))


def _numbers_in(batches: Sequence[Any]) -> int:
    """The tokens of micro-batches, or the numbers of their largest tensor if they hold more than tokens."""
    tensors = [leaves(batch) for batch in batches]
    return sum(max((tensor.numel() for tensor in each), default=0) for each in tensors)


def is_turn(update: int, *, is_small: bool) -> bool:
    """Whether an update is compared both ways: often at first, later once every `EVERY` updates."""
    if update % EVERY == 0:
        return True
    if update > EVERY or update < 2:
        return False
    return update & (update - 1) == 0 if is_small else update in (8, 1024)
