"""What is proved, and when: candidates made from a plan, on a few samples, a whole update, and other lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..layouts.candidates import Layout
from ..layouts.positions import keeps_scores
from ..layouts.rows import PLACES, Limits, longest_row, padded_tokens
from ..layouts.samples import DECODED, IGNORED, SOURCE, Samples, few_of, rows_of
from ..memory.token_budget import limits_for
from ..output_layer import ReplacedHead
from ..planner.decision import IN_ROWS, ONE_ROW, SpeedPlan
from ..training_setup import TrainingSetup
from ..users_loss import users_loss_of
from .distance import half_tolerance, relative
from .gradients import share_equal
from .guard import STRETCH, Seen
from .prober import Candidate, Prober, Proof, ProofRefused, Reference, Setting, as_is, tolerance_of
from .sample_lengths import joined, longest_possible, shortened_to, stretched

PROBE_SAMPLES, PROBE_TOKENS = 4, 256
SHORT = 2
"""Tokens of the shortest sample compared."""
WHOLE_TOKENS = 2048
"""Padded tokens up to which a later update is compared as a whole; of larger updates, a few samples are compared."""


NOISE = "half_gradient_before"
"""The number of a proof that is the rounding error of the normal path in half precision."""


class Lengths(NamedTuple):
    """The shortest and the longest sample, by axis."""

    shortest: dict[str, int]
    longest: dict[str, int]

    def reach(self, update: Seen) -> bool:
        """Whether the lengths of an update are within these."""
        return all(
            self.shortest[key] <= update.shortest[key] and longest <= self.longest.get(key, 0)
            for key, longest in update.longest.items()
        )

    def and_those(self, other: Lengths) -> Lengths:
        """The range of both."""
        shortest = {key: min(length, other.shortest[key]) for key, length in self.shortest.items()}
        return Lengths(shortest, {key: max(length, other.longest[key]) for key, length in self.longest.items()})


class Prover:
    """Compares the path of a plan with the normal path."""

    _noise = 0.0
    """The rounding error of the normal path's gradient in half precision, as far as it was measured."""

    def __init__(self, setup: TrainingSetup, *, noise: float = 0.0) -> None:
        self._setup, self._noise = setup, noise
        self._prober = Prober(setup.model, setup.loss_of, sandbox=setup.sandbox)
        self._exact = tolerance_of(setup.model)

    # ---- references -------------------------------------------------------------------------------------------------

    def references(self, samples: Samples) -> list[Reference]:
        """The normal path on a few samples, in every mode in which candidates are compared on them."""
        evaluated, trained = (self.few(samples, train=train) for train in (False, True))
        share_equal(trained.outcome.gradient, evaluated.outcome.gradient)
        return [evaluated, trained]

    def few(self, samples: Samples, *, train: bool) -> Reference:
        """The normal path on a few samples; raises `ProofRefused` if it cannot be used as a reference."""
        chosen = few_of(samples, PROBE_SAMPLES, PROBE_TOKENS)
        return self._prober.reference(chosen, [self._setup.to_device(chosen.padded())], Setting(self._exact, train))

    def update(
        self, samples: Samples | None, batches: Sequence[Any], *, repeats: bool = True, sparing: SpeedPlan | None = None
    ) -> Reference:
        """The normal path on an update in train mode; in smaller batches than the collator's if memory runs out.

        `sparing`: the plan of a run whose updates need less memory; activations are recomputed to stay below that.
        """
        parts = len(batches)
        while True:
            try:
                on_device = [self._setup.to_device(batch) for batch in batches]
                with ExitStack() as stack:
                    if sparing is not None:
                        self.sparing(sparing)(stack)
                    return self._prober.reference(samples, on_device, self._setting(), repeats=repeats)
            except ProofRefused as refusal:
                if not refusal.ran_out or samples is None or parts >= len(samples):
                    raise
            # Outside of the handler: the error holds the frames, and with them the memory, of what failed.
            parts = min(2 * parts, len(samples))
            batches = [samples.select(rows).padded() for rows in np.array_split(np.arange(len(samples)), parts)]
            self._setup.free_memory()

    def part(self, samples: Samples, count: int) -> Reference:
        """The normal path on a few samples of an update; `count` varies which samples are chosen."""
        places = (np.arange(PROBE_SAMPLES) * len(samples) // PROBE_SAMPLES + count) % len(samples)
        chosen = samples.select(np.unique(places))
        return self._prober.reference(chosen, [self._setup.to_device(chosen.padded())], self._setting(), repeats=False)

    def _setting(self) -> Setting:
        """Train mode; on GPUs in the precision of training, in which the update is known to fit into memory."""
        setup = self._setup
        if setup.on_gpu and setup.computes_half:
            return Setting(half_tolerance(self._noise), train=True, whole=False, around=setup.as_trained)
        return Setting(self._exact, train=True)

    # ---- proofs -----------------------------------------------------------------------------------------------------

    def prove_few(self, candidate: Candidate, references: Sequence[Reference]) -> Proof:
        """Compare on a few samples, with every reference, and on GPUs also with half-precision kernels."""
        setup = self._setup
        numbers: dict[str, float] = {}
        for reference in references:
            proof = self._prober.prove(candidate, reference, divided=True)
            numbers = _worst(numbers, proof.numbers)
            if not proof.accepted:
                return replace(proof, numbers=numbers)
        if setup.on_gpu and setup.computes_half:
            proof = self._prober.prove_in_half(candidate, references[0], setup.as_trained)
            self._noise = max(self._noise, proof.numbers.get(NOISE, 0.0))
        return replace(proof, numbers={**proof.numbers, **numbers})

    def prove_part(self, candidate: Candidate, reference: Reference) -> Proof:
        """Compare on a few samples of an update, in small micro-batches."""
        return self._prober.prove(candidate, reference, divided=True)

    def prove_update(self, candidate: Candidate, reference: Reference) -> Proof:
        """Compare on a whole update, split as in training."""
        return self._prober.prove(candidate, reference, divided=False)

    def prove_loss(self, candidate: Candidate, samples: Samples, batches: Sequence[Any], plan: SpeedPlan) -> Proof:
        """Compare the loss alone on micro-batches of an update, split as in training; activations are not kept."""
        setting, proof = self._setting(), Proof(candidate.name)
        try:
            given = [self._setup.to_device(batch) for batch in batches]
            with ExitStack() as stack:
                self.sparing(plan)(stack)
                expected = self._prober.loss(given, as_is, setting)
                tolerance = self._prober.tolerance(given[:1], setting)
            with candidate.install():
                laid = batches if candidate.lay_update is None else candidate.lay_update(samples)
                found = self._prober.loss([self._setup.to_device(batch) for batch in laid], candidate.prepare, setting)
        except Exception as error:  # any error of the model on these inputs refuses the candidate
            return proof.refuse(f"{type(error).__name__}: {error}")
        proof.numbers["loss"] = relative(expected, found)
        proof.accepted = proof.numbers["loss"] <= tolerance.loss
        return proof if proof.accepted else proof.refuse(f"the loss differs by {proof.numbers['loss']:.0e}")

    def covered(
        self,
        plan: SpeedPlan,
        layout: Layout,
        head: ReplacedHead | None,
        reference: Reference,
        limits: Limits,
        *,
        longer_rows: bool = True,
    ) -> Seen:
        """What an update that agreed covers, extended by other lengths and longer rows if they agree too.

        The gradients of the reference are freed.
        """
        samples = reference.samples
        assert samples is not None
        seen = self.seen(plan, layout, samples, limits)
        row = seen.row
        most = min(2 * row, limits.budget) if self._setup.on_gpu else 2 * row
        longer = replace(limits, budget=max(limits.budget, 2 * most))
        together = self.candidate(plan.layout, plan, layout, head, limits=longer, more=self.sparing(plan))
        if row and longer_rows and (most <= row or self.prove_longer_rows(together, reference, most)):
            seen.row = max(row, most)
        reference.outcome.gradient = []  # compared for the last time: lengths have a reference of their own
        lengths = self.prove_lengths(self.candidate(plan.layout, plan, layout, head), samples, reference.batches)
        if lengths is not None:
            seen.cover(lengths.shortest, lengths.longest, dict(seen.longest))
        return seen

    def seen(self, plan: SpeedPlan, layout: Layout, samples: Samples, limits: Limits) -> Seen:
        """What an update that agreed covers by itself."""
        laid = layout.lay(samples, limits, shifts=self._setup.shifts(), fill=plan.fill)
        return Seen.of(samples, row=longest_row(laid.batches) if plan.layout in ONE_ROW else 0)

    def sparing(self, plan: SpeedPlan) -> Callable[[ExitStack], Any]:
        """Recomputes whole blocks on GPUs: what is not laid out, or not compiled, would need more than training."""
        spares = plan.activations == "none"
        return lambda stack: stack.enter_context(self._setup.sparing()) if spares else None

    def prove_lengths(self, candidate: Candidate, samples: Samples, batches: Sequence[Any]) -> Lengths | None:
        """The shortest and longest lengths that agree beyond those of the update; None if they cannot be compared.

        Three samples are compared, which together are as large as a micro-batch of the collator if that reaches more:
        of later updates with longer samples, only the loss is compared. If they differ, or are too large, the longest
        has twice its length.
        """
        lengths = samples.lengths
        order = np.argsort(lengths, kind="stable")
        has_targets = samples.have_targets()
        if not has_targets.any():
            return None
        order = order[has_targets[order]]
        most = longest_possible(self._setup.model)
        if most is None and self._setup.on_gpu:
            return None  # a position out of range would abort the process on a GPU instead of raising an error
        twice = STRETCH * int(lengths[order[-1]])
        for reached in sorted({twice, max(twice, self._reached(batches, samples))}, reverse=True):
            found = self._prove_stretched(candidate, samples, order, reached, most)
            if found is not None:
                return found
        return None

    def _reached(self, batches: Sequence[Any], samples: Samples) -> int:
        """The length at which three samples take about the memory of the collator's largest micro-batch.

        Attention may keep a score for every two tokens of a sample.
        """
        sizes = [(padded_tokens([batch], samples), rows_of(batch)) for batch in batches]
        if self._setup.on_gpu and not keeps_scores(self._setup.model):
            return max(tokens for tokens, _ in sizes) // 3
        return max(int(tokens / (3 * max(rows, 3)) ** 0.5) for tokens, rows in sizes)

    def _prove_stretched(
        self, candidate: Candidate, samples: Samples, order: np.ndarray, reached: int, most: int | None
    ) -> Lengths | None:
        """The lengths of the last of `order` at about `reached` tokens, of a usual one, and of the first, shortened."""
        try:
            times = -(-reached // int(samples.lengths[order[-1]]))
            long = stretched(samples.select(order[-1:]), times, reached if most is None else min(most, reached))
            short = shortened_to(samples.select(order[:1]), SHORT)
            usual = samples.select(order[len(order) // 2 : len(order) // 2 + 1])
            on_left = not all(axis.is_right_padded for axis in samples.axes.values())
            chosen = joined([long, usual, short], samples.paddings, on_left=on_left)
            batches = [self._setup.to_device(chosen.padded())]
            reference = self._prober.reference(chosen, batches, self._setting(), repeats=False)
            proofs = [self._prober.prove(each, reference, divided=True) for each in _apart_and_together(candidate)]
        except Exception:  # such samples cannot be made or run: real ones will be compared when they occur
            return None
        if not all(proof.accepted for proof in proofs):
            return None
        axes = chosen.axes.items()
        return Lengths(*({key: int(pick(axis.lengths)) for key, axis in axes} for pick in (np.min, np.max)))

    def prove_longer_rows(self, candidate: Candidate, reference: Reference, tokens: int) -> bool:
        """Whether a row of `tokens` tokens gives the same result: some samples are repeated without targets."""
        samples = reference.samples
        more = None if samples is None else with_silent(samples, samples, tokens)
        if more is None:
            return False
        return self._prober.prove(candidate, replace(reference, samples=more), divided=False).accepted

    # ---- candidates -------------------------------------------------------------------------------------------------

    def candidate(
        self,
        name: str,
        plan: SpeedPlan,
        layout: Layout | None,
        head: ReplacedHead | None,
        *,
        limits: Limits | None = None,
        more: Callable[[ExitStack], Any] = lambda stack: None,
    ) -> Candidate:
        """The path of a plan as a candidate for comparison; `more` enters further contexts while it is installed."""

        def install() -> Any:
            with ExitStack() as stack:
                if head is not None:
                    head.install(always=True)
                    stack.callback(head.remove)
                if layout is not None:
                    stack.enter_context(layout.active())
                more(stack)
                return stack.pop_all()

        def prepare(batch: Any) -> Any:
            if head is not None:
                targets = self._setup.targets_in(batch)
                known = targets is not None and knows_count(self._setup) and not plan.graphed
                head.count = int(targets) if known else None  # as in training
            return batch if layout is None else layout.for_model(batch)

        def lay_update(samples: Samples) -> list[Any]:
            return self._laid(plan, layout, samples, limits or self.limits(plan, samples))

        return Candidate(
            name,
            lambda samples: self._laid(plan, layout, samples, _halves(samples)),
            None if layout is None else lambda samples: self._laid(plan, layout, samples, _TOGETHER),
            None if layout is None else lay_update,
            prepare,
            install,
            _row_tokens if layout is not None and layout.name in IN_ROWS else None,
        )

    def limits(self, plan: SpeedPlan, samples: Samples) -> Limits:
        """Size limits of micro-batches, for callers that have only the samples of an update."""
        return limits_for(plan, self._setup, [samples.tensors], samples)

    def _laid(self, plan: SpeedPlan, layout: Layout | None, samples: Samples, limits: Limits) -> list[Any]:
        setup = self._setup
        if layout is None:
            return [setup.to_device(samples.padded())]
        widest = max(limits.width, int(samples.axes[SOURCE].width) if SOURCE in samples.axes else 0)
        limits = replace(limits, round_to=plan.round_to, few_shapes=plan.few_shapes, width=widest, spare_rows=1)
        laid = layout.lay(samples, limits, shifts=setup.shifts(), fill=plan.fill)
        return [setup.to_device(batch) for batch in laid.batches]


def silent(samples: Samples, which: np.ndarray) -> Samples | None:
    """The same samples, some of them without targets; None if they have no targets for tokens."""
    labels = samples.tensors.get("labels")
    if labels is None or not any("labels" in axis.names for axis in samples.axes.values()):
        return None
    labels = labels.clone()
    labels[torch.from_numpy(which)] = IGNORED
    return replace(samples, tensors={**samples.tensors, "labels": labels})


def with_silent(samples: Samples, others: Samples, tokens: int) -> Samples | None:
    """These samples, and the first of others without targets, up to `tokens` tokens; None if that cannot be made."""
    fitting = np.cumsum(others.lengths) <= tokens - samples.lengths.sum()
    added = silent(others, fitting) if fitting.any() else None
    if added is None:
        return None
    return joined([samples, added.select(np.flatnonzero(fitting))], samples.paddings, on_left=False)


def _apart_and_together(candidate: Candidate) -> list[Candidate]:
    """Laid out in small micro-batches, where the longest sample has a row to itself, and in one."""
    together = candidate.lay_together
    return [candidate, *([replace(candidate, lay=together)] if together is not None else [])]


def knows_count(setup: TrainingSetup) -> bool:
    """Whether the first loss a model computes is certain to be that of the unchanged labels of the batch."""
    model = setup.model
    if type(model).__module__.startswith("peft."):
        model = model.get_base_model()
    if setup.why_only_grouped is not None or "forward" in vars(model) or users_loss_of(model) is not None:
        return False
    return str(type(model).forward.__module__).startswith("transformers.")


_TOGETHER = Limits(budget=1 << 40, overhead=1 << 40)


def _halves(samples: Samples) -> Limits:
    """Limits that give two micro-batches or more, so that splitting is part of the proof."""
    lengths = samples.lengths
    return Limits(budget=max(int(lengths.max()), -(-int(lengths.sum()) // 2)), overhead=0)


def _row_tokens(batch: Any) -> set[int]:
    if PLACES in batch and DECODED not in batch:
        return {batch[PLACES].numel()}
    return {batch[name].shape[-1] for name in ("input_ids", DECODED) if name in batch}


def _worst(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    return {name: max(a.get(name, 0.0), b.get(name, 0.0)) for name in {**a, **b}}
