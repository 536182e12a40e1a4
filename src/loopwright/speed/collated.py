"""What is done with the collator's batches if nothing is rearranged: micro-batches joined, code compiled for them."""

from __future__ import annotations

from typing import Any

from ..core.update import Update
from .compile.region import Region
from .inputs import PlannerInputs
from .joining import JOINED, JoinedUse
from .planner.decision import SpeedPlan
from .planner.regions import REGION
from .proof.audit import is_turn
from .proof.region import RegionProver, region_inputs


class RegionUse:
    """Installs a region in the model until `finish`, and compares some updates."""

    def __init__(self, situation: PlannerInputs, region: Region, plan: SpeedPlan, *, is_proved: bool) -> None:
        self._region, self._prover = region, RegionProver(situation, region, in_graph=plan.graphed)
        self.must_prove = not is_proved
        self._updates = 0
        region.install()

    def differs(self, batches: list[Any]) -> str | None:
        """Why the region is no longer valid for training, by comparing this update if it is due; None if it is."""
        self._updates += 1
        if self._region.session.fell_back:
            return next(iter(self._region.session.fell_back.values()))  # the compiler failed in training
        if not self.must_prove and not is_turn(self._updates, is_small=False):
            return None
        proof = self._prover.prove(batches, name=REGION)
        if proof.has_no_reference and not self.must_prove:
            return None  # the loss of this update is not finite, for example
        self.must_prove = False
        return None if proof.accepted else proof.reason

    def inputs(self, batch: Any) -> Any:
        """A micro-batch as the model gets it."""
        return region_inputs(batch, self._region)

    def finish(self) -> None:
        self._region.finish()


class CollatedUse:
    """Both of them, as the plan says; what no longer agrees is taken out of the plan."""

    def __init__(self, situation: PlannerInputs, plan: SpeedPlan, region: Region | None, *, is_proved: bool) -> None:
        self._plan = plan
        self.joining = JoinedUse(situation, plan.joined, is_proved=is_proved) if plan.joined > 1 else None
        self.region = None if region is None else RegionUse(situation, region, plan, is_proved=is_proved)

    @classmethod
    def of(
        cls, situation: PlannerInputs, plan: SpeedPlan, region: Region | None, *, is_proved: bool
    ) -> CollatedUse | None:
        """What a plan says, with the region that was proved for it, or a new one; None if it says nothing."""
        if plan.region and region is None:
            region = situation.region()
        return cls(situation, plan, region, is_proved=is_proved) if plan.joined > 1 or region is not None else None

    def arrange(self, update: Update) -> str | None:
        """Join the micro-batches; returns why a part of the plan was switched off, if it was."""
        if self.joining is not None:
            found = self.joining.join(update.batches)
            if isinstance(found, str):
                self.joining, self._plan.joined = None, 1
                self._plan.take_back(JOINED, found)
                return f"micro-batches are no longer joined: {found}"
            update.batches = found
        reason = None if self.region is None else self.region.differs(update.batches)
        if self.region is None or reason is None:
            return None
        self.region.finish()
        self.region, self._plan.region = None, ""
        self._plan.take_back(REGION, reason)
        return f"compiled code is switched off, and the model runs as written: {reason}"

    def prove_again(self) -> None:
        """Compare the next update, because the model has changed."""
        for use in (self.joining, self.region):
            if use is not None:
                use.must_prove = True

    def inputs(self, batch: Any) -> Any:
        """A micro-batch as the model gets it."""
        return batch if self.region is None else self.region.inputs(batch)

    @property
    def is_used(self) -> bool:
        return self.joining is not None or self.region is not None

    def finish(self) -> None:
        """Undo all changes to the model."""
        if self.region is not None:
            self.region.finish()
