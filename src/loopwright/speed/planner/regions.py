"""Whether a model is compiled as one region: constant shapes, an estimate that it pays, a proof, a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ..channels_last import CHANNELS_LAST, images_last, may_help
from ..compile.blocks import repeated_blocks
from ..compile.preparation import get_ready
from ..compile.region import MODEL, Region
from ..cuda_graphs.recorder import shape_key
from ..output_layer import ReplacedHead
from ..proof.prober import Proof
from ..proof.region import RegionProver, trial
from ..training_setup import TrainingSetup
from .cost import Work, count_work, pays_to_compile
from .decision import COLLATED, COMPILED, SpeedPlan

REGION = "compiled for these shapes"
COMPILING_DEVICES = ("cuda",)
LOOKS = 3
"""Updates whose shapes must be the same before a region is compiled for them."""
MOST_SHAPES = 2
"""Most shapes of micro-batches for which a region is compiled."""
MOST_WIDTHS = 4
"""Most shapes if targets are padded to a few widths, each of which is compiled when it first occurs."""
FASTER = 0.97
"""Largest share of the time as written that a region may take."""


class RegionChoice:
    """Collects the shapes of micro-batches, and decides on a region once they repeat."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self.shapes: set[str] = set()
        """The shapes seen so far, as text, because they are saved with the run."""
        self.looks = 0
        self.most = MOST_SHAPES
        self._work: Work | None = None
        self._is_counted = False
        self.earlier: tuple[str, Work] | None = None
        """The shape of a micro-batch that an earlier run has counted, and its work."""

    # ---- when -------------------------------------------------------------------------------------------------------

    def look(self, batches: Sequence[Any]) -> None:
        """Record the shapes of an update's micro-batches."""
        if self._setup.why_not_region is None and len(self.shapes) <= self.most:
            self.looks += 1
            self.shapes |= {repr(shape_key(batch)) for batch in batches}

    def waits(self, batches: Sequence[Any]) -> bool:
        """Whether more updates are needed to see if shapes repeat."""
        needed = 1 if self._setup.level == "max" else LOOKS
        return self._why_not_possible() is None and self.looks < needed and self._pays(batches)

    def _why_not_possible(self) -> str | None:
        setup = self._setup
        if setup.why_not_region is not None:
            return setup.why_not_region
        if setup.device.type not in COMPILING_DEVICES:
            return f"{setup.device.type} is not compiled for unless torch_compile is set"
        if len(self.shapes) > self.most:
            return "micro-batches have many shapes"
        return "batches hold more than tensors and plain values" if repr(None) in self.shapes else None

    # ---- whether it pays --------------------------------------------------------------------------------------------

    def count(self, batches: Sequence[Any]) -> Work | None:
        """The operators of the first micro-batch, counted once; None if its loss cannot be computed apart."""
        setup = self._setup
        if self._work is None and self.earlier is not None and self.recalls(batches):
            self._work = replace(self.earlier[1])
        is_used = setup.on_gpu or setup.device.type in COMPILING_DEVICES
        if self._work is None and is_used and not self._is_counted:
            self._is_counted = True
            try:
                with setup.sandbox(), setup.as_trained():
                    setup.model.train()
                    self._work = count_work(trial(setup, batches[0]), setup.device)
            except Exception:  # user code: training may still succeed
                self._work = None
        return self._work

    def recalls(self, batches: Sequence[Any]) -> bool:
        """Whether an earlier run has counted a micro-batch of the same shape."""
        return self.earlier is not None and self.earlier[0] == self.shape_of(batches)

    @staticmethod
    def shape_of(batches: Sequence[Any]) -> str:
        """The shape of the micro-batch that is counted."""
        return repr(shape_key(batches[0]))

    def _pays(self, batches: Sequence[Any]) -> bool:
        setup = self._setup
        if setup.level == "max":
            return True
        self.count(batches)
        return self.blocks_pay(len(batches))

    def blocks_pay(self, micro_batches: float) -> bool:
        """Whether compiling the repeated blocks pays for what was counted; an update has this many micro-batches."""
        setup, work = self._setup, self._work
        if work is None:
            return False
        times, repeats = setup.updates_left() * micro_batches, max(len(repeated_blocks(setup.model)), 1)
        return pays_to_compile(work, times=times, kind=setup.device.type, warm=setup.is_warm(), repeats=repeats)

    # ---- choosing ---------------------------------------------------------------------------------------------------

    def choose(self, plan: SpeedPlan, batches: Sequence[Any], head: ReplacedHead | None) -> Region | None:
        """The region, proved and measured, if there is one; the plan records the choice and its reason."""
        if self._setup.device.type not in COMPILING_DEVICES or plan.layout != COLLATED:
            return None
        found = self._why_not(plan, batches)
        if found is not None:
            plan.note(REGION, False, found)
            return None
        get_ready()
        region, reason = self._tried(plan, batches, head)
        if region is None:
            plan.note(REGION, False, reason)
        return region

    def _why_not(self, plan: SpeedPlan, batches: Sequence[Any]) -> str | None:
        reason = self._why_not_possible()
        if reason is None and plan.activations != "none":
            reason = "activations are recomputed"
        if reason is None and not self._pays(batches):
            reason = "the run is too short to recover the cost of compiling"
        return reason

    def _tried(self, plan: SpeedPlan, batches: Sequence[Any], head: ReplacedHead | None) -> tuple[Region | None, str]:
        setup, region = self._setup, self._setup.region()
        prover = RegionProver(setup, region, in_graph=plan.graphed)
        setup.learn(list(batches))  # what the model is given, such as the number of items, depends on its loss
        proof = self._proved_with_images_last(plan, region, batches) or prover.prove(batches, name=REGION)
        reason = proof.reason
        if proof.accepted and setup.may_measure and not plan.graphed:  # a graph is not bound by the launches timed here
            reason = self._measured(prover, batches, head, proof.numbers)
        # What was refused here is not compiled in another way either.
        plan.compiled = False
        plan.forget(COMPILED)
        if not proof.accepted or reason:
            region.finish()
            return None, reason
        plan.region, plan.made_for = region.scope, setup.described()
        plan.note(REGION, True, _described(region, proof.numbers), proof.numbers)
        return region, ""

    def _proved_with_images_last(self, plan: SpeedPlan, region: Region, batches: Sequence[Any]) -> Proof | None:
        """The proof with channels-last images, if they give the same and are faster when compiled; otherwise None.

        Compiled code decides: as written, kernels between the convolutions hide what the convolutions gain.
        """
        setup = self._setup
        if not plan.graphed or not may_help(setup, batches[0]):
            return None
        prover = RegionProver(setup, region, in_graph=True, prepare=images_last)
        before = prover.device_seconds(batches, is_compiled=False)
        proof = prover.prove(batches, name=REGION)
        if not proof.accepted:
            plan.note(CHANNELS_LAST, False, proof.reason)
            return None
        after = prover.device_seconds(batches, is_compiled=True)
        times = f"{1000 * after:.1f} ms for a compiled micro-batch instead of {1000 * before:.1f} as written"
        plan.channels_last = after <= FASTER * before or setup.level == "max"
        plan.note(CHANNELS_LAST, plan.channels_last, times if plan.channels_last else f"they are not faster: {times}")
        return proof if plan.channels_last else None

    def _measured(
        self, prover: RegionProver, batches: Sequence[Any], head: ReplacedHead | None, numbers: dict[str, float]
    ) -> str:
        """Why a region is not used, by its time; empty if it is faster."""

        def with_head() -> ExitStack:
            stack = ExitStack()
            if head is not None:
                head.install(always=True)
                stack.callback(head.remove)
            return stack

        before = prover.seconds(batches, with_region=False, around=with_head)
        after = prover.seconds(batches, with_region=True, around=with_head)
        numbers["ms_before"], numbers["ms_compiled"] = 1000 * before, 1000 * after
        if after <= FASTER * before or self._setup.level == "max":
            return ""
        return f"it is not faster: {1000 * after:.1f} ms for a micro-batch instead of {1000 * before:.1f}"

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        work = None if self._work is None else self._work.as_dict()
        return {"region_looks": self.looks, "region_shapes": sorted(self.shapes), "work": work}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.looks, self.shapes = state.get("region_looks", 0), set(state.get("region_shapes", ()))
        self._work = Work(**state["work"]) if state.get("work") else None


def _described(region: Region, numbers: Mapping[str, float]) -> str:
    what = "the whole model and its loss" if region.scope == MODEL else f"{len(region.calls)} blocks"
    faster = ""
    if "ms_compiled" in numbers:
        faster = f"; {numbers['ms_compiled']:.1f} ms for a micro-batch instead of {numbers['ms_before']:.1f}"
    return f"{what}; same loss and gradient (within {max(numbers['gradient'], 1e-16):.0e}){faster}"
