"""Changing the collator's micro-batches without changing the update: what joining and widening have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .proof.audit import is_turn
from .proof.distance import HALF
from .proof.prober import Candidate, Prober, Proof, ProofRefused, Setting, tolerance_of
from .training_setup import TrainingSetup


class CannotChange(Exception):
    """Micro-batches cannot be changed; the message gives the reason."""


class ChangedBatches:
    """Changes the micro-batches of updates, and compares some updates both ways."""

    name: str
    why_off: str
    """The beginning of the message when a comparison fails in training."""

    def __init__(
        self, setup: TrainingSetup, *, is_proved: bool = True, free_graphs: Callable[[], None] = lambda: None
    ) -> None:
        self._setup, self._free_graphs = setup, free_graphs
        self.must_prove = not is_proved
        self.too_often: str | None = None
        """Which change of the model was too frequent to compare an update after each."""
        self._updates = 0

    def change(self, batches: list[Any]) -> list[Any]:
        """The changed micro-batches of an update; raises `CannotChange`."""
        raise NotImplementedError

    def arrange(self, batches: list[Any]) -> list[Any] | str:
        """The update's micro-batches, changed if they can be; or why the change no longer agrees."""
        try:
            changed = self.change(batches)
        except CannotChange:
            return batches
        self._updates += 1
        if self.too_often is not None:
            return self.too_often
        if self.must_prove or is_turn(self._updates, is_small=False):
            self._free_graphs()
            proof = self.prove(batches)
            if not proof.accepted and not (proof.has_no_reference and not self.must_prove):
                return proof.reason
            self.must_prove = False
        return changed

    def prove(self, batches: list[Any]) -> Proof:
        """Compare an update changed and as collated: loss, gradients, state."""
        setup = self._setup
        prober = Prober(setup.model, setup.loss_of, sandbox=setup.sandbox)
        in_half = setup.on_gpu and setup.computes_half
        setting = Setting(HALF if in_half else tolerance_of(setup.model), train=True, whole=not in_half)
        if in_half:
            setting = setting._replace(around=setup.as_trained)
        try:
            changed = self.change(batches)
            with setup.sparing():
                reference = prober.reference(None, [setup.to_device(batch) for batch in batches], setting)
        except (CannotChange, ProofRefused) as reason:
            return Proof(self.name, has_no_reference=True).refuse(str(reason))
        reference.batches = [setup.to_device(batch) for batch in changed]
        return prober.prove(Candidate.on_batches(self.name, setup.sparing), reference, divided=False)
