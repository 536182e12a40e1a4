"""The output layer for the collator's batches: with the fused loss, in CUDA graphs, or with a padded number of classes.

For models whose samples cannot be regrouped, such as speech to text, where the logits are the largest tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..compile.region import MODEL
from ..fused_loss.lazy_logits import HEAD, PendingHead
from ..output_layer import PADDED, PaddedHead, ReplacedHead, output_head, padded_classes
from ..proof.prober import Proof, ProofRefused, Reference
from ..proof.prover import Prover
from ..training_setup import TrainingSetup
from .choice import LARGE_VOCABULARY, same
from .decision import COLLATED, SpeedPlan

HEAD_DEVICES = ("cuda",)
"""Where it helps: a CPU has no slow kernels for odd numbers of classes."""


class HeadChoice:
    """Decides how the output layer is computed, after everything else of the plan."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self._prover = Prover(setup)
        self._reference: Reference | None = None

    def choose(self, plan: SpeedPlan, batches: Sequence[Any]) -> ReplacedHead | None:
        """The output layer of batches as collated, proved on this update, if there is one; the plan records it."""
        head = self._large_head()
        if head is None or plan.layout != COLLATED or plan.linear_loss or plan.region == MODEL:
            return None
        if not plan.graphed and not plan.region and self._setup.level != "max":  # a run too short for anything
            return None
        try:
            return self._fused(plan, head, batches) or self.padded(plan, lambda each: self._proved(plan, each, batches))
        finally:
            self._reference = None  # its gradients are as large as the model

    def _large_head(self) -> nn.Linear | None:
        """The output layer, if its logits are large."""
        setup, head = self._setup, output_head(self._setup.model)
        if head is None or setup.device.type not in HEAD_DEVICES:
            return None
        return head if head.weight.shape[0] >= LARGE_VOCABULARY or setup.level == "max" else None

    def _fused(self, plan: SpeedPlan, head: nn.Linear, batches: Sequence[Any]) -> PendingHead | None:
        """The fused loss in graphs, for all targets: how many are ignored differs, and a graph has constant shapes."""
        if not plan.graphed or any(choice.name == HEAD for choice in plan.choices):
            return None
        pending = PendingHead(head)
        proof = self._proved(plan, pending, batches)
        if proof.accepted and pending.logits_were_used:
            proof.refuse("the logits are used outside the loss")
        plan.linear_loss = proof.accepted
        self._note(plan, HEAD, proof, f"{head.weight.shape[0]:,} classes, of all targets")
        return pending if proof.accepted else None

    def padded(self, plan: SpeedPlan, prove: Callable[[ReplacedHead], Proof]) -> PaddedHead | None:
        """The layer with a padded number of classes, if that of the model has slow kernels in half precision."""
        head = self._large_head()
        classes = 0 if head is None else padded_classes(head.weight)
        if head is None or classes == head.weight.shape[0] or not self._setup.computes_half:
            return None
        if self._setup.why_only_grouped is not None:  # the user's code gets the logits, and may need them contiguous
            return None
        padded = PaddedHead(head)
        proof = prove(padded)
        plan.padded_head = proof.accepted
        self._note(plan, PADDED, proof, f"{head.weight.shape[0]:,} classes are computed as {classes:,}")
        return padded if proof.accepted else None

    def _proved(self, plan: SpeedPlan, head: ReplacedHead, batches: Sequence[Any]) -> Proof:
        """Compare loss, gradients and state of the update, in the precision of training on GPUs."""
        prover = self._prover
        try:
            self._reference = self._reference or prover.update(None, batches, sparing=plan)
        except ProofRefused as reason:
            return Proof(head.name, has_no_reference=True).refuse(str(reason))
        candidate = prover.candidate(head.name, plan, None, head, more=prover.sparing(plan))
        return prover.prove_update(candidate, self._reference)

    def _note(self, plan: SpeedPlan, name: str, proof: Proof, what: str) -> None:
        if proof.accepted:
            plan.made_for = self._setup.described()
        plan.note(name, proof.accepted, f"{what}; {same(proof)}" if proof.accepted else proof.reason, proof.numbers)
