"""SpeedEngine: makes the plan from the first updates and lays out the samples of every update.

The calls of one update, in order:

    arrange           make the plan if there is none; replace the collator's micro-batches by those of the plan
    follow_changes    if a callback has changed the model since the last update: prove the plan again
    active            the model has the plan's attention and output layer while the micro-batches are computed
    inputs_of         the inputs of one micro-batch, on the device

An update is laid out if its samples were regrouped into other micro-batches; otherwise it has those of the collator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ..core.update import MicroBatch, Update
from .attention.kernel_choice import without_cudnn
from .channels_last import images_last
from .collated import CollatedUse
from .compile.region import Region
from .cuda_graphs.graphed_step import GraphedTraining
from .fused_loss.lazy_logits import PendingHead
from .layouts.candidates import Layout, make_layout
from .layouts.reading import SampleReader
from .layouts.rows import Laid, Limits
from .layouts.samples import SOURCE, Samples
from .memory.token_budget import limits_for
from .output_layer import PaddedHead, ReplacedHead, output_head
from .planner.decision import COLLATED, GRAPHS, IN_ROWS, UNPADDED, SpeedPlan
from .planner.planner import Planner
from .proof.audit import Verification
from .proof.prover import knows_count
from .training_setup import TrainingSetup

MOST_CHANGES = 8
"""Changes of the model between updates after which accelerations are switched off for good."""


class SpeedEngine:
    """Lays out updates, and installs and removes the model's attention and head around each of them."""

    def __init__(
        self,
        setup: Callable[[], TrainingSetup],
        *,
        announce: Callable[[SpeedPlan], None],
        tell: Callable[[str], None],
    ) -> None:
        self._make_setup, self._announce, self._tell = setup, announce, tell
        self._reset()
        self._changes = 0
        """How often a change of the model had to be followed, up to `MOST_CHANGES`."""
        self._whole: set[str] = set()
        """Entries of batches that have no token dimension."""
        self._undo: list[Callable[[], None]] = []
        """Functions that undo what the plan has changed in the model until the end of the run."""

    def _reset(self) -> None:
        """Clear all decisions; the training setup is read again when it is next needed."""
        self._made_setup: TrainingSetup | None = None
        self._knows_loss = False
        self.is_decided = False
        """Whether the plan is made."""
        self.is_active = False
        """Whether the plan changes updates."""
        self.is_idle = False
        """Whether the plan is made and changes nothing."""
        self.is_installed = False
        """Whether the model has the plan's attention and head now."""
        self.plan = SpeedPlan()
        self._layout: Layout | None = None
        """How samples are regrouped; None if micro-batches are those of the collator."""
        self._head: ReplacedHead | None = None
        """The output layer that replaces the model's during updates."""
        self._laid_from: tuple[list[Any], Samples] | None = None
        """The collator's batches and the samples of the current update; None if it is not laid out."""
        self._widest = 0
        """Length of the longest sample so far, which is the width of padded batches if few shapes are required."""
        self._graphed: GraphedTraining | None = None
        """The training step as CUDA graphs."""
        self._collated: CollatedUse | None = None
        """What the plan changes in the collator's batches: joined, padded, or computed by compiled code."""
        self._verification: Verification | None = None
        """The comparisons with the normal path since the plan was made."""
        self._must_prove = False
        """Whether the next update must prove the plan: it comes from a checkpoint, or the model has changed."""

    @property
    def _setup(self) -> TrainingSetup:
        if self._made_setup is None:
            self._made_setup = self._make_setup()
            self._planner = Planner(self._made_setup)
            self._reader = SampleReader(self._made_setup, self._whole, tell=self._tell)
        return self._made_setup

    def arrange(self, update: Update) -> None:
        """Lay out the update's samples according to the plan; batches that cannot be split into samples are kept."""
        setup = self._setup
        if not self.is_decided and not setup.is_shared:
            self.consider(update.batches)
        self._laid_from = None
        if not self.is_active:
            return
        self._learn_loss(update.batches)
        if self._collated is not None and (reason := self._collated.arrange(update)) is not None:
            self._report_collated(reason)
        if self._layout is not None:
            samples = self._reader.read_or_none(update.batches)
            if samples is not None:
                self._arrange_samples(update, samples)
        elif self._head is not None:
            self._audit_head(update.batches)

    def _arrange_samples(self, update: Update, samples: Samples) -> None:
        """Lay out these samples if a proof covers them, or if the update agrees when it is compared now."""
        laid, limits = self._laid(update.batches, samples)
        assert self._verification is not None
        if self._must_prove or not self._verification.coverage.forms:
            may_be_laid = self._still_holds(update.batches, samples, limits)
        else:
            may_be_laid = self._verification.allows(update.batches, samples, laid, limits)
        if may_be_laid and self._audit(update.batches, samples, limits):
            self._laid_from = (update.batches, samples)
            self._put_into(update, samples, laid)

    def _learn_loss(self, batches: list[Any]) -> None:
        """Determine the form of the loss while it is unknown: a later batch may show more than the first."""
        setup = self._setup
        if not self._knows_loss or (not setup.is_shared and setup.wants_test(batches)):
            setup.learn(batches)
            if self._knows_loss and self._collated is not None:
                self._collated.prove_again()  # the model may be given other values, such as the number of items
            self._knows_loss = True  # as far as it can be determined

    def _laid(self, batches: list[Any], samples: Samples) -> tuple[Laid, Limits]:
        assert self._layout is not None
        if self.plan.few_shapes and self.plan.layout in IN_ROWS:
            self._follow_longest(samples)
        limits = self._limits(batches, samples)
        return self._layout.lay(samples, limits, shifts=self._setup.shifts(), fill=self.plan.fill), limits

    def _put_into(self, update: Update, samples: Samples, laid: Laid) -> None:
        update.batches, update.computed_tokens = laid.batches, laid.computed_tokens
        update.real_tokens, update.squared_lengths = samples.real_tokens, samples.squared_lengths

    # ---- validity of the plan ---------------------------------------------------------------------------------------

    def _report_collated(self, reason: str) -> None:
        """Report that a part of the plan for the collator's batches was switched off."""
        self._tell(f"speed: {reason}")
        self._free_graphs()
        if self._collated is not None and not self._collated.is_used:
            self._collated = None
        self._update_activity()
        self._announce(self.plan)

    def _update_activity(self) -> None:
        self.is_active = any(x is not None for x in (self._layout, self._head, self._graphed, self._collated))
        self.is_idle = not self.is_active

    def _still_holds(self, batches: list[Any], samples: Samples | None, limits: Limits | None) -> bool:
        """Whether the plan of a checkpoint is valid for this update; if not, the next update makes a new one."""
        assert self._verification is not None
        proof = self._verification.prove(batches, samples, limits, covers=not self._verification.coverage.forms)
        self._must_prove = False
        if not proof.accepted:
            self._start_again(f"the plan in the checkpoint is no longer valid: {proof.reason}")
        return proof.accepted

    def _audit(self, batches: list[Any], samples: Samples | None, limits: Limits | None) -> bool:
        """Compute this update both ways if it is due; if it differs, switch everything off and return False."""
        assert self._verification is not None
        verification = self._verification
        failed = verification.audit(batches, samples, limits)
        if failed is None:
            return True
        self._tell(
            f"speed: step {verification.updates} since planning differs from the normal path: {failed.reason}. The "
            f"last step that agreed was {verification.since} steps earlier, those in between may be wrong; the "
            "collator's batches are kept from now on."
        )
        self._switch_off(f"a later step differed: {failed.reason}")
        return False

    def _audit_head(self, batches: list[Any]) -> None:
        """Audit a plan that replaces the output layer only; if it is from a checkpoint, it is proved first."""
        if not self._must_prove or self._still_holds(batches, None, None):
            self._audit(batches, None, None)

    def _switch_off(self, reason: str) -> None:
        name = self.plan.layout if self._layout is not None or self._head is None else self._head.name
        self._planner.forget()
        self.finish()
        plan = SpeedPlan(choices=self.plan.choices)
        for choice in plan.choices:
            choice.is_on, choice.reason = False, reason if choice.name == name else choice.reason
        self.plan, self._graphed, self._collated, self._laid_from = plan, None, None, None
        self._carry_out(None, None)
        self._announce(plan)

    def _start_again(self, reason: str) -> None:
        """Undo the plan; the next update makes a new one, unless that happened too often or ranks share updates."""
        self._planner.forget()
        self._tell(f"speed: accelerations are chosen again: {reason}")
        self._changes += 1
        if self._changes > MOST_CHANGES or self._setup.is_shared:
            self._switch_off(reason)
        else:
            self.finish()
            self._reset()

    def follow_changes(self, update: Update, changes: list[str]) -> None:
        """Prove the plan again after the model or the training has changed between updates, e.g. in a callback."""
        if self._graphed is not None:
            self._refresh_graphs(changes[0])
        if "hooks" in changes and self._setup.user_hook() is not None:
            self._put_back(update)
            self._start_again("a hook was registered")
            return
        if self._collated is not None:
            self._arrange_again(update, changes[0])
        if self._layout is not None or self._head is not None:
            self._prove_changed(update, changes[0])

    def _arrange_again(self, update: Update, change: str) -> None:
        assert self._collated is not None
        self._put_back(update)
        reason = self._collated.arrange_again(update, change)
        self._setup.recount(update)
        if reason is not None:
            self._report_collated(reason)

    def _prove_changed(self, update: Update, change: str) -> None:
        assert self._verification is not None
        batches, samples = self._laid_from or (update.batches, None)
        if samples is None and self._layout is not None:
            self._must_prove = True  # this update is not laid out; the next one that is proves the plan again
            return
        limits = None if samples is None else self._limits(batches, samples)
        self._changes += 1
        if self._changes <= MOST_CHANGES and self._verification.prove(batches, samples, limits, covers=False).accepted:
            return
        self._put_back(update)
        self._start_again(f"{change} has changed")

    def _refresh_graphs(self, change: str) -> None:
        assert self._graphed is not None
        self._changes += 1
        if self._changes > MOST_CHANGES:
            self._graphed.give_up(f"{change} changes during training")
        else:
            self._graphed.look_again()

    def _free_graphs(self) -> None:
        """Discard the graphs, with the gradients and batches in their memory; they are recorded again when needed."""
        if self._graphed is not None:
            self._graphed.look_again()

    def _put_back(self, update: Update) -> None:
        """Give an update the collator's batches again."""
        made = self.collated_batches(update)
        if made is not update.batches:
            update.batches, self._laid_from = made, None
            self._setup.recount(update)

    def _follow_longest(self, samples: Samples) -> None:
        """Widen the padded batches if a sample is longer than all before; graphs of the former width are dropped."""
        longest = int(samples.axes[SOURCE].ends.max())
        if longest > self._widest:
            self._widest = longest
            if self._graphed is not None and self.plan.layout == UNPADDED:
                self._graphed.step.forget()

    # ---- the current update -----------------------------------------------------------------------------------------

    @property
    def is_laid(self) -> bool:
        """Whether the current update is laid out, instead of having the collator's batches."""
        return self._laid_from is not None

    def collated_batches(self, update: Update) -> list[Any]:
        """The collator's micro-batches of the current update."""
        if self._laid_from is not None:
            return self._laid_from[0]
        return update.batches if self._collated is None else self._collated.collated_batches(update)

    @property
    def checks(self) -> dict[str, int]:
        """Counts of comparisons since the plan was made, for the report."""
        return {} if self._verification is None or not self.is_active else self._verification.checks

    def keep_collated(self) -> None:
        """Treat the current update as not laid out: its micro-batches were replaced by others."""
        self._laid_from = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Install the plan's attention and head around the forward and backward of all micro-batches of an update."""
        reason = None if self._head is None else self._head.try_install()
        if reason is not None:
            assert self._head is not None
            self._tell(f"speed: the {self._head.name} is switched off because the output layer changed: {reason}")
        self.is_installed = True
        try:
            if self.is_laid:
                assert self._layout is not None
                with self._layout.active():
                    yield
            else:
                with self.attention():
                    yield
        finally:
            self.is_installed = False
            if self._head is not None:
                self._head.remove()

    def attention(self) -> AbstractContextManager[None]:
        """Context for the attention kernels of an update with the collator's batches."""
        return without_cudnn() if self.plan.varied else nullcontext()

    def inputs_of(self, micro: MicroBatch) -> Any:
        """The inputs of a micro-batch for the model, on the device."""
        if self._head is not None:
            is_known = micro.update.counted and knows_count(self._setup) and not self.plan.graphed
            self._head.count = micro.targets if is_known else None  # in a graph it would be that of the first batch
        batch = micro.inputs
        if self._layout is None or not self.is_laid:
            return batch if self._collated is None else self._collated.inputs(batch)
        batch = self._setup.to_device(batch)
        return batch if self._graphed is not None else self._layout.for_model(batch)  # a graph includes that conversion

    def rearrange(self, update: Update) -> bool:
        """Lay out an update in micro-batches of half the size after memory ran out; returns whether that worked."""
        if self._layout is None or self._laid_from is None:
            return False
        batches, samples = self._laid_from
        budget = self._limits(batches, samples).budget
        longest = int(samples.lengths.max())
        if budget <= longest:
            return False
        self.plan.budget = max(longest, budget // 2)
        self._tell(f"out of memory: micro-batches now have at most {self.plan.budget:,} tokens")
        if self._graphed is not None:
            self._graphed.step.forget()
        self._put_into(update, samples, self._laid(batches, samples)[0])
        return True

    # ---- the plan ---------------------------------------------------------------------------------------------------

    def consider(self, batches: list[Any]) -> None:
        """Make the plan as soon as an update allows a decision, and apply it."""
        setup = self._setup  # also creates the planner
        made = self._planner.consider(batches, self._reader.read)
        if made is None:
            return
        self.plan = made.plan
        self._knows_loss = made.layout is not None or made.region is not None or self.plan.joined > 1
        self._carry_out(made.layout, made.head, made.region)
        if self._verification is not None and made.coverage is not None:
            self._verification.coverage = made.coverage
        self._announce(self.plan)
        if setup.token_budget and self._layout is None and made.padding > 0:
            self._tell(
                f"per_device_train_batch_tokens={setup.token_budget:,}: micro-batches are padded and may have more "
                "tokens, since no padding-free layout is verified here; see speed_report()"
            )

    def _carry_out(
        self, layout: Layout | None, head: ReplacedHead | None, proved: Region | None = None, *, is_saved: bool = False
    ) -> None:
        self._layout, self._head = layout, head
        if self.plan.activations != "none":
            self._undo.append(self._setup.recompute(self.plan.activations))
        if self.plan.compiled:
            self._setup.compile(self.plan.short_rows)
        if self.plan.graphed and self._setup.graph is not None:
            self._graphed = self._setup.graph()
            self._undo.append(self._graphed.close)
            if layout is not None:
                self._graphed.take_rows(layout.for_model)
            elif self.plan.channels_last:
                self._graphed.take_images(images_last)
        self._collated = CollatedUse.of(
            self._setup, self.plan, proved, is_proved=not is_saved, free_graphs=self._free_graphs
        )
        if self._collated is not None:
            self._undo.append(self._collated.finish)
        self._update_activity()
        self.is_decided = True
        self._verification = Verification(self._setup, self.plan, layout, head, tell=self._tell)

    def give_up_graphs(self, reason: str) -> None:
        """Disable CUDA graphs for this run and any run resumed from it."""
        self.plan.graphed = False
        self.plan.take_back(GRAPHS, reason)
        self._planner.choose_compiling(self.plan)
        if self.plan.compiled:
            self._setup.compile(self.plan.short_rows)
        self._announce(self.plan)

    def _limits(self, batches: list[Any], samples: Samples) -> Limits:
        return limits_for(self.plan, self._setup, batches, samples, widest=self._widest)

    def leave(self) -> int:
        """End the use of a plan that does not fit the loss; returns the updates since the last one that agreed."""
        self._planner.forget()
        self.finish()
        return 0 if self._verification is None else self._verification.since

    def finish(self) -> None:
        """Undo all changes to the model."""
        while self._undo:
            self._undo.pop()()

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        assert self._setup is not None  # reading the property also creates the planner
        plan = self.plan.as_dict() if self.is_decided else None
        seen = {**self._planner.state_dict(), "whole": sorted(self._whole), "widest": self._widest}
        if self._verification is not None:
            seen["verification"] = self._verification.state_dict()
        if self._graphed is not None:
            seen["times"] = dict(self._graphed.step.times)
        return {**seen, "plan": plan}

    def follow(self, state: dict[str, Any]) -> None:
        """Apply the plan that another rank has made; no accelerations if it is not possible on this rank."""
        self.load_state_dict(state)
        if state.get("plan") and not self.is_decided:
            self.plan.note("layouts", False, "the decision of another rank is not possible on this one")
            self._carry_out(None, None)
        if self.is_decided:
            self._announce(self.plan)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Apply the plan of a checkpoint if it was made for the same device, versions and code; else plan again."""
        setup = self._setup
        self._planner.load_state_dict(state)
        self._whole.update(state.get("whole", ()))
        self._widest = state.get("widest", 0)
        plan = SpeedPlan.from_dict(state["plan"]) if state.get("plan") else None
        if plan is None or (plan.changes_anything and plan.made_for != setup.described()):
            return
        model = self._setup.model
        layout = None if plan.layout == COLLATED else make_layout(plan.layout, model)
        head = output_head(model) if plan.linear_loss or plan.padded_head else None
        missing = (plan.linear_loss or plan.padded_head) and head is None
        missing |= plan.activations not in self._setup.policies
        missing |= plan.graphed and self._setup.why_not_graph is not None
        missing |= bool(plan.region) and self._setup.why_not_region is not None
        if isinstance(layout, str) or missing:
            return
        self.plan = plan
        replaced = PendingHead if plan.linear_loss else PaddedHead
        self._carry_out(layout, None if head is None else replaced(head), is_saved=True)
        self._must_prove = self.is_active
        if self._verification is not None:
            self._verification.load_state_dict(state.get("verification", {}))
        if self._graphed is not None:
            self._graphed.step.times.update(state.get("times", {}))
