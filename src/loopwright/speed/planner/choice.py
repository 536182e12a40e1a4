"""Making the plan of a run: candidates, their proofs, and the reasons why others are rejected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from ..fused_loss.lazy_logits import HEAD, PendingHead
from ..layouts.candidates import Layout, make_layout, needs_half_precision
from ..layouts.rows import Limits
from ..layouts.samples import Samples
from ..linear_products import ONEDNN
from ..memory.token_budget import MeasuredMemory, limits_for
from ..output_layer import ReplacedHead, named_head, output_head
from ..proof.guard import Coverage
from ..proof.prober import Candidate, Proof, ProofRefused, Reference
from ..proof.prover import Prover
from ..training_setup import TrainingSetup
from .decision import (
    BIASED,
    FLAT,
    FOR_PAIRS,
    GRAPHS,
    IN_GROUPS,
    LAYOUTS,
    ONE_ROW,
    PAIRED,
    UNMASKED,
    UNPADDED,
    SpeedPlan,
    overhead_in_tokens,
)

LARGE_VOCABULARY = 8192
"""Number of classes from which the fused loss is worth using."""


class Decision:
    """Compares candidates on an update and records the result of each in the plan."""

    where = ""
    """Where candidates were compared on a few samples, if not on those of this update."""

    def __init__(
        self,
        setup: TrainingSetup,
        samples: Samples,
        batches: Sequence[Any],
        refused: Mapping[str, Proof],
    ) -> None:
        self._setup, self.samples, self.batches = setup, samples, batches
        self.refused = refused
        """Proofs that failed on a whole update, by name."""
        self.plan = SpeedPlan(made_for=setup.described())
        self.layout: Layout | None = None
        self.head: ReplacedHead | None = None
        self.prover = self._make_prover()
        self.references: list[Reference] = []
        """Empty if the normal path could not be used as a reference."""
        self.memory: MeasuredMemory | None = None
        """The memory of the model, once it is known."""

    def make(self, *, padding: float, micro_batches: int = 1, why_collated: str | None = None) -> SpeedPlan:
        """The plan; `padding` is the fraction of padding tokens, `why_collated` why the collator's batches are kept."""
        setup, plan = self._setup, self.plan
        plan.overhead = overhead_in_tokens(setup.modules, setup.operations_per_token, setup.device.type)
        plan.round_to, plan.fill = (8, True) if setup.on_gpu else (1, False)
        try:
            self.references = self._make_references()
            if why_collated is None:
                self._choose_layout(padding, micro_batches)
            else:
                plan.note("layouts", False, why_collated)
            self._choose_head()
        except ProofRefused as reason:
            self.references = []
            plan.note("layouts", False, str(reason))
        return plan

    # ---- layouts ----------------------------------------------------------------------------------------------------

    def _choose_layout(self, padding: float, micro_batches: int) -> None:
        tokens = self.samples.real_tokens // micro_batches
        if padding > 0:
            gain = f"{padding:.0%} of the tokens were padding"
        elif self.samples.share_rows():
            gain = "rows already hold several samples"
        elif micro_batches > 1 and tokens < self.plan.overhead:
            gain = f"{micro_batches} micro-batches of {tokens:,} tokens are bound by kernel launches"
        else:
            self.plan.note("layouts", False, "there is too little padding to remove")
            return
        for name in LAYOUTS if padding > 0 else (FLAT,):
            layout = self._offered(name)
            proof = Proof(name).refuse(layout) if isinstance(layout, str) else self._prove_layout(name, layout)
            if not proof.accepted or isinstance(layout, str):
                self.plan.note(name, False, proof.reason, proof.numbers)
                continue
            self.layout, self.plan.layout = layout, name
            self.plan.note(name, True, f"{gain}; {same(proof, self.where)}", proof.numbers)
            if layout.products.are_used and not self._setup.computes_half:
                self.plan.note(ONEDNN, True, "MKL's do not use the AVX-512 of this processor; part of that proof")
            return

    def _prove_layout(self, name: str, layout: Layout) -> Proof:
        if name in self.refused:
            return self.refused[name]
        return self.prover.prove_few(self.prover.candidate(name, self.plan, layout, None), self.references)

    def _offered(self, name: str) -> Layout | str:
        """The layout, or why it is not compared at all."""
        setup = self._setup
        if name not in IN_GROUPS and setup.why_only_grouped is not None:
            return setup.why_only_grouped
        if name not in FOR_PAIRS and setup.is_pair:
            return "samples are pairs of a source and a target"
        if name == PAIRED and not setup.is_pair:
            return "samples are not pairs of a source and a target"
        if name == BIASED and not setup.on_gpu:
            return "it only helps on GPUs"
        if name == UNMASKED and not setup.shifts():
            return "the model is not known to predict next tokens"
        values = self.samples.per_sample()
        if name in ONE_ROW and values:
            return f"{values[0]!r} has one value per sample, but a row holds many samples"
        if name == UNPADDED and "attention_mask" not in self.samples.tensors:
            return "there is no attention_mask"
        weights = next((p for p in setup.model.parameters() if p.is_floating_point()), None)
        if needs_half_precision(name, setup.device.type, weights, setup.computes_half):
            return "its kernels need half precision; set bf16=True"
        return make_layout(name, setup.model)

    # ---- the fused loss ------------------------------------------------------------------------------------

    def _choose_head(self) -> None:
        head = output_head(self._setup.model)
        if head is None:
            found = named_head(self._setup.model)
            if found is not None:
                kind = f"{type(found).__module__.partition('.')[0]}'s {type(found).__name__}"
                self.plan.note(HEAD, False, f"the output layer is {kind}, not a plain nn.Linear")
            return
        if head.weight.shape[0] < LARGE_VOCABULARY and self._setup.level != "max":
            self.plan.note(HEAD, False, f"with only {head.weight.shape[0]:,} classes it would not help")
            return
        pending = self._pending(head)
        proof = self.refused.get(HEAD) or self._prove(self._candidate(HEAD, pending))
        if proof.accepted and pending.logits_were_used:
            proof.refuse("the logits are used outside the loss")
        if proof.accepted:
            self.head, self.plan.linear_loss = pending, True
        reason = f"{head.weight.shape[0]:,} classes; {same(proof, self.where)}" if proof.accepted else proof.reason
        self.plan.note(HEAD, proof.accepted, reason, proof.numbers)

    @property
    def is_comparable(self) -> bool:
        """Whether the normal path could be used as a reference."""
        return bool(self.references)

    def _make_references(self) -> list[Reference]:
        return self.prover.references(self.samples)

    def _make_prover(self) -> Prover:
        return Prover(self._setup)

    def _pending(self, head: nn.Linear) -> PendingHead:
        return PendingHead(head)

    # ---- graphs and recomputing -------------------------------------------------------------------------------------

    def prove_few_shapes(self, head: ReplacedHead | None = None) -> Proof:
        """Whether results are unchanged when rows are padded to a few lengths, with the plan or another head."""
        return self._prove(self._candidate("rows of a few lengths", head or self.head))

    def prove_recomputing(self, policy: str) -> Proof:
        """Whether results are unchanged when activations are recomputed, with all other choices applied."""
        more = lambda stack: stack.callback(self._setup.recompute(policy))  # noqa: E731
        return self._prove(self._candidate(policy, self.head, more=more))

    def _prove(self, candidate: Candidate) -> Proof:
        return self.prover.prove_few(candidate, self.references)

    # ---- the whole update -------------------------------------------------------------------------------------------

    def prove_update(self) -> tuple[str, Proof] | Coverage:
        """What the proofs cover if the whole update agrees; else the name of what must be disabled, and its proof."""
        plan, layout = self.plan, self.layout
        self.references = []  # no longer needed: their gradients would be in memory beside the update
        try:
            reference = self._reference_update()
            proof, limits = self._proved_where_it_fits(reference)
        except ProofRefused as reason:
            return "layouts", Proof("layouts").refuse(str(reason))
        if not proof.accepted:
            return self._what_to_disable(proof, limits, reference)
        plan.add_numbers(HEAD if layout is None else plan.layout, proof.numbers)
        return self._covered(reference, limits)

    def _reference_update(self) -> Reference:
        return self.prover.update(self.samples, self.batches)

    def _proved_where_it_fits(self, reference: Reference) -> tuple[Proof, Limits]:
        """Prove the update with the plan's split, in smaller micro-batches as long as memory runs out."""
        plan = self.plan
        while True:
            limits = limits_for(plan, self._setup, self.batches, self.samples)
            proof = self.prover.prove_update(self._candidate(plan.layout, self.head, limits=limits), reference)
            longest = int(self.samples.lengths.max())
            if not proof.ran_out or self.layout is None or limits.budget <= longest:
                return proof, limits
            plan.budget = max(longest, limits.budget // 2)
            self._setup.free_memory()

    def _what_to_disable(self, proof: Proof, limits: Limits, reference: Reference) -> tuple[str, Proof]:
        """What must be disabled: groups as graphs, or the fused loss, if everything else agrees; else the layout."""
        if self.plan.few_shapes and self.plan.layout in IN_GROUPS:
            return GRAPHS, proof
        if self.head is None or self.layout is None:
            return self.plan.layout if self.head is None else HEAD, proof
        without = self.prover.prove_update(self._candidate(self.plan.layout, None, limits=limits), reference)
        return (HEAD, proof) if without.accepted else (self.plan.layout, without)

    def _covered(self, reference: Reference, limits: Limits) -> Coverage:
        coverage = Coverage()
        if self.layout is not None:
            coverage.add(self.prover.covered(self.plan, self.layout, self.head, reference, limits))
        return coverage

    def _candidate(
        self,
        name: str,
        head: ReplacedHead | None,
        *,
        limits: Limits | None = None,
        more: Callable[[ExitStack], Any] = lambda stack: None,
    ) -> Candidate:
        """A candidate on top of the chosen layout."""
        return self.prover.candidate(name, self.plan, self.layout, head, limits=limits, more=more)


def same(proof: Proof, where: str = "") -> str:
    """What a proof found to be the same, and how far apart it was at most, for the report."""
    what = next((name for name in ("gradient", "output") if name in proof.numbers), None)
    if what is None:
        return f"same loss{where} (within {max(proof.numbers['loss'], 1e-16):.0e})"
    return f"same loss and {what}{where} (within {max(proof.numbers[what], 1e-16):.0e})"
