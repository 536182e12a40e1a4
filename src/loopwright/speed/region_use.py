"""A compiled region in training: proved when a run resumes or the model changes, and compared in some updates."""

from __future__ import annotations

from typing import Any

from .compile.region import Region
from .inputs import PlannerInputs
from .planner.decision import SpeedPlan
from .planner.regions import REGION
from .proof.audit import is_turn
from .proof.prober import Proof
from .proof.region import RegionProver, region_inputs


class RegionUse:
    """Installs a region in the model until `finish`, and says when it no longer agrees."""

    def __init__(self, situation: PlannerInputs, region: Region, plan: SpeedPlan, *, is_proved: bool) -> None:
        self._region, self._prover = region, RegionProver(situation, region, in_graph=plan.graphed)
        self.must_prove = not is_proved
        self.updates = self.audits = 0
        region.install()

    def differs(self, batches: list[Any]) -> str | None:
        """Why the region is no longer valid for training, by comparing this update if it is due; None if it is."""
        self.updates += 1
        if self._region.session.fell_back:
            return next(iter(self._region.session.fell_back.values()))  # the compiler failed in training
        if not self.must_prove and not is_turn(self.updates, is_small=False):
            return None
        proof: Proof = self._prover.prove(batches, name=REGION)
        if proof.has_no_reference and not self.must_prove:
            return None  # the loss of this update is not finite, for example
        self.audits += 1
        self.must_prove = False
        return None if proof.accepted else proof.reason

    def inputs(self, batch: Any) -> Any:
        """A micro-batch as the model gets it."""
        return region_inputs(batch, self._region)

    def finish(self) -> None:
        self._region.finish()
