"""Accelerations of the collator's batches, if no layout is used: joining, padding, code compiled for their shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.update import Update
from .changed_batches import ChangedBatches
from .channels_last import images_last
from .compile.region import Region
from .cuda_graphs.recorder import shape_key
from .joining import JOINED, JoinedUse
from .planner.decision import SpeedPlan
from .planner.regions import MOST_WIDTHS, REGION
from .proof.audit import is_turn
from .proof.region import RegionProver, region_inputs
from .training_setup import TrainingSetup
from .widening import WIDENED, WidenedUse

MOST_CHANGES = 8
"""Changes of the model after which an update is compared; more of them switch everything off."""
MOST_RECOMPILATIONS = 4
"""Recompilations after the proof, which take seconds each; more of them switch the region off."""


class RegionUse:
    """Installs a region in the model until `finish`, and compares some updates."""

    def __init__(
        self,
        setup: TrainingSetup,
        region: Region,
        plan: SpeedPlan,
        *,
        is_proved: bool,
        free_graphs: Callable[[], None],
    ) -> None:
        self._free_graphs = free_graphs
        prepare = images_last if plan.channels_last else lambda batch: batch
        self._region, self._prover = region, RegionProver(setup, region, in_graph=plan.graphed, prepare=prepare)
        self.must_prove = not is_proved
        self.too_often: str | None = None
        """Which change of the model was too frequent to compare an update after each."""
        self._updates = 0
        self._recompiled = region.session.counter.count
        self._adds_shapes = plan.widened
        self._shapes: set[Any] = set()
        """Shapes of the micro-batches that were compared, if others are compiled when they occur."""
        region.install()

    def differs(self, batches: list[Any]) -> str | None:
        """Why the region is no longer valid for training, by comparing this update if it is due; None if it is."""
        self._updates += 1
        if self.too_often is not None:
            return self.too_often
        if self._adds_shapes and self._is_new(batches):
            self.must_prove = True  # compiles for the shapes of this update
        if self._region.session.fell_back:
            return next(iter(self._region.session.fell_back.values()))  # the compiler failed in training
        recompiled = self._region.session.counter.count - self._recompiled
        if recompiled > MOST_RECOMPILATIONS and not self.must_prove:
            return f"it was compiled again {recompiled} times, because of {self._region.session.counter.reasons[-1]}"
        if not self.must_prove and not is_turn(self._updates, is_small=False):
            return None
        self._free_graphs()
        proof = self._prover.prove(batches, name=REGION)
        if proof.has_no_reference and not self.must_prove:
            return None  # the loss of this update is not finite, for example
        self.must_prove, self._recompiled = False, self._region.session.counter.count
        return None if proof.accepted else proof.reason

    def _is_new(self, batches: list[Any]) -> bool:
        shapes = {shape_key(batch) for batch in batches} - self._shapes
        if not shapes or len(self._shapes) + len(shapes) > MOST_WIDTHS:
            return False
        self._shapes |= shapes
        return True

    def inputs(self, batch: Any) -> Any:
        """A micro-batch as the model gets it."""
        return region_inputs(batch, self._region)

    def finish(self) -> None:
        self._region.finish()


class CollatedUse:
    """Applies the plan to the collator's batches: joins, pads, compiles; switches off what no longer agrees."""

    def __init__(
        self,
        setup: TrainingSetup,
        plan: SpeedPlan,
        region: Region | None,
        *,
        is_proved: bool,
        free_graphs: Callable[[], None],
    ) -> None:
        """`free_graphs` is called before an update is compared, which takes as much memory as training without them."""
        self._plan, self._changes = plan, 0
        self._made: tuple[list[Any], list[Any]] | None = None
        """The collator's micro-batches of the current update, and the changed ones; None if they are not changed."""
        self._changed: list[ChangedBatches] = []
        options: dict[str, Any] = {"is_proved": is_proved, "free_graphs": free_graphs}
        if plan.joined > 1:
            self._changed.append(JoinedUse(setup, plan.joined, **options))
        if plan.widened:
            self._changed.append(WidenedUse(setup, **options))
        self.region = None if region is None else RegionUse(setup, region, plan, **options)

    @classmethod
    def of(cls, setup: TrainingSetup, plan: SpeedPlan, region: Region | None, **options: Any) -> CollatedUse | None:
        """For this plan, with the region that was proved for it or a new one; None if the plan changes nothing here."""
        if plan.region and region is None:
            region = setup.region()
        use = cls(setup, plan, region, **options)
        return use if use.is_used else None

    def arrange(self, update: Update) -> str | None:
        """Change the micro-batches; returns why a part of the plan was switched off, if it was."""
        made, self._made = update.batches, None
        for use in list(self._changed):
            found = use.arrange(update.batches)
            if isinstance(found, str):
                self._give_up(use, found)
                return f"{use.why_off}: {found}"
            update.batches = found
        if update.batches is not made:
            self._made = (made, update.batches)
        reason = None if self.region is None else self.region.differs(update.batches)
        if self.region is None or reason is None:
            return None
        self.region.finish()
        self.region, self._plan.region = None, ""
        self._plan.take_back(REGION, reason)
        return f"compiled code is switched off, and the model runs as written: {reason}"

    def _give_up(self, use: ChangedBatches, reason: str) -> None:
        self._changed.remove(use)
        if use.name == JOINED:
            self._plan.joined = 1
        elif use.name == WIDENED:
            self._plan.widened = False
        self._plan.take_back(use.name, reason)

    def arrange_again(self, update: Update, change: str) -> str | None:
        """Compare the current update, whose batches are the collator's, because the model has changed."""
        self._changes += 1
        self.prove_again()
        for use in self._uses():
            if self._changes > MOST_CHANGES:
                use.too_often = f"{change} changes during training"
        return self.arrange(update)

    def prove_again(self) -> None:
        """Compare the next update that is arranged."""
        for use in self._uses():
            use.must_prove = True

    def _uses(self) -> list[ChangedBatches | RegionUse]:
        return [*self._changed, *([] if self.region is None else [self.region])]

    def collated_batches(self, update: Update) -> list[Any]:
        """The collator's micro-batches of the current update."""
        is_changed = self._made is not None and self._made[1] is update.batches
        return self._made[0] if self._made is not None and is_changed else update.batches

    def inputs(self, batch: Any) -> Any:
        """A micro-batch as the model gets it."""
        return batch if self.region is None else self.region.inputs(batch)

    @property
    def is_used(self) -> bool:
        return bool(self._changed) or self.region is not None

    def finish(self) -> None:
        """Undo all changes to the model."""
        if self.region is not None:
            self.region.finish()
