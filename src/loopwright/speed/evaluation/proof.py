"""The proof of a layout in evaluation: losses and outputs of every sample are those of the collator's batches.

As in training, both paths are compared on a few samples in the precision of the weights, with half-precision kernels
if they are used, and on whole batches. Instead of gradients, the outputs of each sample at its real tokens are
compared. With the fused loss there are no outputs, and only losses are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..fused_loss.lazy_logits import PendingHead, PendingLogits
from ..layouts.candidates import Layout
from ..layouts.rows import Limits
from ..layouts.samples import Samples
from ..model_stamp import state_of
from ..planner.choice import Decision
from ..planner.decision import PAIRED, SpeedPlan
from ..proof.distance import HALF, gradient_distance, unequal_columns
from ..proof.disturbance import MOVED
from ..proof.dropout import Shapes
from ..proof.prober import Candidate, Outcome, Prepare, Prober, Proof, ProofRefused, Reference, Setting, tolerance_of
from ..proof.prover import PROBE_SAMPLES, Prover
from .evaluation_setup import EvaluationSetup, Forward
from .pieces import Piece, Unserved, axis_of, collated, of_each_sample, pieces_of

COLUMNS = 64
"""Most numbers per token that are compared; of more classes, some from all over the vocabulary."""


class EvaluationProber(Prober):
    """Compares the losses and outputs of two paths, in eval mode and without gradients."""

    compared = "output"
    random = "the model uses random numbers in eval mode"

    def __init__(self, setup: EvaluationSetup) -> None:
        super().__init__(setup.model, self._mean_loss, sandbox=setup.sandbox)
        self._setup, self._parameters = setup, []
        self._classes: int | None = getattr(getattr(setup.model, "config", None), "num_labels", None)
        self._samples: Samples | None = None
        """The samples of the batches that run now."""
        self._repeats = True

    @contextmanager
    def quiet(self, setting: Setting) -> Iterator[Shapes]:
        """As in training, but with dropout if the model has it in eval mode: such a model draws random numbers."""
        with super().quiet(setting._replace(drops=True)) as shapes:
            yield shapes

    def reference(
        self, samples: Samples | None, batches: list[Any], setting: Setting, *, repeats: bool = True
    ) -> Reference:
        assert samples is not None
        self._samples, self._repeats = samples, repeats
        return super().reference(samples, list(collated(batches)), setting, repeats=repeats)

    def prove(self, candidate: Candidate, reference: Reference, *, divided: bool) -> Proof:
        self._samples = reference.samples
        return super().prove(candidate, reference, divided=divided)

    def _depends_on_padding(self, batches: list[Any], setting: Setting, plain: float) -> bool:
        """Whether padding matters; only found out where candidates are tested for it."""
        assert self._samples is not None
        is_tested = self._repeats and len(self._samples) <= PROBE_SAMPLES
        return is_tested and super()._depends_on_padding(batches, setting, plain)

    # ---- running ----------------------------------------------------------------------------------------------------

    def _mean_loss(self, batches: list[Any], prepare: Prepare, backward: Any = None) -> Tensor:
        """The loss of all batches; without labels, a number that depends on all outputs."""
        return _mean([self._forward(batch, prepare) for batch in batches])

    def _forward(self, batch: Any, prepare: Prepare) -> Forward:
        piece = batch if isinstance(batch, Piece) else collated([batch])[0]
        return self._setup.forward_of(dict(prepare(batch)), len(piece.members))

    def _run(self, batches: list[Any], prepare: Prepare, setting: Setting) -> Outcome:
        assert self._samples is not None
        outputs: dict[int, list[Tensor]] = {}
        losses: list[Forward] = []
        with self.quiet(setting) as shapes:
            before = state_of(self._model)
            for piece in batches:
                found = self._forward(piece, prepare)
                kept = self._kept(found, piece)
                losses.append(found._replace(outputs=() if found.loss is not None else found.outputs))
                outputs.update(kept)
                del found
            loss = _mean(losses)
            flat = [each for member in sorted(outputs) for each in outputs[member]]
            return Outcome(float(loss), flat, before, state_of(self._model), list(shapes))

    def _kept(self, found: Forward, piece: Piece) -> dict[int, list[Tensor]]:
        """The outputs that are compared, by sample; empty if there is a loss without logits."""
        assert self._samples is not None
        if any(isinstance(each, PendingLogits) for each in found.outputs):
            return {}
        outputs = [each for each in found.outputs if isinstance(each, Tensor)]
        chosen = self._samples.select(piece.members)
        if self._setup.keeps_outputs:
            if len(outputs) < len(found.outputs):
                raise Unserved("an output is not a tensor")
            if any(not piece.is_row and axis_of(each, piece, chosen, self._classes) is not None for each in outputs):
                raise Unserved("an output has one value per token, including those of the padding")
        elif not outputs:
            raise Unserved("the model returns no outputs that could be compared")
        else:
            outputs = outputs[:1]
        copied = _copied if self._setup.keeps_outputs else _thinned
        parts = [[copied(each) for each in part] for part in of_each_sample(outputs, piece, chosen, self._classes)]
        return {int(member): part for member, part in zip(piece.members, parts, strict=True)}

    def _compare(self, proof: Proof, batches: list[Any], candidate: Candidate, reference: Reference) -> Outcome:
        outcome = self._run(batches, candidate.prepare, reference.setting)
        expected = reference.outcome.gradient
        if not outcome.gradient:
            expected = []
        outcome.gradient = outcome.gradient[: len(expected)]  # rows may be extended by more samples
        before = replace(reference, outcome=replace(reference.outcome, gradient=expected))
        self._judge(proof, outcome, before)
        if not expected:
            del proof.numbers[self.compared]
        elif proof.accepted and self._setup.keeps_outputs:
            self._judge_columns(proof, outcome.gradient, before)
        return outcome

    def _judge_columns(self, proof: Proof, found: list[Tensor | None], reference: Reference) -> None:
        """Refuse a candidate if one column of an output differs, however small its values are beside the others."""
        assert reference.samples is not None
        expected = reference.outcome.gradient
        outputs = len(expected) // len(reference.samples)
        for place in range(outputs):
            reason = unequal_columns(expected[place::outputs], found[place::outputs], reference.setting.tolerance)
            if reason is not None:
                proof.refuse(f"{reason} of output {place + 1} of {outputs} differs")
                return

    def prove_in_half(self, candidate: Candidate, reference: Reference, around: Any) -> Proof:
        self._samples = reference.samples
        if not self._gives_outputs(candidate, reference):
            return self._loss_in_half(candidate, reference, around)
        return super().prove_in_half(candidate, reference, around)

    def _gives_outputs(self, candidate: Candidate, reference: Reference) -> bool:
        assert reference.samples is not None
        with candidate.install():
            return bool(self._run(candidate.lay(reference.samples), candidate.prepare, reference.setting).gradient)

    def _loss_in_half(self, candidate: Candidate, reference: Reference, around: Any) -> Proof:
        setting, exact = Setting(HALF, train=False, whole=False, around=around), reference.outcome.loss
        before = abs(self._run(reference.batches, _as_is, setting).loss - exact)

        def compare(proof: Proof) -> Proof:
            assert reference.samples is not None
            found = abs(self._run(candidate.lay(reference.samples), candidate.prepare, setting).loss - exact)
            proof.numbers = {"half_loss": found / abs(exact), "half_loss_before": before / abs(exact)}
            proof.accepted = found <= 1.5 * before + 1e-3 * abs(exact)
            return proof if proof.accepted else proof.refuse(f"in half precision the loss is off by {found:.0e}")

        return self._tried(candidate, compare)

    # ---- samples of one row -----------------------------------------------------------------------------------------

    def _compare_few(self, proof: Proof, candidate: Candidate, reference: Reference) -> Proof:
        samples = reference.samples
        if not self._repeats and samples is not None:  # a later comparison
            self._compare(proof, candidate.lay(samples), candidate, reference)
            return proof
        proof = super()._compare_few(proof, candidate, reference)
        ids = None if samples is None else samples.tensors.get("input_ids")
        if not proof.accepted or samples is None or ids is None or candidate.lay_together is None or len(samples) < 2:
            return proof
        others = torch.arange(len(ids)) > 0
        changed = torch.where(others.view(-1, *[1] * (ids.dim() - 1)), torch.flip(ids, (0, 1)), ids)
        after = replace(samples, tensors={**samples.tensors, "input_ids": changed})
        rows = [self._first_outputs(candidate, each, reference.setting) for each in (samples, after)]
        moved = gradient_distance(*rows)
        proof.numbers["leak"] = max(proof.numbers.get("leak", 0.0), moved)
        if not moved <= reference.setting.tolerance.still:
            return proof.refuse(MOVED["leak"].format(moved).replace("the loss", "the output"))
        return proof

    def _first_outputs(self, candidate: Candidate, samples: Samples, setting: Setting) -> list[Tensor]:
        """The outputs of the first sample, with all others in the same micro-batch."""
        assert candidate.lay_together is not None
        found = self._run(candidate.lay_together(samples), candidate.prepare, setting).gradient
        each = len(found) // len(samples)
        return [value for value in found[:each] if value is not None]

    def _name_of(self, index: int) -> str:
        return f"sample {index}"


def _as_is(batch: Any) -> Any:
    return batch


def _mean(found: list[Forward]) -> Tensor:
    """The mean of losses by their weights, or the mean square of all outputs if there is no loss."""
    if any(each.loss is None for each in found):
        leaves = [value.detach().double() for each in found for value in each.outputs if isinstance(value, Tensor)]
        return torch.stack([value.square().sum() for value in leaves]).sum()
    pairs = [(each.loss.detach().double(), float(each.weight)) for each in found if float(each.weight)]
    if not pairs:
        raise ProofRefused("there are no targets")
    return torch.stack([loss * weight for loss, weight in pairs]).sum() / sum(weight for _, weight in pairs)


def _copied(output: Tensor) -> Tensor:
    return output.detach().clone()


def _thinned(output: Tensor) -> Tensor:
    """A copy with at most a few of the last dimension's numbers."""
    every = 1 + (output.shape[-1] - 1) // COLUMNS if output.dim() else 1
    return output.detach()[..., ::every].clone() if output.dim() else output.detach().clone()


