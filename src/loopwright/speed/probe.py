"""The proof: before anything is switched on it must give the loss and the gradients of the path it replaces.

On a few of the user's own samples, in single precision (or whatever finer format the weights have) and without dropout:

    again    the path as it is gives the same loss twice, so that comparing means something
    loss     the same loss
    gradient the same gradient, all trainable parameters together, relative L2
    leak     changing the other samples leaves one sample's loss as it is
    poison   changing what stands in the padding leaves the loss as it is
    buffers  running statistics come out the same
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .samples import IGNORED, SOURCE, Samples

Prepare = Callable[[Any], Any]
"""A micro-batch on the device to what the model takes."""
LossOf = Callable[[list[Any], Prepare], Tensor]
"""The loss of an update made of these micro-batches, with its graph."""
Lay = Callable[[Samples], list[Any]]
"""The micro-batches a layout makes of samples."""

LOSS, GRADIENT, STILL = 1e-5, 1e-4, 2.5e-7
"""How far loss, gradient, and what must not move at all may be off, relatively, in single precision."""
HALF_AS_GOOD = 1.5
"""How much larger than that of the path as it is the rounding error of a half-precision kernel may be."""
MOST_COMPARED = 2_000_000_000
"""Weights whose gradients are compared; of larger models every second, third ... parameter is."""


@dataclass
class Proof:
    """What was found out about one candidate."""

    name: str
    accepted: bool = False
    reason: str = ""
    numbers: dict[str, float] = field(default_factory=dict)

    def refuse(self, reason: str) -> Proof:
        self.accepted, self.reason = False, reason
        return self


@dataclass
class Reference:
    """Loss, gradient and buffers of the path as it is."""

    samples: Samples
    batches: list[Any]
    loss: float
    gradient: list[Tensor | None]
    buffers: list[Tensor]
    minds_padding: bool = False
    """Whether another token in the padding gives another loss."""


class Refused(Exception):
    """The path as it is cannot be compared with anything; says why."""


@dataclass
class Candidate:
    """A path to be compared with the one as it is."""

    name: str
    lay: Lay
    """Divided, as an update is."""
    lay_together: Lay | None
    """All in one micro-batch; None where samples stay together as the collator has them."""
    prepare: Prepare
    install: Callable[[], AbstractContextManager[Any]]


class Prober:
    """Runs paths side by side, leaving random states, buffers, modes, gradients and optimizer as they were."""

    def __init__(
        self, model: nn.Module, loss_of: LossOf, *, untouched: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._model, self._loss_of, self._untouched = model, loss_of, untouched
        self._prepare: Prepare = lambda batch: batch
        self._parameters = _compared([p for p in model.parameters() if p.requires_grad])

    @contextmanager
    def quiet(self, *, whole: bool = True) -> Iterator[None]:
        """Without dropout, nothing left behind, half-precision weights as single precision."""
        modes = [(module, module.training) for module in self._model.modules()]
        with self._untouched(), whole_precision(self._model) if whole else nullcontext():
            self._model.eval()
            try:
                yield
            finally:
                for module, mode in modes:
                    module.training = mode

    def reference(self, samples: Samples, batches: list[Any]) -> Reference:
        """The path as it is, on these samples as the collator would have them."""
        try:
            first, gradient = self._run(batches)
            again = self._loss(batches)
            poisoned = self._loss([_poisoned(batch) for batch in batches])
        except Exception as error:  # training may well succeed: it has dropout, half precision, other samples
            raise Refused(f"a few samples cannot be run for comparison: {_text_of(error)}") from error
        if first != first or abs(first) == float("inf"):
            raise Refused("the loss of a few samples is not finite")
        if not _close(first, again, STILL):  # with and without gradients kernels may round differently
            raise Refused("the loss of the same samples is another one the second time")
        minds = not _relative(again, poisoned) <= STILL
        return Reference(samples, batches, first, gradient, self._buffers(batches), minds)

    def prove(self, candidate: Candidate, reference: Reference) -> Proof:
        """Whether a candidate gives what the path as it is gives."""
        return self._tried(candidate, reference, self._compare)

    def prove_in_half(self, candidate: Candidate, reference: Reference) -> Proof:
        """Whether the kernels a candidate uses in training round about as well as those it replaces."""
        stock = gradient_distance(reference.gradient, self._run(reference.batches)[1])

        def compare(proof: Proof, reference: Reference, candidate: Candidate) -> Proof:
            found = gradient_distance(reference.gradient, self._run(candidate.lay(reference.samples))[1])
            proof.numbers = {"half_gradient": found, "half_gradient_before": stock}
            proof.accepted = found <= HALF_AS_GOOD * stock + 1e-3
            return proof if proof.accepted else proof.refuse(f"in half precision its gradient is off by {found:.0e}")

        return self._tried(candidate, reference, compare)

    def _tried(self, candidate: Candidate, reference: Reference, compare: Callable[..., Proof]) -> Proof:
        proof = Proof(candidate.name)
        before, self._prepare = self._prepare, candidate.prepare
        try:
            with candidate.install():
                return compare(proof, reference, candidate)
        except Exception as error:  # whatever a model says to inputs it was not written for, the answer is no
            return proof.refuse(_text_of(error))
        finally:
            self._prepare = before

    def _compare(self, proof: Proof, reference: Reference, candidate: Candidate) -> Proof:
        batches = candidate.lay(reference.samples)
        loss, gradient = self._run(batches)
        numbers = proof.numbers
        numbers["loss"] = _relative(reference.loss, loss)
        numbers["gradient"] = gradient_distance(reference.gradient, gradient)
        if not numbers["loss"] <= LOSS:
            return proof.refuse(f"its loss differs by {numbers['loss']:.0e}")
        if not numbers["gradient"] <= GRADIENT:
            return proof.refuse(f"its gradient differs by {numbers['gradient']:.0e}")
        tests = (("leak", _other_neighbours), ("poison", _other_padding))
        for test, change in tests if candidate.lay_together is not None else ():
            if test == "poison" and reference.minds_padding:
                continue  # the model knows padding by its token, which layouts leave as it is
            moved = self._moved(candidate.lay_together, *change(reference.samples))
            if moved is not None:
                numbers[test] = moved
                if not moved <= STILL:
                    return proof.refuse(_MOVED[test].format(moved))
        numbers["buffers"] = _largest_difference(reference.buffers, self._buffers(batches))
        if not numbers["buffers"] <= LOSS:
            return proof.refuse("running statistics of the model come out differently")
        proof.accepted = True
        return proof

    def _moved(self, lay: Lay | None, before: Samples | None, after: Samples | None) -> float | None:
        if lay is None or before is None or after is None:
            return None
        return _relative(self._loss(lay(before)), self._loss(lay(after)))

    # ---- running ----------------------------------------------------------------------------------------------------

    def _run(self, batches: list[Any]) -> tuple[float, list[Tensor | None]]:
        loss = self._loss_of(batches, self._prepare)
        gradient = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        return loss.item(), list(gradient)

    def _loss(self, batches: list[Any]) -> float:
        with torch.no_grad():
            return self._loss_of(batches, self._prepare).item()

    def _buffers(self, batches: list[Any]) -> list[Tensor]:
        """Buffers as a forward in training leaves them, from where they are now."""
        kept = [buffer.clone() for buffer in self._model.buffers()]
        if not kept:
            return []
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.train()
        try:
            self._loss(batches)
            return [buffer.clone() for buffer in self._model.buffers()]
        finally:
            for module, mode in modes:
                module.training = mode
            with torch.no_grad():
                for buffer, value in zip(self._model.buffers(), kept, strict=True):
                    if buffer.shape == value.shape:
                        buffer.copy_(value)


def _text_of(error: Exception) -> str:
    text = str(error).strip().splitlines()
    kind = "" if type(error).__name__ in ("AttentionRefused", "NoSamples") else f"{type(error).__name__}: "
    return f"{kind}{text[0][:120] if text else ''}"


_MOVED = {
    "leak": "a sample sees the others of its row: its loss moves by {:.0e} with them",
    "poison": "what stands in the padding moves the loss by {:.0e}",
}


def _other_neighbours(samples: Samples) -> tuple[Samples | None, Samples | None]:
    """One sample's targets alone, before and after all other samples' tokens are changed."""
    labels, ids = samples.tensors.get("labels"), samples.tensors.get("input_ids")
    if labels is None or ids is None or labels.is_floating_point() or len(samples) < 2 or set(samples.axes) != {SOURCE}:
        return None, None
    counted = (labels != IGNORED).flatten(1).sum(1) if labels.dim() > 1 else (labels != IGNORED).long()
    one = int(counted.argmax())
    if not counted[one] or labels.dim() < 2:
        return None, None
    others = torch.arange(len(labels)) != one
    alone, changed = labels.clone(), ids.clone()
    alone[others] = IGNORED
    changed[others] = torch.flip(ids, (0, 1))[others]
    before = Samples({**samples.tensors, "labels": alone}, samples.axes, samples.constants)
    after = Samples({**samples.tensors, "labels": alone, "input_ids": changed}, samples.axes, samples.constants)
    return before, after


def _other_padding(samples: Samples) -> tuple[Samples | None, Samples | None]:
    """All samples, before and after the token that fills them up is another."""
    poisoned = _poisoned(samples.tensors)
    if poisoned is samples.tensors:
        return None, None
    return samples, Samples(poisoned, samples.axes, samples.constants)


def _poisoned(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same with another token in the padding, if there is any."""
    mask, ids = tensors.get("attention_mask"), tensors.get("input_ids")
    if mask is None or ids is None or ids.is_floating_point() or bool(mask.all()):
        return tensors
    return {**tensors, "input_ids": torch.where(mask == 0, ids.max(), ids)}


