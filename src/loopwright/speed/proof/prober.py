"""The proof: an acceleration must give the loss and the gradients of the normal path before it is enabled.

Both paths run without dropout, in single precision (double for double-precision weights), in two comparisons:

    a few samples      in eval and in train mode, split into small micro-batches
    the whole update   in train mode, split as in training; on GPUs in the precision of training

    again      the normal path gives the same loss twice, for any state of the random generators
    loss       the losses are equal
    gradient   the gradients are equal, all trainable parameters together and each of them, relative L2
    state      buffers and plain values on modules end up equal
    dropout    no dropout mask treats a row of many samples as one sample
    leak       changing the other samples does not change one sample's loss      (a few samples, eval mode)
    poison     changing the tokens in the padding does not change the loss       (a few samples, eval mode)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention.kernel_choice import without_cudnn
from ..layouts.samples import Samples
from ..memory.out_of_memory import is_out_of_memory
from ..model_stamp import counted_by, left_differently, state_of
from .distance import (
    DOUBLE,
    HALF,
    SINGLE,
    Tolerance,
    distance_of,
    gradient_distance,
    is_close,
    relative,
    squared_norms,
    worst_parameter,
)
from .disturbance import MOVED, other_neighbours, other_padding, poisoned_tensors
from .dropout import Shapes, per_sample, without_dropout
from .gradients import GradientSum
from .number_formats import NumberFormats, whole_precision
from .random_draws import drops_no_layers, random_streams, seed_all

Prepare = Callable[[Any], Any]
"""Converts a micro-batch on the device to the inputs of the model."""
LossOf = Callable[..., Tensor]
"""`loss_of(batches, prepare, backward=None)`: the loss of an update made of these micro-batches, with its graph.

If `backward(loss, factor)` is given, it is called for each micro-batch as soon as its loss is computed, and once more
at the end with None and the factor by which all gradients are to be multiplied."""
Lay = Callable[[Samples], list[Any]]
"""The micro-batches a layout makes of samples, on the device."""


class Setting(NamedTuple):
    """How two paths are compared."""

    tolerance: Tolerance
    train: bool
    """Whether the model is in train mode rather than in eval mode."""
    whole: bool = True
    """Whether half-precision weights are converted to single precision."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context around every forward: autocast, if the precision of training is compared."""
    drops: bool = False
    """Whether dropout stays on, for paths that draw the same random numbers."""


HALF_AS_GOOD = 1.5
"""Largest ratio of a half-precision kernel's rounding error to that of the normal path."""
MOST_COMPARED = 2_000_000_000
"""Largest number of weights whose gradients are compared; of larger models every second, third ... parameter is."""
SEEDS = (11, 29, 47)


@dataclass
class Proof:
    """The result of comparing one candidate with the normal path."""

    name: str
    accepted: bool = False
    reason: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    ran_out: bool = False
    """Whether the comparison ran out of memory."""
    has_no_reference: bool = False
    """Whether the normal path could not be computed for comparison."""

    def refuse(self, reason: str) -> Proof:
        self.accepted, self.reason = False, reason
        return self


@dataclass
class Outcome:
    """The result of running an update once."""

    loss: float
    gradient: list[Tensor | None]
    before: dict[str, Any]
    after: dict[str, Any]
    """The model's state besides its weights, before and after."""
    dropouts: Shapes


@dataclass
class Reference:
    """Samples, the micro-batches of the normal path, and their outcome."""

    samples: Samples | None
    """None if the update cannot be split into samples and keeps the collator's batches."""
    batches: list[Any]
    """May be replaced after the outcome, by the batches on which a candidate is run."""
    outcome: Outcome
    setting: Setting
    depends_on_padding: bool = False
    """Whether changing the token in the padding changes the loss."""
    half_error: float | None = None
    """How far the normal path in half precision is from this outcome, as soon as it was computed."""


class ProofRefused(Exception):
    """The normal path cannot be used as a reference; the message gives the reason."""

    ran_out: bool = False
    """Whether the reason is that memory ran out."""


