"""Making the plan of a run: which candidates there are, which of them are proved, why the others are not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from .candidates import Layout, make_layout, needs_half_precision
from .layouts import Limits
from .pending import PendingHead
from .plan import BIASED, FLAT, GROUPED, IN_GROUPS, LAYOUTS, UNMASKED, UNPADDED, SpeedPlan, overhead_in_tokens
from .probe import Candidate, Prober, Proof, Reference, Refused
from .samples import SOURCE, Samples, few_of
from .situation import Situation

PROBE_SAMPLES, PROBE_TOKENS = 4, 256
LARGE_VOCABULARY = 8192
"""Classes from which on logits are worth leaving out."""


class Decision:
    """Tries candidates on a few samples and notes in the plan what came of each."""

    def __init__(self, situation: Situation, samples: Samples) -> None:
        self._here = situation
        self._samples = samples
        self.plan = SpeedPlan(made_for=situation.described())
        self.layout: Layout | None = None
        self.head: PendingHead | None = None
        self.reference: Reference | None = None
        """None when the path as it is could not be compared with anything."""
        self._prober = Prober(situation.model, situation.loss_of, untouched=situation.untouched)

    def make(self, *, padding: float, micro_batches: int = 1) -> SpeedPlan:
        """The plan; `padding` is the part of the tokens that is padding, as far as it was seen."""
        here, plan = self._here, self.plan
        plan.overhead = overhead_in_tokens(here.modules, here.operations_per_token, here.device.type)
        plan.round_to, plan.fill = (8, True) if here.on_gpu else (1, False)
        few = few_of(self._samples, PROBE_SAMPLES, PROBE_TOKENS)
        try:
            with self._prober.quiet():
                self.reference = self._prober.reference(few, [here.put(few.padded())])
            self._choose_layout(self.reference, padding, micro_batches)
            self._choose_head(self.reference)
        except Refused as reason:
            plan.note("layouts", False, str(reason))
        return plan

    # ---- layouts ----------------------------------------------------------------------------------------------------

    def _choose_layout(self, reference: Reference, padding: float, micro_batches: int) -> None:
        tokens = self._samples.real_tokens // micro_batches
        if padding > 0:
            gain = f"{padding:.0%} of the tokens were padding"
        elif self._samples.share_rows():
            gain = "the rows hold several samples already"
        elif micro_batches > 1 and tokens < self.plan.overhead:
            gain = f"{micro_batches} micro-batches of {tokens:,} tokens take longer to launch than to compute"
        else:
            self.plan.note("layouts", False, "there is too little padding to leave out")
            return
        for name in LAYOUTS if padding > 0 else (FLAT,):
            layout = self._offered(name)
            if isinstance(layout, str):
                self.plan.note(name, False, layout)
                continue
            candidate = Candidate(name, self._laying(layout), self._together(layout), layout.for_model, layout.active)
            proof = self._proved(candidate, reference)
            if not proof.accepted:
                self.plan.note(name, False, proof.reason, proof.numbers)
                continue
            self.layout, self.plan.layout = layout, name
            self.plan.note(name, True, f"{gain}; {_same(proof)}", proof.numbers)
            return

    def _offered(self, name: str) -> Layout | str:
        """The layout, or why it is not even tried."""
        here = self._here
        if name not in IN_GROUPS and here.only_grouped is not None:
            return here.only_grouped
        if name not in (GROUPED, BIASED) and here.is_pair:
            return "samples are pairs of a source and a target"
        if name == BIASED and not here.on_gpu:
            return "it is of use on GPUs only"
        if name == UNMASKED and not here.shifts():
            return "the model is not known to predict next tokens"
        values = self._samples.per_sample()
        if name == FLAT and values:
            return f"{values[0]!r} has one value per sample, and a row holds many samples"
        if name == UNPADDED and "attention_mask" not in self._samples.tensors:
            return "there is no attention_mask"
        weights = next((p for p in here.model.parameters() if p.is_floating_point()), None)
        if needs_half_precision(name, here.device.type, weights, here.computes_half):
            return "its kernels compute in half precision only; bf16=True makes it possible"
        return make_layout(name, here.model)

    def _laying(self, layout: Layout | None) -> Callable[[Samples], list[Any]]:
        """Samples in two micro-batches or more, so that dividing them is part of what is proved."""
        most = PROBE_SAMPLES * PROBE_TOKENS // 2
        return lambda samples: self._laid(layout, samples, Limits(budget=min(most, _half_of(samples)), overhead=0))

    def _together(self, layout: Layout | None) -> Callable[[Samples], list[Any]] | None:
        """Samples in one micro-batch, so that each could see all others; None if they stay as they are."""
        if layout is None:
            return None
        much = 1 << 40
        return lambda samples: self._laid(layout, samples, Limits(budget=much, overhead=much))

    def _laid(self, layout: Layout | None, samples: Samples, limits: Limits) -> list[Any]:
        here, plan = self._here, self.plan
        if layout is None:
            return [here.put(samples.padded())]
        widest = int(samples.axes[SOURCE].width) if SOURCE in samples.axes else 0
        limits = replace(limits, round_to=plan.round_to, few_shapes=plan.few_shapes, width=widest)
        laid = layout.lay(samples, limits, shifts=here.shifts(), fill=plan.fill)
        return [here.put(batch) for batch in laid.batches]

    def _proved(self, candidate: Candidate, reference: Reference) -> Proof:
        with self._prober.quiet():
            proof = self._prober.prove(candidate, reference)
        if not (proof.accepted and self._here.on_gpu and self._here.computes_half):
            return proof
        with self._prober.quiet(whole=False), self._here.as_trained():
            half = self._prober.prove_in_half(candidate, reference)
        half.numbers = {**proof.numbers, **half.numbers}
        return half

    # ---- the loss without logits ------------------------------------------------------------------------------------

    def _choose_head(self, reference: Reference) -> None:
        head = output_head(self._here.model)
        if head is None:
            found = named_head(self._here.model)
            if found is not None:
                kind = f"{type(found).__module__.partition('.')[0]}'s {type(found).__name__}"
                self.plan.note("loss without logits", False, f"its output layer is {kind}, not a plain nn.Linear")
            return
        if head.weight.shape[0] < LARGE_VOCABULARY and self._here.level != "max":
            self.plan.note("loss without logits", False, f"{head.weight.shape[0]:,} classes are few")
            return
        pending = PendingHead(head)
        proof = self._proved(self._with("loss without logits", pending), reference)
        if proof.accepted and pending.logits_were_used:
            proof.refuse("its logits are used besides the loss")
        if proof.accepted:
            self.head, self.plan.linear_loss = pending, True
        reason = f"{head.weight.shape[0]:,} classes; {_same(proof)}" if proof.accepted else proof.reason
        self.plan.note(proof.name, proof.accepted, reason, proof.numbers)

    # ---- graphs and recomputing -------------------------------------------------------------------------------------

    def prove_few_shapes(self) -> Proof:
        """Whether the model is the same when its rows are filled up to a few lengths, as the plan says now."""
        assert self.reference is not None
        return self._proved(self._with("rows of a few lengths", self.head), self.reference)

    def prove_recomputing(self, policy: str) -> Proof:
        """Whether the model is the same when activations are recomputed, with all else that was chosen in place."""
        assert self.reference is not None
        candidate = self._with(policy, self.head, lambda stack: stack.callback(self._here.recompute(policy)))
        return self._proved(candidate, self.reference)

    def _with(
        self, name: str, pending: PendingHead | None, more: Callable[[ExitStack], Any] = lambda stack: None
    ) -> Candidate:
        """A candidate on top of the chosen layout."""
        layout = self.layout

        def install() -> Any:
            with ExitStack() as stack:
                if pending is not None:
                    pending.install(always=True)
                    stack.callback(pending.remove)
                if layout is not None:
                    stack.enter_context(layout.active())
                more(stack)
                return stack.pop_all()

        def prepare(batch: Any) -> Any:
            if pending is not None:
                targets = self._here.targets_in(batch)
                known = targets is not None and knows_count(self._here)
                pending.count = int(targets) if known else None  # as training tells it
            return batch if layout is None else layout.for_model(batch)

        return Candidate(name, self._laying(layout), self._together(layout), prepare, install)


def knows_count(here: Situation) -> bool:
    """Whether the first loss a model computes is sure to be that of the labels of the batch, as they are there."""
    model = here.model
    if type(model).__module__.startswith("peft."):
        model = model.get_base_model()  # type: ignore[operator]
    own = [name for name in ("forward", "loss_function", "_loss_function") if name in vars(model)]
    return here.only_grouped is None and not own and type(model).forward.__module__.startswith("transformers.")


def _half_of(samples: Samples) -> int:
    """Tokens of half the samples, or of the longest."""
    lengths = np.sum([axis.lengths for axis in samples.axes.values()], axis=0)
    return max(int(lengths.max()), -(-int(lengths.sum()) // 2))


def named_head(model: nn.Module) -> Any:
    """The layer that turns hidden states into logits over a vocabulary, if the model names it."""
    find = getattr(model, "get_output_embeddings", None)
    return find() if callable(find) else None


def output_head(model: nn.Module) -> nn.Linear | None:
    """The same, if it is a plain linear layer."""
    head = named_head(model)
    return head if type(head) is nn.Linear else None


def _same(proof: Proof) -> str:
    return f"same loss and gradient (within {max(proof.numbers['gradient'], 1e-16):.0e})"
