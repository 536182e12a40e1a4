"""Planner: inspects updates until one shows a benefit, and has the accelerations proved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from ..attention.kernel_choice import VARIED
from ..compile.preparation import get_ready
from ..compile.region import Region
from ..cuda_graphs.graphed_step import GraphChoice
from ..cuda_graphs.recorder import MOST_SHAPES as MOST_GRAPHS, shape_key
from ..fused_loss.lazy_logits import HEAD
from ..joining import choose_joining
from ..layouts.candidates import Layout
from ..layouts.positions import most_positions, takes_any_length
from ..layouts.rows import GRAPH_TOKENS, LEAST_WIDTHS, can_add_rows, padded_tokens
from ..layouts.samples import SOURCE, TARGET, NoSamples, OddSamples, Samples
from ..memory.token_budget import MeasuredMemory, limits_for, plan_memory
from ..output_layer import ReplacedHead
from ..proof.guard import Coverage
from ..proof.prober import Proof
from ..training_setup import TrainingSetup
from ..widening import WidthChoice
from .choice import Decision
from .decision import (
    BIASED,
    COLLATED,
    COMPILED,
    GRAPHS,
    GROUPED,
    IN_GROUPS,
    IN_ROWS,
    PAIRED,
    SHORT_ROW,
    SpeedPlan,
    is_worth_it,
)
from .heads import HeadChoice
from .kept import EARLIER, KeptDecision, KeptPlan, NotKept, PlanFile, form_of
from .regions import MOST_SHAPES, MOST_WIDTHS, RegionChoice

LOOKS = 20
"""Updates inspected before padding counts as too little to remove."""
SHAPE_LOOKS = 5
"""Updates inspected before shapes count as repeating, if they are very few."""
PACKED_LOOKS = 5
"""Updates without padding after which packed samples are assumed to have none."""
LOGIT_BYTES = 16
"""Bytes of a logit in half and single precision, with its gradients."""
VARYING_DEVICES = ("cuda",)
"""Where attention kernels may be prepared for each shape."""


class Made(NamedTuple):
    """A plan and the objects that implement it."""

    plan: SpeedPlan
    layout: Layout | None = None
    head: ReplacedHead | None = None
    padding: float = 0.0
    """The fraction of tokens that are padding and worth removing."""
    coverage: Coverage | None = None
    """The updates that the proofs cover."""
    region: Region | None = None
    memory: MeasuredMemory | None = None


def _nothing(reason: str) -> SpeedPlan:
    plan = SpeedPlan()
    plan.note("layouts", False, reason)
    return plan


class Planner:
    """Waits until the updates seen so far allow a decision, and then makes the plan."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self._looks = 0
        self._tokens = 0
        """The real tokens of the update the plan is based on."""
        self._micro_batches = 1.0
        """The micro-batches of that update, without their padding."""
        self._graphs = GraphChoice(setup)
        self._regions = RegionChoice(setup)
        self._widths = WidthChoice(setup)
        self._file = PlanFile(setup)
        self._shapes: set[str] = set()
        """The shapes of the collator's micro-batches, until there are many; in checkpoints called `varied`."""

    def consider(self, batches: list[Any], take_apart: Callable[[list[Any]], Samples]) -> Made | None:
        """The plan, as soon as an update shows a benefit or that there is none; None before that."""
        setup = self._setup
        self._looks += 1
        if len(self._shapes) <= MOST_GRAPHS:
            self._shapes |= {repr(shape_key(batch)) for batch in batches if isinstance(batch, Mapping)}
        if setup.why_unchanged is not None:
            return self._plan_without_changes(setup.why_unchanged)
        seen = self._widths.look(batches)
        self._regions.most = MOST_SHAPES if seen is batches else MOST_WIDTHS
        self._graphs.look(seen)
        self._regions.look(seen)
        if setup.user_hook() is None and self._regions.waits(batches):
            return None
        made = self._planned(batches, take_apart)
        if made is None or setup.user_hook() is not None:
            return made
        if made.plan.layout == COLLATED:
            batches = choose_joining(made.plan, setup, batches, self._regions.count(batches))
            batches = self._widened(made.plan, batches)
            self._choose_attention(made.plan)
        region = self._regions.choose(made.plan, batches, made.head)
        head = made.head or HeadChoice(setup).choose(made.plan, batches)
        return made._replace(region=region, head=head)

    def _planned(self, batches: list[Any], take_apart: Callable[[list[Any]], Samples]) -> Made | None:
        """The plan as far as samples are concerned; what is done with the collator's batches is chosen after it."""
        setup = self._setup
        if (hooked := setup.user_hook()) is not None:
            plan = _nothing(f"a hook on {hooked} may read batches")
            self._note_graphs(plan, f"a hook on {hooked} would not be called")
            return Made(plan)
        if not setup.insists and not self._is_large(batches):
            return self._without_layout("the run is too small to benefit", batches)
        try:
            samples = take_apart(batches)
        except NoSamples as reason:
            if isinstance(reason, OddSamples) and self._looks < LOOKS:
                return None  # the next update may have other samples
            return self._without_layout(str(reason), batches, padding=1.0)
        padding = self._padding_to_leave_out(batches, samples)
        if isinstance(padding, str):
            return self._without_layout(padding, batches)
        if padding is None:
            return None
        self._recall(batches, samples)
        if setup.learn(batches):
            return self._decide(batches, samples, padding)
        coupled = setup.why_not_additive()
        if coupled is not None:  # the collator's batches are kept; the fused loss is still possible
            return self._decide(batches, samples, 0.0, coupled)
        return self._without_layout("the denominator of the loss is unknown", batches) if self._looks == LOOKS else None

    # ---- when -------------------------------------------------------------------------------------------------------

    def _is_large(self, batches: list[Any]) -> bool:
        """Whether there would be a benefit if every token were padding; reads shapes only."""
        setup, tokens = self._setup, 0
        for batch in batches:
            ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
            tokens += ids.numel() if isinstance(ids, Tensor) else 0
        return is_worth_it(1.0, tokens * setup.operations_per_token * setup.updates_left(), setup.device.type)

    def _padding_to_leave_out(self, batches: list[Any], samples: Samples) -> float | str | None:
        """The fraction of padding that is worth removing, or why it is not; None while that is undecided."""
        setup, real, padded = self._setup, samples.real_tokens, padded_tokens(batches, samples)
        padding = 1 - real / padded
        if setup.packs and padding == 0 and self._looks < PACKED_LOOKS:
            return None  # one sample, or several of the same length, do not show whether there is padding
        saved = (padded - real) * setup.operations_per_token * setup.updates_left()
        if setup.insists or is_worth_it(padding, saved, setup.device.type):
            return padding
        if self._waits_for_shapes(batches):
            return None
        if setup.on_gpu:  # GPUs gain more than padding, and in every update: do not wait for it
            return 0.0
        few = f"{padding:.0%} of the tokens are padding, too little to benefit from removing it"
        return few if self._looks == LOOKS else None

    def _waits_for_shapes(self, batches: list[Any]) -> bool:
        """Whether more updates are needed to see if shapes repeat, before micro-batches become graphs."""
        are_few = len(self._graphs.shapes) <= self._regions.most
        if self._looks >= (min(SHAPE_LOOKS, LOOKS) if are_few else LOOKS) or self._setup.insists:
            return False
        return self._graphs.why_not(SpeedPlan(), batches, work=self._regions.count(batches)) is None

    # ---- what -------------------------------------------------------------------------------------------------------

    def _without_layout(self, reason: str, batches: list[Any], *, padding: float = 0.0) -> Made | None:
        """A plan that changes nothing, except that micro-batches may become graphs; None to wait for more updates."""
        if self._waits_for_shapes(batches):
            return None
        plan = _nothing(reason)
        self._note_graphs(plan, self._graphs.why_not(plan, batches, work=self._regions.count(batches)))
        return Made(plan, padding=padding)

    def _prepare_compiler(self, batches: list[Any], samples: Samples) -> None:
        """Count the work of an update, and prepare the compiler if that will probably be used."""
        setup = self._setup
        self._micro_batches = len(batches) * samples.real_tokens / max(padded_tokens(batches, samples), 1)
        self._regions.count(batches)
        if self._wants_compiling() and setup.why_not_compile is None:
            get_ready()

    def _decide(self, batches: list[Any], samples: Samples, padding: float, why_collated: str | None = None) -> Made:
        """The plan that an earlier run has proved, if it agrees here; otherwise the one found by comparing all."""
        self._tokens = samples.real_tokens
        self._prepare_compiler(batches, samples)
        made = self._reused(batches, samples, padding, why_collated)
        if made is not None:
            return made
        made = self._search(batches, samples, padding, why_collated)
        form, shape, work = form_of(samples), self._regions.shape_of(batches), self._regions.count(batches)
        kept = KeptPlan.of(made.plan, made.coverage, form=form, shape=shape, work=work, memory=made.memory)
        self._file.save(kept)
        return made

    def _recall(self, batches: list[Any], samples: Samples) -> None:
        """Read what an earlier run has kept, and prepare the compiler early if its work is known from there."""
        earlier = self._file.earlier
        if earlier is not None and earlier.work is not None:
            self._regions.earlier = (earlier.shape, earlier.work)
        if self._regions.recalls(batches):
            self._prepare_compiler(batches, samples)

    def _reused(self, batches: list[Any], samples: Samples, padding: float, why_collated: str | None) -> Made | None:
        """The plan with what an earlier run has proved, if the update agrees; None to search for one."""
        kept = self._file.earlier
        if kept is None or kept.form != form_of(samples):
            return None
        decision = KeptDecision(self._setup, samples, batches, kept)
        try:
            self._draft(decision, padding, why_collated)
        except NotKept:
            return None
        plan = decision.plan
        found = decision.prove_update() if plan.layout != COLLATED or plan.linear_loss else None
        if not isinstance(found, Coverage) or (decision.head is not None and decision.head.logits_were_used):
            return None
        if not self._file.fits(kept):
            return None
        plan.note(EARLIER, True, decision.compared)
        self.choose_compiling(plan)
        return Made(plan, decision.layout, decision.head, padding, found)

    def forget(self) -> None:
        """Remove what is kept for later runs: it turned out to be wrong here."""
        self._file.save(None)

    def _search(self, batches: list[Any], samples: Samples, padding: float, why_collated: str | None) -> Made:
        """A plan for which all candidates were compared."""
        refused: dict[str, Proof] = {}
        while True:
            decision = Decision(self._setup, samples, batches, refused)
            self._draft(decision, padding, why_collated)
            plan, found = decision.plan, None
            if plan.layout != COLLATED or plan.linear_loss:
                found = decision.prove_update()
            if not isinstance(found, tuple):
                break
            what, proof = found
            if what not in (plan.layout, HEAD, GRAPHS):
                made = self._without_layout(proof.reason, batches, padding=padding)
                return made or Made(SpeedPlan(), padding=padding)
            refused[what] = proof
        self.choose_compiling(plan)
        return Made(plan, decision.layout, decision.head, padding, found, memory=decision.memory)

    def _draft(self, decision: Decision, padding: float, why_collated: str | None) -> None:
        """Fill the plan of a decision with what agrees on a few samples."""
        setup, samples, batches = self._setup, decision.samples, list(decision.batches)
        plan = decision.make(padding=padding, micro_batches=len(batches), why_collated=why_collated)
        if decision.is_comparable:
            decision.memory = plan_memory(
                plan,
                setup,
                samples=samples,
                batches=batches,
                layout=decision.layout,
                head=decision.head,
                prove=decision.prove_recomputing,
                earlier=decision.memory,
            )
        self._choose_graphs(plan, decision, batches, samples)

    def _choose_graphs(self, plan: SpeedPlan, decision: Decision, batches: list[Any], samples: Samples) -> None:
        if plan.layout in IN_GROUPS:
            self._note_graphs(plan, self._why_not_graph_groups(plan, decision, batches, samples))
            return
        if plan.layout == PAIRED:
            self._note_graphs(plan, "every micro-batch has rows of two lengths, so that few shapes repeat")
            return
        row = min(samples.real_tokens, limits_for(plan, self._setup, batches, samples).budget)
        reason = self._graphs.why_not(plan, batches, row=row, work=self._regions.count(batches))
        if reason is None and plan.layout in IN_ROWS:
            plan.graphed = True
            proof = decision.prove_few_shapes()
            reason = None if proof.accepted else f"with rows of a few lengths {proof.reason}"
        self._note_graphs(plan, reason)

    def _why_not_graph_groups(
        self, plan: SpeedPlan, decision: Decision, batches: list[Any], samples: Samples
    ) -> str | None:
        """Why groups do not become graphs; if they do, their logits are computed, which are few."""
        setup = self._setup
        has_limit = takes_any_length(setup.model) or most_positions(setup.model, of_sources=True) is not None
        if plan.layout not in (GROUPED, BIASED) or not has_limit or not can_add_rows(samples):
            return "the layout produces micro-batches of many shapes"
        if decision.head is not None and not self._are_logits_small(decision.head):
            return "the logits of a graph would take too much memory"
        reason = self._graphs.why_not(replace(plan, linear_loss=False), batches, row=GRAPH_TOKENS)
        if reason is not None:
            return reason
        head, decision.head = decision.head, None
        plan.graphed, plan.linear_loss = True, False
        proof = decision.refused.get(GRAPHS) or decision.prove_few_shapes()
        if proof.accepted:
            plan.take_back(HEAD, "micro-batches run as CUDA graphs, whose logits are small")
            decision.head = HeadChoice(setup).padded(plan, decision.prove_few_shapes)
            return None
        plan.graphed, plan.linear_loss, decision.head = False, head is not None, head
        return f"with groups of a few shapes {proof.reason}"

    def _are_logits_small(self, head: ReplacedHead) -> bool:
        """Whether logits of a group, with what their loss keeps, take a small part of the device's memory."""
        total = self._setup.device_memory()
        tokens = GRAPH_TOKENS * LEAST_WIDTHS[TARGET] // LEAST_WIDTHS[SOURCE]
        return total is None or tokens * head.head.weight.shape[0] * LOGIT_BYTES <= total / 32

    def _note_graphs(self, plan: SpeedPlan, reason: str | None) -> None:
        plan.graphed = reason is None
        if reason is None:
            plan.made_for = self._setup.described()
        if reason is None or self._setup.on_gpu:
            padded = "rows are padded to a few lengths" if plan.layout in IN_ROWS else "groups are padded to few shapes"
            repeat = padded if plan.few_shapes else "shapes repeat"
            plan.note(GRAPHS, plan.graphed, reason or f"kernel launches take longer than compute, and {repeat}")

    def choose_compiling(self, plan: SpeedPlan) -> None:
        """Enable compilation if a GPU has enough computing left; no effect if no update has been planned."""
        setup = self._setup
        if not setup.on_gpu or not self._tokens or plan.region:
            return
        reason = "micro-batches run as CUDA graphs" if plan.graphed else setup.why_not_compile
        if reason is None and plan.layout in IN_GROUPS:
            reason = "groups change in number and length, which would need many compilations"
        if reason is None and plan.activations == "full":
            reason = "whole blocks are recomputed"
        if reason is None and not self._wants_compiling():
            reason = "the run is too short to recover the cost of compiling"
        plan.compiled, plan.short_rows = reason is None, self._tokens < SHORT_ROW
        plan.forget(COMPILED)
        plan.note(COMPILED, reason is None, reason or "one compilation for all lengths")

    def _wants_compiling(self) -> bool:
        setup = self._setup
        return setup.on_gpu and (setup.level == "max" or self._regions.blocks_pay(self._micro_batches))

    def _plan_without_changes(self, reason: str) -> Made | None:
        """A plan that changes neither batches nor model; None until it is known whether their shapes vary."""
        if not self._shapes_vary and self._looks < LOOKS:
            return None
        plan = _nothing(reason)
        self._choose_attention(plan)
        return Made(plan)

    @property
    def _shapes_vary(self) -> bool:
        return self._setup.device.type in VARYING_DEVICES and len(self._shapes) > MOST_GRAPHS

    def _choose_attention(self, plan: SpeedPlan) -> None:
        """Avoid kernels that are prepared for each shape if the collator's batches have many."""
        plan.varied = self._shapes_vary and not plan.graphed and not plan.widened
        if plan.varied:
            plan.made_for = self._setup.described()
            plan.note(VARIED, True, "cuDNN's are not used, because they have to be prepared for each new shape")

    def _widened(self, plan: SpeedPlan, batches: list[Any]) -> list[Any]:
        """The micro-batches, padded if that is proved; otherwise graphs are chosen again, by their own shapes."""
        found = self._widths.choose(plan, batches)
        if found is not None:
            return found
        self._graphs.look(batches)
        self._regions.most = MOST_SHAPES
        self._regions.look(batches)
        plan.forget(GRAPHS)
        self._note_graphs(plan, "micro-batches have many shapes")
        return batches

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        shapes = {"shapes": sorted(self._graphs.shapes), "varied": sorted(self._shapes)}
        seen = {"looks": self._looks, "tokens": self._tokens, "micro_batches": self._micro_batches}
        return {**seen, **shapes, **self._regions.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._looks, self._tokens = state.get("looks", 0), state.get("tokens", 0)
        self._micro_batches = state.get("micro_batches", 1.0)
        self._graphs.shapes = set(state.get("shapes", ()))
        self._shapes = set(state.get("varied", ()))
        self._regions.load_state_dict(state)