@dataclass
class Candidate:
    """A path to be compared with the normal one."""

    name: str
    lay: Lay
    """Lays out a few samples in several micro-batches."""
    lay_together: Lay | None
    """Lays out all samples in one micro-batch; None if the candidate keeps the collator's batches."""
    lay_update: Lay | None
    """Lays out the samples of a whole update as in training; None if the candidate keeps the collator's batches."""
    prepare: Prepare
    install: Callable[[], AbstractContextManager[Any]]
    row_tokens: Callable[[Any], set[int]] | None = None
    """Numbers of tokens in the rows of a micro-batch; None if samples do not share rows."""

    @classmethod
    def on_batches(cls, name: str, install: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Candidate:
        """A candidate that keeps micro-batches: it is run on `Reference.batches`, which may be others by then."""
        return cls(name, lambda samples: [], None, None, as_is, install)


class Prober:
    """Runs paths side by side; random states, buffers, modes, gradients and optimizer are unchanged afterwards."""

    compared = "gradient"
    """What is compared besides the loss."""
    random = "training uses random numbers besides dropout"

    def __init__(
        self, model: nn.Module, loss_of: LossOf, *, sandbox: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._model, self._loss_of, self._sandbox = model, loss_of, sandbox
        self._parameters = _compared([p for p in model.parameters() if p.requires_grad])

    @contextmanager
    def quiet(self, setting: Setting) -> Iterator[Shapes]:
        """Apply a setting, without dropout, and restore all state at exit; yields the shapes given to dropout."""
        modes = [(module, module.training) for module in self._model.modules()]
        with ExitStack() as stack:
            stack.enter_context(self._sandbox())
            stack.enter_context(whole_precision(self._model) if setting.whole else nullcontext())
            stack.enter_context(setting.around())
            shapes: Shapes = [] if setting.drops else stack.enter_context(without_dropout())
            if not setting.drops:  # shapes of a comparison occur once; compiled code is compared as it is used
                stack.enter_context(without_cudnn())
            self._model.train(setting.train)
            try:
                yield shapes
            finally:
                for module, mode in modes:
                    module.training = mode

    # ---- the normal path --------------------------------------------------------------------------------------------

    def reference(
        self, samples: Samples | None, batches: list[Any], setting: Setting, *, repeats: bool = True
    ) -> Reference:
        """Run the normal path on these batches; raises `ProofRefused` if it cannot be used as a reference.

        `repeats` also checks that a second run gives the same loss. Later comparisons can skip that check.
        """
        try:
            setting = setting._replace(tolerance=self.tolerance(batches[:1], setting))
            outcome = self._run(batches, as_is, setting)
            if outcome.loss != outcome.loss or abs(outcome.loss) == float("inf"):
                raise ProofRefused("the loss is not finite")
            if setting.train and (counter := counted_by(outcome.before, outcome.after)) is not None:
                raise ProofRefused(f"{counter} changes with every forward pass")
            if repeats:
                self._check_repeats(batches[:1], setting, outcome.loss if len(batches) == 1 else None)
        except ProofRefused:
            raise
        except Exception as error:  # training may still succeed: it has dropout, half precision, other samples
            refusal = ProofRefused(f"the loss cannot be computed for comparison: {_text_of(error)}")
            refusal.ran_out = is_out_of_memory(error)
            raise refusal from error
        depends_on_padding = not setting.train and self._depends_on_padding(batches, setting, outcome.loss)
        return Reference(samples, batches, outcome, setting, depends_on_padding)

    def _depends_on_padding(self, batches: list[Any], setting: Setting, plain: float) -> bool:
        poisoned = self.loss([poisoned_tensors(batch) for batch in batches], as_is, setting)
        return not relative(plain, poisoned) <= setting.tolerance.still

    def tolerance(self, batches: list[Any], setting: Setting) -> Tolerance:
        """SINGLE for a double-precision model that computes a part of its loss in lower precision."""
        if setting.tolerance is not DOUBLE:
            return setting.tolerance
        with self.quiet(setting), NumberFormats() as formats:
            self._loss_of(batches, as_is)
        return SINGLE if formats.coarse else DOUBLE

    def _check_repeats(self, batches: list[Any], setting: Setting, first: float | None) -> None:
        """Raise `ProofRefused` if a second run gives another loss, or if random numbers besides dropout are drawn.

        `first` is the loss of these batches if it is known.
        """
        if first is None:
            with self.quiet(setting):
                first = float(self._loss_of(batches, as_is).detach())
        draws = False
        for seed in SEEDS:
            with self.quiet(setting):
                seed_all(seed)
                streams = random_streams(self._model)
                again = float(self._loss_of(batches, as_is).detach())
                draws |= streams != random_streams(self._model)
            if not is_close(first, again, setting.tolerance.still):
                what = self.random if draws else "two evaluations differ"
                raise ProofRefused(f"the loss of the same samples differs the second time: {what}")
            if not draws:
                return
        if not drops_no_layers(self._model):
            raise ProofRefused(self.random)

    # ---- candidates -------------------------------------------------------------------------------------------------

    def prove(self, candidate: Candidate, reference: Reference, *, divided: bool) -> Proof:
        """Compare a candidate with the normal path, on small micro-batches if `divided`, else split as in training."""
        compare = self._compare_few if divided else self._compare_update
        return self._tried(candidate, lambda proof: compare(proof, candidate, reference))

    def prove_in_half(self, candidate: Candidate, reference: Reference, around: Any) -> Proof:
        """Whether the candidate's half-precision kernels have about the rounding error of those they replace."""
        expected, setting = reference.outcome.gradient, Setting(HALF, train=False, whole=False, around=around)
        if reference.half_error is None:
            found = self._run(reference.batches, as_is, setting).gradient
            reference.half_error = gradient_distance(expected, found)
            del found  # it would be in memory beside that of the candidate
        stock = reference.half_error

        def compare(proof: Proof) -> Proof:
            assert reference.samples is not None
            batches = candidate.lay(reference.samples)
            found = gradient_distance(expected, self._run(batches, candidate.prepare, setting).gradient)
            what = self.compared
            proof.numbers = {f"half_{what}": found, f"half_{what}_before": stock}
            proof.accepted = found <= HALF_AS_GOOD * stock + 1e-3
            return proof if proof.accepted else proof.refuse(f"in half precision the {what} is off by {found:.0e}")

        return self._tried(candidate, compare)

    def _tried(self, candidate: Candidate, compare: Callable[[Proof], Proof]) -> Proof:
        proof = Proof(candidate.name)
        try:
            with candidate.install():
                return compare(proof)
        except Exception as error:  # any error of the model on these inputs refuses the candidate
            proof.ran_out = is_out_of_memory(error)
            return proof.refuse(_text_of(error))

    def _compare_few(self, proof: Proof, candidate: Candidate, reference: Reference) -> Proof:
        assert reference.samples is not None
        batches = candidate.lay(reference.samples)
        self._compare(proof, batches, candidate, reference)
        tests = (("leak", other_neighbours), ("poison", other_padding))
        asked = proof.accepted and candidate.lay_together is not None and not reference.setting.train
        for test, change in tests if asked else ():
            if test == "poison" and reference.depends_on_padding:
                continue  # the model detects padding by its token, and layouts do not change it
            moved = self._moved(candidate, reference.setting, *change(reference.samples))
            if moved is not None:
                proof.numbers[test] = moved
                if not moved <= reference.setting.tolerance.still:
                    return proof.refuse(MOVED[test].format(moved))
        return proof

    def _compare_update(self, proof: Proof, candidate: Candidate, reference: Reference) -> Proof:
        samples, lay = reference.samples, candidate.lay_update
        batches = reference.batches if samples is None or lay is None else lay(samples)
        outcome = self._compare(proof, batches, candidate, reference)
        if proof.accepted and candidate.row_tokens is not None and samples is not None and len(samples) > 1:
            rows = set().union(*map(candidate.row_tokens, batches))
            shape = per_sample(outcome.dropouts, rows)
            if shape is not None:
                proof.refuse(f"a dropout mask of shape {shape} would treat a row of many samples as one sample")
        return proof

    def _compare(self, proof: Proof, batches: list[Any], candidate: Candidate, reference: Reference) -> Outcome:
        """Compare loss, gradient and state; the first difference becomes the reason of the proof."""
        return self._judge(proof, self._run(batches, candidate.prepare, reference.setting), reference)

    def _judge(self, proof: Proof, outcome: Outcome, reference: Reference) -> Outcome:
        expected, tolerance = reference.outcome, reference.setting.tolerance
        numbers, what = proof.numbers, self.compared
        numbers["loss"] = relative(expected.loss, outcome.loss)
        norms = squared_norms(expected.gradient, outcome.gradient)
        numbers[what], worst = distance_of(norms), worst_parameter(norms, tolerance)
        if not numbers["loss"] <= tolerance.loss:
            proof.refuse(f"the loss differs by {numbers['loss']:.0e}")
        elif not numbers[what] <= tolerance.gradient:
            proof.refuse(f"the {what} differs by {numbers[what]:.0e}")
        elif worst is not None:
            proof.refuse(f"the {what} of {self._name_of(worst[0])} differs by {worst[1]:.0e}")
        else:
            left = left_differently(
                (expected.before, expected.after), (outcome.before, outcome.after), tolerance.gradient
            )
            proof.accepted = left is None
            proof.reason = "" if left is None else f"{left}, which the model updates in forward, ends up different"
        return outcome

    def _name_of(self, index: int) -> str:
        wanted = self._parameters[index]
        return next((name for name, parameter in self._model.named_parameters() if parameter is wanted), "a parameter")

    def _moved(
        self, candidate: Candidate, setting: Setting, before: Samples | None, after: Samples | None
    ) -> float | None:
        lay = candidate.lay_together
        if lay is None or before is None or after is None:
            return None
        return relative(*(self.loss(lay(samples), candidate.prepare, setting) for samples in (before, after)))

    # ---- running ----------------------------------------------------------------------------------------------------

    def _run(self, batches: list[Any], prepare: Prepare, setting: Setting) -> Outcome:
        """Run an update, one micro-batch at a time, so that no more memory is used than in training."""
        gradients = GradientSum(self._parameters)

        def backward(loss: Tensor | None, factor: Any = None) -> None:
            if loss is None:
                gradients.scale(factor)
            else:
                gradients.add(loss)

        with self.quiet(setting) as shapes, torch.enable_grad():
            before = state_of(self._model)
            loss = self._loss_of(batches, prepare, backward)
            return Outcome(float(loss), gradients.values, before, state_of(self._model), list(shapes))

    def loss(self, batches: list[Any], prepare: Prepare, setting: Setting) -> float:
        """The loss of an update, one micro-batch at a time, without gradients."""
        with self.quiet(setting), torch.enable_grad():  # the loss function may compute gradients itself
            return float(self._loss_of(batches, prepare, _leave).detach())


def _leave(loss: Tensor | None, factor: Any = None) -> None:
    """In place of a backward: the graph of a micro-batch is freed before the next."""


def as_is(batch: Any) -> Any:
    return batch


def _text_of(error: Exception) -> str:
    text = str(error).strip().splitlines()
    kind, ours = type(error).__name__, ("AttentionRefused", "NoSamples", "OddSamples", "Unserved")
    return f"{'' if kind in ours else f'{kind}: '}{text[0][:120] if text else ''}"


# ---- precision ------------------------------------------------------------------------------------------------------


def _compared(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    every = 1 + sum(p.numel() for p in parameters) // MOST_COMPARED
    return parameters[::every]


def tolerance_of(model: nn.Module) -> Tolerance:
    """The tolerance for comparing a model, by the dtype of its weights."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return DOUBLE if kinds == {torch.float64} else SINGLE