def _compared(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    every = 1 + sum(p.numel() for p in parameters) // MOST_COMPARED
    return parameters[::every]


# ---- comparing ------------------------------------------------------------------------------------------------------


def gradient_distance(expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> float:
    """Relative L2 distance of two gradients, all parameters together."""
    apart = size = 0.0
    for a, b in zip(expected, found, strict=True):
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None else a  # type: ignore[arg-type]
        b = torch.zeros_like(a) if b is None else b
        apart += float((a.double() - b.double()).square().sum())
        size += float(a.double().square().sum())
    return (apart / size) ** 0.5 if size else (0.0 if apart == 0 else float("inf"))


def _relative(expected: float, found: float) -> float:
    return abs(expected - found) / max(abs(expected), 1e-12)


def _close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


def _largest_difference(expected: list[Tensor], found: list[Tensor]) -> float:
    worst = 0.0
    for a, b in zip(expected, found, strict=True):
        if a.shape != b.shape:
            continue  # caches of positions grow with the longest row; they hold no statistics
        if a.is_floating_point():
            worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp_min(1e-6)) if a.numel() else 0.0)
        elif not torch.equal(a, b):
            return float("inf")
    return worst


@contextmanager
def whole_precision(model: nn.Module) -> Iterator[None]:
    """Half-precision weights as single precision for a while; the weights themselves stay where they are."""
    half = [t for t in [*model.parameters(), *model.buffers()] if t.dtype in (torch.float16, torch.bfloat16)]
    kept = [tensor.data for tensor in half]
    try:
        for tensor in half:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, data in zip(half, kept, strict=True):
            tensor.data = data
