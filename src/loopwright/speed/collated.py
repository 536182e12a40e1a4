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

MOST_CHANGES = 8
"""Changes of the model after which an update is compared; more of them switch everything off."""
MOST_RECOMPILATIONS = 4
"""Recompilations after the proof, which take seconds each; more of them switch the region off."""


class RegionUse:
    """Installs a region in the model until `finish`, and compares some updates."""

    def __init__(self, situation: PlannerInputs, region: Region, plan: SpeedPlan, *, is_proved: bool) -> None:
        self._region, self._prover = region, RegionProver(situation, region, in_graph=plan.graphed)
        self.must_prove = not is_proved
        self.too_often: str | None = None
        """Which change of the model was too frequent to compare an update after each."""
        self._updates = 0
        self._recompiled = region.session.counter.count
        region.install()

    def differs(self, batches: list[Any]) -> str | None:
        """Why the region is no longer valid for training, by comparing this update if it is due; None if it is."""
        self._updates += 1
        if self.too_often is not None:
            return self.too_often
        if self._region.session.fell_back:
            return next(iter(self._region.session.fell_back.values()))  # the compiler failed in training
        recompiled = self._region.session.counter.count - self._recompiled
        if recompiled > MOST_RECOMPILATIONS and not self.must_prove:
            return f"it was compiled again {recompiled} times, because of {self._region.session.counter.reasons[-1]}"
        if not self.must_prove and not is_turn(self._updates, is_small=False):
            return None
        proof = self._prover.prove(batches, name=REGION)
        if proof.has_no_reference and not self.must_prove:
            return None  # the loss of this update is not finite, for example
        self.must_prove, self._recompiled = False, self._region.session.counter.count
        return None if proof.accepted else proof.reason

    def inputs(self, batch: Any) -> Any:
        """A micro-batch as the model gets it."""
        return region_inputs(batch, self._region)

    def finish(self) -> None:
        self._region.finish()


class CollatedUse:
    """Both of them, as the plan says; what no longer agrees is taken out of the plan."""

    def __init__(self, situation: PlannerInputs, plan: SpeedPlan, region: Region | None, *, is_proved: bool) -> None:
        self._plan, self._changes = plan, 0
        self._made: tuple[list[Any], list[Any]] | None = None
        """The collator's micro-batches of the current update, and the joined ones; None if they are not joined."""
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
        self._made = None
        if self.joining is not None:
            found = self.joining.join(update.batches)
            if isinstance(found, str):
                self.joining, self._plan.joined = None, 1
                self._plan.take_back(JOINED, found)
                return f"micro-batches are no longer joined: {found}"
            if found is not update.batches:
                self._made = (update.batches, found)
            update.batches = found
        reason = None if self.region is None else self.region.differs(update.batches)
        if self.region is None or reason is None:
            return None
        self.region.finish()
        self.region, self._plan.region = None, ""
        self._plan.take_back(REGION, reason)
        return f"compiled code is switched off, and the model runs as written: {reason}"

    def arrange_again(self, update: Update, change: str) -> str | None:
        """Compare the current update, whose batches are the collator's, because the model has changed."""
        self._changes += 1
        self.prove_again()
        for use in (self.joining, self.region):
            if use is not None and self._changes > MOST_CHANGES:
                use.too_often = f"{change} changes during training"
        return self.arrange(update)

    def prove_again(self) -> None:
        """Compare the next update that is arranged."""
        for use in (self.joining, self.region):
            if use is not None:
                use.must_prove = True

    def as_made(self, update: Update) -> list[Any]:
        """The collator's micro-batches of the current update."""
        is_joined = self._made is not None and self._made[1] is update.batches
        return self._made[0] if self._made is not None and is_joined else update.batches

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