class EvaluationProver(Prover):
    """Compares the path of an evaluation's plan with the collator's batches."""

    _setup: EvaluationSetup

    def __init__(self, setup: EvaluationSetup) -> None:
        self._setup = setup
        self._prober = EvaluationProber(setup)
        self._exact = tolerance_of(setup.model)

    def references(self, samples: Samples) -> list[Reference]:
        return [self.few(samples, train=False)]

    def _setting(self) -> Setting:
        return super()._setting()._replace(train=False)

    def _laid(self, plan: SpeedPlan, layout: Layout | None, samples: Samples, limits: Limits) -> list[Any]:
        made = pieces_of(layout, plan, samples, limits, shifts=self._setup.shifts())
        return [Piece(self._setup.to_device(dict(each)), each.members, is_row=each.is_row) for each in made]


class EvaluationDecision(Decision):
    """Compares candidates for an evaluation."""

    _setup: EvaluationSetup

    def _offered(self, name: str) -> Layout | str:
        return "it is for training" if name == PAIRED else super()._offered(name)

    def _make_prover(self) -> EvaluationProver:
        return EvaluationProver(self._setup)

    def _choose_head(self) -> None:
        if not self._setup.keeps_outputs:
            super()._choose_head()

    def _pending(self, head: Any) -> PendingHead:
        return PendingHead(head, evaluates=True)
