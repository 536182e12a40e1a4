"""EvaluationEngine: lays out the samples of several evaluation batches together, by a plan that it proves first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from ..fused_loss.lazy_logits import HEAD
from ..layouts.candidates import Layout
from ..layouts.reading import SampleReader
from ..layouts.rows import Limits, longest_row, padded_tokens
from ..layouts.samples import NoSamples, OddSamples, Samples
from ..memory.token_budget import limits_for
from ..model_stamp import BUFFER, ModelStamp, besides
from ..output_layer import ReplacedHead
from ..planner.decision import (
    COLLATED,
    FLAT,
    GROUP_TOKENS,
    IN_ROWS,
    ROW_TOKENS,
    SpeedPlan,
    is_worth_it,
    seconds,
)
from ..proof.guard import Coverage, Seen
from ..proof.prober import Proof, ProofRefused
from ..proof.prover import knows_count
from .evaluation_setup import EvaluationSetup
from .pieces import Piece, Unserved, collated, pieces_of
from .proof import EvaluationDecision, EvaluationProver

WINDOW_TOKENS = {"cpu": 64 * 1024, "cuda": 16 * ROW_TOKENS}
"""Padded tokens of the batches that are laid out together."""
WINDOW_BATCHES = 256
"""Most batches that are laid out together."""
WORTH_SECONDS = 1.0
"""Estimated seconds of computing from which an evaluation on a GPU is worth a proof."""
LOOKS = 4
"""Windows inspected before a reason not to lay them out is final."""
HARMLESS = ("training", BUFFER)
"""Changes of a model between evaluations after which a plan is kept, besides `requires_grad`: training makes them too.
"""
MOST_PROOFS = 16
"""How many windows may be proved again because their inputs are new."""


class EvaluationEngine:
    """The plan of evaluations of one kind: which layout and loss they use, and for which inputs that is proved."""

    def __init__(
        self,
        setup: EvaluationSetup,
        *,
        announce: Callable[[SpeedPlan], None],
        warn: Callable[[str], None],
        log: Callable[[str], None],
    ) -> None:
        self._setup, self._announce, self._warn, self._log = setup, announce, warn, log
        self.plan = SpeedPlan()
        self.is_decided = False
        self._layout: Layout | None = None
        self._head: ReplacedHead | None = None
        self._coverage = Coverage()
        self._reader = SampleReader(setup, set(), tell=log)
        self._looks = self._windows = self._proofs = 0
        self._must_compare = False
        self._stamp = ModelStamp(setup.model)

    @property
    def is_off(self) -> bool:
        """Whether the plan is final and changes nothing."""
        return self.is_decided and self._layout is None and self._head is None

    @property
    def keeps_outputs(self) -> bool:
        return self._setup.keeps_outputs

    @property
    def window_tokens(self) -> int:
        """Padded tokens after which a window is complete."""
        return WINDOW_TOKENS.get(self._setup.device.type, WINDOW_TOKENS["cuda"])

    def begin(self) -> None:
        """Start an evaluation: its first window is compared both ways, since the model may have changed."""
        self._windows = self._looks = 0
        if besides(self._stamp.changes(), HARMLESS) and self.is_decided:
            self._forget()
        self._must_compare = self.is_decided

    def _forget(self) -> None:
        """Clear the plan; the next window makes a new one."""
        self.plan, self.is_decided, self._layout, self._head = SpeedPlan(), False, None, None
        self._coverage, self._proofs = Coverage(), 0

    def pays(self, tokens: float) -> bool:
        """Whether it may pay off to lay out an evaluation of this many padded tokens."""
        if self.is_decided:
            return not self.is_off
        if self._looks >= LOOKS or not tokens:
            return False
        setup = self._setup
        return setup.insists or seconds(tokens * setup.operations_per_token, setup.device.type) >= WORTH_SECONDS

    # ---- windows ----------------------------------------------------------------------------------------------------

    def arrange(self, batches: Sequence[Any], times: float) -> list[Piece] | None:
        """The micro-batches of a window in the plan's layout; None if the collator's batches are kept.

        `times` is how many windows of this size are expected in all.
        """
        if not self.is_decided and self._looks < LOOKS:
            self._consider(batches, times)
        if not self.is_decided or self.is_off or self._setup.wants_test(list(batches)):
            return None
        try:
            samples = self._reader.read_to_lay(batches)
        except NoSamples as reason:
            self._log(f"speed: evaluation batches like these are computed as collated: {reason}")
            return None
        limits = limits_for(self.plan, self._setup, batches, samples)
        made = self._made(batches, samples, limits)
        if self._setup.wants_test(list(made)):
            return None  # sorted samples may have other weights than the batches
        if not self._is_covered(batches, samples, made) or not self._agrees_again(samples):
            return None
        return made

    def _made(self, batches: Sequence[Any], samples: Samples, limits: Limits) -> list[Piece]:
        if self._layout is None:
            return collated(batches)
        return pieces_of(self._layout, self.plan, samples, limits, shifts=self._setup.shifts())

    def inputs_of(self, piece: Piece, batch: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a micro-batch for the model, on the device; `batch` holds the tensors of the piece."""
        if self._head is not None:
            targets = self._setup.targets_in(piece)
            self._head.count = int(targets) if targets is not None and knows_count(self._setup) else None
        batch = self._setup.to_device(batch)
        return batch if self._layout is None else self._layout.for_model(batch)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Install the plan's attention and head around the forwards of a window."""
        reason = None if self._head is None else self._head.try_install()
        if reason is not None:
            self.switch_off(f"the output layer changed: {reason}")
        try:
            if self._layout is None:
                yield
            else:
                with self._layout.active():
                    yield
        finally:
            if self._head is not None:
                self._head.remove()

    def halve(self, batches: Sequence[Any]) -> bool:
        """Use micro-batches of half the size after memory ran out; returns whether that is possible."""
        if self._layout is None:
            return False
        samples = self._reader.read_to_lay(batches)
        budget = limits_for(self.plan, self._setup, batches, samples).budget
        longest = int(samples.lengths.max())
        if budget <= longest:
            return False
        self.plan.budget = max(longest, budget // 2)
        self._warn(f"out of memory: micro-batches of evaluations now have at most {self.plan.budget:,} tokens")
        return True

    def switch_off(self, reason: str) -> None:
        """Compute the collator's batches from now on."""
        name = self.plan.layout if self._layout is not None else HEAD
        plan = SpeedPlan(choices=self.plan.choices)
        for choice in plan.choices:
            choice.is_on, choice.reason = False, reason if choice.name == name else choice.reason
        if not plan.choices:
            plan.note("layouts", False, reason)
        self._settle(plan)

    # ---- validity ---------------------------------------------------------------------------------------------------

    def _is_covered(self, batches: Sequence[Any], samples: Samples, made: list[Piece]) -> bool:
        """Whether proofs cover the inputs of a window; new ones are proved on the batches that hold them."""
        if self._layout is None:
            return True
        news = self._coverage.news_in(self._seen(samples, made))
        if news is None:
            return True
        if self._proofs < MOST_PROOFS:
            self._proofs += 1
            proof = self._proved(_telling(batches, samples))
            if proof.accepted and self._coverage.news_in(self._seen(samples, made)) is None:
                return True
            news = f"{news}, and then {proof.reason}" if proof.reason else news
        self._log(f"speed: evaluation batches like these are computed as collated: {news}")
        return False

    def _seen(self, samples: Samples, made: list[Piece]) -> Seen:
        return Seen.of(samples, row=longest_row(made) if self.plan.layout == FLAT else 0)

    def _proved(self, batches: Sequence[Any]) -> Proof:
        """Compare some batches of a window both ways; what agrees is covered from now on."""
        prover, plan = EvaluationProver(self._setup), self.plan
        try:
            samples = self._reader.read_to_lay(batches)
            limits = limits_for(plan, self._setup, batches, samples)
            reference = prover.update(samples, batches, repeats=False)
        except (ProofRefused, NoSamples) as reason:
            return Proof(plan.layout).refuse(str(reason))
        candidate = prover.candidate(plan.layout, plan, self._layout, self._head, limits=limits)
        proof = prover.prove_update(candidate, reference)
        if proof.accepted and self._layout is not None:
            self._coverage.add(prover.covered(plan, self._layout, self._head, reference, limits))
        return proof

    def _agrees_again(self, samples: Samples) -> bool:
        """Compare a few samples both ways in the first window of an evaluation, and in the 8th, 16th, 32nd ..."""
        self._windows += 1
        is_turn = self._windows >= 8 and self._windows & (self._windows - 1) == 0
        if not is_turn and not (self._windows == 1 and self._must_compare):
            return True
        prover = EvaluationProver(self._setup)
        try:
            reference = prover.part(samples, self._windows)
        except Unserved as reason:
            return self._stop(str(reason))
        except ProofRefused as reason:  # for example because these samples have no targets
            self._windows -= 1  # the next window is compared instead
            self._log(f"speed: evaluation batches that cannot be compared are computed as collated: {reason}")
            return False
        candidate = prover.candidate(self.plan.layout, self.plan, self._layout, self._head)
        proof = prover.prove_part(candidate, reference)
        return proof.accepted or self._stop(proof.reason)

    def _stop(self, difference: str) -> bool:
        """Compute the collator's batches from now on, because a later comparison differed; returns False."""
        self._warn(
            f"speed: an evaluation differs from the collator's batches: {difference}. They are computed as collated "
            "from now on"
        )
        self.switch_off(f"a later comparison differed: {difference}")
        return False

    # ---- the plan ---------------------------------------------------------------------------------------------------

    def _consider(self, batches: Sequence[Any], times: float) -> None:
        """Make the plan as soon as a window allows a decision."""
        setup, self._looks = self._setup, self._looks + 1
        tokens = sum(map(_tokens_in, batches)) * times
        if not self.pays(tokens):
            self._looks -= 1  # this one shows nothing
            self._nothing("the evaluation is too small to benefit", is_final=False)
            return
        operations, batches = tokens * setup.operations_per_token, self._enough(batches)
        try:
            samples = self._reader.read_to_lay(batches)
        except NoSamples as reason:
            self._nothing(str(reason), is_final=not isinstance(reason, OddSamples) or self._looks >= LOOKS)
            return
        real, padded = samples.real_tokens, padded_tokens(batches, samples)
        saved = (1 - real / padded) * operations
        if not (setup.insists or setup.on_gpu or is_worth_it(1 - real / padded, saved, setup.device.type)):
            self._nothing(f"{1 - real / padded:.0%} of the tokens are padding, too little to benefit", is_final=False)
            return
        if not setup.learn(list(batches)):
            self._nothing(setup.why_not_additive() or "the denominator of the loss is unknown")
            return
        self._decide(batches, samples, 1 - real / padded)

    def _enough(self, batches: Sequence[Any]) -> Sequence[Any]:
        """The first batches of a window, with enough tokens for a proof of the longest rows."""
        wanted = ROW_TOKENS if self._setup.on_gpu else 4096
        ends = np.cumsum([_tokens_in(batch) for batch in batches])
        return batches[: max(2, 1 + int(np.searchsorted(ends, wanted)))]

    def _decide(self, batches: Sequence[Any], samples: Samples, padding: float) -> None:
        refused: dict[str, Proof] = {}
        while True:
            decision = EvaluationDecision(self._setup, samples, batches, refused)
            plan = decision.make(padding=padding, micro_batches=len(batches))
            self._set_budget(plan, batches, samples)
            found: Any = None
            if plan.layout != COLLATED or plan.linear_loss:
                found = decision.prove_update()
            if not isinstance(found, tuple):
                break
            what, proof = found
            if what not in (plan.layout, HEAD):
                self._nothing(proof.reason)
                return
            refused[what] = proof
        if found is not None:
            self._coverage = found
            if plan.layout == FLAT and self._setup.on_gpu:
                plan.budget = min(plan.budget, max(form.row for form in found.forms))
        self._settle(plan, decision.layout, decision.head)

    def _set_budget(self, plan: SpeedPlan, batches: Sequence[Any], samples: Samples) -> None:
        """Larger micro-batches than the collator's on a GPU: nothing is kept for a backward pass."""
        if not self._setup.on_gpu or plan.layout == COLLATED or self._setup.token_budget:
            return
        largest = max(padded_tokens([batch], samples) for batch in batches)
        has_logits = not plan.linear_loss and not self._setup.keeps_outputs and plan.layout == FLAT
        wanted = ROW_TOKENS if plan.layout in IN_ROWS else GROUP_TOKENS
        plan.budget = largest if has_logits and _classes(self._setup) > 16_384 else max(largest, wanted)

    def _nothing(self, reason: str, *, is_final: bool = True) -> None:
        plan = SpeedPlan()
        plan.note("layouts", False, reason)
        if is_final:
            self._settle(plan)
        else:
            self.plan = plan

    def _settle(self, plan: SpeedPlan, layout: Layout | None = None, head: ReplacedHead | None = None) -> None:
        self.plan, self._layout, self._head, self.is_decided = plan, layout, head, True
        self._stamp.settle()
        self._announce(plan)


def _tokens_in(batch: Any) -> int:
    ids = batch.get("input_ids") if isinstance(batch, dict) or hasattr(batch, "get") else None
    return ids.numel() if isinstance(ids, Tensor) else 0


def _classes(setup: EvaluationSetup) -> int:
    return int(getattr(getattr(setup.model, "config", None), "vocab_size", None) or 0)


def _telling(batches: Sequence[Any], samples: Samples) -> list[Any]:
    """The batches with the longest and the shortest sample, and the first."""
    lengths = samples.lengths
    ends = np.cumsum([len(piece.members) for piece in collated(batches)])
    places = {int(np.searchsorted(ends, place, side="right")) for place in (0, lengths.argmax(), lengths.argmin())}
    return [batches[place] for place in sorted(places)]
