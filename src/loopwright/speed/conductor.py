"""Applying the plan: looks at the first updates, has the plan made, lays out the samples of every update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from ..core.batches import Update
from .budget import plan_memory
from .candidates import Layout, make_layout
from .compiling import get_ready
from .deciding import Decision, output_head
from .graphing import GraphChoice, GraphedTraining, share_of
from .layouts import Limits, padded_tokens
from .pending import PendingHead
from .plan import (
    AS_MADE,
    GROUP_TOKENS,
    IN_GROUPS,
    IN_ROWS,
    SHORT_ROW,
    UNPADDED,
    SpeedPlan,
    is_worth_it,
    pays_to_compile,
)
from .samples import SOURCE, NoSamples, OddSamples, Samples, take_apart
from .situation import Situation

LOOKS = 20
"""Updates looked at before it is settled that their padding is not worth anything."""
GRAPHS, COMPILED = "micro-batches as CUDA graphs", "compiled blocks"

PACKED_LOOKS = 5
"""Updates that may come without padding before packed samples are believed to have none."""


class Conductor:
    """Lays out updates, and brings the model's attention and head in and out around each of them."""

    def __init__(
        self, situation: Situation, *, announce: Callable[[SpeedPlan], None], tell: Callable[[str], None]
    ) -> None:
        self._here, self._announce, self._tell = situation, announce, tell
        self._looks = 0
        self._knows_loss = False
        self.is_decided = False
        self.is_active = False
        """Whether anything is done to updates."""
        self.is_idle = False
        """Whether nothing is done to updates, nor will be."""
        self.plan = SpeedPlan()
        self._layout: Layout | None = None
        self._head: PendingHead | None = None
        self._last: tuple[list[Any], Samples] | None = None
        """The update before it was laid out, in case that has to be done again; None if it stays as it was made."""
        self._undo: list[Callable[[], None]] = []
        self._widest = 0
        """The longest sample so far, which padded batches are as wide as where few shapes are wanted."""
        self._tokens = 0
        """The real tokens of the update that decided."""
        self._whole: set[str] = set()
        """Entries of batches that were seen to run along no tokens."""
        self._graph_choice = GraphChoice(situation)
        self._graphed: GraphedTraining | None = None

    # ---- every update -----------------------------------------------------------------------------------------------

    def arrange(self, update: Update) -> None:
        """Lay the update's samples out as planned; batches that cannot be taken apart stay as they are."""
        if not self.is_decided and not self._here.is_shared:
            self.consider(update.batches)
        if self._layout is None:
            if self._graphed is not None and not self._knows_loss:
                self._here.learn(update.batches[0])
                self._knows_loss = True  # or as much as can be known
            return
        if not self._knows_loss:  # a plan of a checkpoint: batches that are laid out tell less about the loss
            self._knows_loss = self._here.learn(update.batches[0])
        try:
            samples = self._taken_apart(update.batches)
            if self._here.shifts() and samples.first_targets_are_counted():
                raise OddSamples("a sample that is padded on the left has a target on its first token")
        except NoSamples as reason:
            self._last = None
            self._tell(f"speed: batches like these stay as they were made: {reason}")
            return
        self._last = (update.batches, samples)
        self._lay(update, *self._last)

    def _lay(self, update: Update, batches: list[Any], samples: Samples) -> None:
        assert self._layout is not None
        if self.plan.few_shapes:
            self._look_at_widths(samples)
        limits = self._limits(batches, samples)
        laid = self._layout.lay(samples, limits, shifts=self._here.shifts(), fill=self.plan.fill)
        update.batches = laid.batches
        update.real_tokens, update.computed_tokens = samples.real_tokens, laid.computed_tokens
        update.squared_lengths = samples.squared_lengths

    def _look_at_widths(self, samples: Samples) -> None:
        longest = int(samples.axes[SOURCE].ends.max())
        if longest > self._widest:
            self._widest = longest
            if self._graphed is not None and self.plan.layout == UNPADDED:
                self._graphed.step.forget()

    @property
    def is_laid(self) -> bool:
        """Whether the current update is laid out anew, and not as the collator made it."""
        return self._last is not None

    def first_as_made(self, update: Update) -> Any:
        """The first micro-batch as the collator made it, for a process that has nothing to do."""
        return update.batches[0] if self._last is None else self._last[0][0]

    def leave_as_made(self) -> None:
        """Take the current update as it is: its micro-batches were exchanged for others."""
        self._last = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around the forward and backward of all micro-batches of an update."""
        if self._head is not None:
            self._head.install()
        try:
            if self.is_laid:
                assert self._layout is not None
                with self._layout.active():
                    yield
            else:
                yield
        finally:
            if self._head is not None:
                self._head.remove()

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The function that runs an update, with what the plan needs in place."""

        def running(*args: Any) -> Any:
            with self.active():
                return run(*args)

        return running

    def batch(self, update: Update, index: int) -> Any:
        """A micro-batch as the model takes it, on the device."""
        if self._head is not None:
            items = update.items[index] if update.items and update.counted else None
            self._head.count = items if isinstance(items, int) else None
        if self._graphed is not None:
            self._graphed.share = share_of(update, index)
        batch = update.batches[index]
        if self._layout is None or not self.is_laid:
            return batch
        batch = self._here.put(batch)
        return batch if self._graphed is not None else self._layout.for_model(batch)  # a graph does that inside

    def rearrange(self, update: Update) -> bool:
        """Lay an update out in micro-batches half as large, after memory ran out; returns whether that is possible."""
        if self._layout is None or self._last is None:
            return False
        batches, samples = self._last
        budget = self._limits(batches, samples).budget
        longest = int(np.sum([axis.lengths for axis in samples.axes.values()], axis=0).max())
        if budget <= longest:
            return False
        self.plan.budget = max(longest, budget // 2)
        self._tell(f"out of memory: micro-batches have at most {self.plan.budget:,} tokens from here on")
        if self._graphed is not None:
            self._graphed.step.forget()
        self._lay(update, batches, samples)
        return True

    # ---- deciding ---------------------------------------------------------------------------------------------------

    def consider(self, batches: list[Any]) -> None:
        """Make the plan as soon as an update shows that it pays."""
        here = self._here
        self._looks += 1
        self._graph_choice.look(batches)
        if not here.insists and not self._is_large(batches):
            return self._settle("the run is too small to gain anything", batches)
        try:
            samples = self._taken_apart(batches)
        except NoSamples as reason:
            if isinstance(reason, OddSamples) and self._looks < LOOKS:
                return None  # the samples of the next update may be others
            self._settle(str(reason), batches)
            return self._tell_no_budget(padding=1.0)
        padding = self._padding_to_leave_out(batches, samples)
        if padding is None:
            return None
        if here.learn(batches[0]):
            return self._decide(batches, samples, padding)
        if self._looks == LOOKS:
            self._settle("the loss does not show what it is divided by", batches)
        return None

    def _padding_to_leave_out(self, batches: list[Any], samples: Samples) -> float | None:
        """The part of the tokens that is padding and worth leaving out; None while it is not known whether any is."""
        here, real, padded = self._here, samples.real_tokens, padded_tokens(batches, samples)
        padding = 1 - real / padded
        if here.packs and padding == 0 and self._looks < PACKED_LOOKS:
            return None  # one sample, or some that happen to be equally long, show nothing
        saved = (padded - real) * here.operations_per_token * here.updates_left()
        if here.insists or is_worth_it(padding, saved, here.device.type):
            return padding
        if self._waits_for_shapes(batches):
            return None
        if here.on_gpu:  # where there is more to gain than padding, and in every update: it is not waited for
            return 0.0
        if self._looks == LOOKS:
            few = f"{padding:.0%} of the tokens are padding: too little to gain by leaving it out"
            self._settle(few, batches)
        return None

    def _decide(self, batches: list[Any], samples: Samples, padding: float) -> None:
        here, real = self._here, samples.real_tokens
        self._tokens = real
        if self._wants_compiling(real) and here.why_not_compile is None and not here.is_pair:
            get_ready()
        decision = Decision(here, samples)
        self.plan = decision.make(padding=padding)
        if decision.reference is not None:
            plan_memory(
                self.plan,
                here,
                samples=samples,
                batches=batches,
                layout=decision.layout,
                head=decision.head,
                prove=decision.prove_recomputing,
            )
        self._choose_graphs(decision, batches, samples)
        self._choose_compiling(real)
        self._carry_out(decision.layout, decision.head)
        self._announce(self.plan)
        return self._tell_no_budget(padding)

    def _choose_graphs(self, decision: Decision, batches: list[Any], samples: Samples) -> None:
        row = min(samples.real_tokens, self._limits(batches, samples).budget)
        reason = self._graph_choice.why_not(self.plan, batches, row=row)
        if reason is None and self.plan.layout in IN_ROWS:
            self.plan.graphed = True
            proof = decision.prove_few_shapes()
            reason = None if proof.accepted else f"with rows of a few lengths {proof.reason}"
        self._note_graphs(reason)

    def _choose_compiling(self, tokens: int) -> None:
        """Compile where a GPU has enough left to compute."""
        here = self._here
        if not here.on_gpu:
            return
        reason = "micro-batches are graphs" if self.plan.graphed else here.why_not_compile
        if reason is None and self.plan.layout in IN_GROUPS:
            reason = "groups change in number and length, which takes many compilations"
        if reason is None and self.plan.activations == "full":
            reason = "whole blocks are recomputed"
        if reason is None and not self._wants_compiling(tokens):
            reason = "the run is too short to make up for compiling"
        self.plan.compiled, self.plan.short_rows = reason is None, tokens < SHORT_ROW
        self.plan.forget(COMPILED)
        self.plan.note(COMPILED, reason is None, reason or "one compilation for all lengths")

    def _wants_compiling(self, tokens: int) -> bool:
        here = self._here
        operations = tokens * here.operations_per_token * here.updates_left()
        return here.on_gpu and (here.level == "max" or pays_to_compile(operations, here.device.type))

    def _carry_out(self, layout: Layout | None, head: PendingHead | None) -> None:
        self._layout, self._head = layout, head
        if self.plan.activations != "none":
            self._undo.append(self._here.recompute(self.plan.activations))
        if self.plan.compiled:
            self._here.compile(self.plan.short_rows)
        if self.plan.graphed and self._here.graph is not None:
            self._graphed = self._here.graph()
            self._undo.append(self._graphed.close)
            if layout is not None:
                self._graphed.take_rows(layout.for_model)
        self.is_decided, self.is_active = True, layout is not None or head is not None or self._graphed is not None
        self.is_idle = not self.is_active

    def _waits_for_shapes(self, batches: list[Any]) -> bool:
        """Whether some more updates have to show that shapes repeat, before micro-batches become graphs."""
        if self._looks >= LOOKS or self._here.insists:
            return False
        return self._graph_choice.why_not(self.plan, batches) is None

    def _note_graphs(self, reason: str | None) -> None:
        here, plan = self._here, self.plan
        plan.graphed = reason is None
        if reason is None:
            plan.made_for = here.described()
        if reason is None or here.on_gpu:
            repeat = "rows are filled up to a few lengths" if plan.few_shapes else "shapes repeat"
            plan.note(GRAPHS, plan.graphed, reason or f"launching takes longer than computing, and {repeat}")

    def give_up_graphs(self, reason: str) -> None:
        """Micro-batches turned out to be no graphs: the run goes on without, and so does whoever resumes it."""
        self.plan.graphed = False
        self.plan.take_back(GRAPHS, reason)
        if self._tokens:
            self._choose_compiling(self._tokens)
        if self.plan.compiled:
            self._here.compile(self.plan.short_rows)
        self._announce(self.plan)

    def _is_large(self, batches: list[Any]) -> bool:
        """Whether anything could be gained even if every token were padding; asks for shapes only."""
        here, tokens = self._here, 0
        for batch in batches:
            ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
            tokens += ids.numel() if isinstance(ids, Tensor) else 0
        return is_worth_it(1.0, tokens * here.operations_per_token * here.updates_left(), here.device.type)

    def _tell_no_budget(self, padding: float) -> None:
        """Say that a number of tokens is not kept: only a layout can."""
        if self._here.token_budget and self._layout is None and padding > 0:
            self._tell(
                f"per_device_train_batch_tokens={self._here.token_budget:,}: micro-batches are padded and may take "
                "more, since no layout is proved here; speed_report() says why"
            )

    def _settle(self, reason: str, batches: list[Any]) -> None:
        if self._waits_for_shapes(batches):
            return
        self.plan.note("layouts", False, reason)
        self._note_graphs(self._graph_choice.why_not(self.plan, batches))
        self._carry_out(None, None)
        self._announce(self.plan)

    def _taken_apart(self, batches: list[Any]) -> Samples:
        samples = take_apart(
            batches, is_pair=self._here.is_pair, counts_trailing=not self._here.shifts(), whole=self._whole
        )
        self._whole.update(samples.per_sample())
        return samples

    def _limits(self, batches: list[Any], samples: Samples) -> Limits:
        plan = self.plan
        budget = plan.budget or self._here.token_budget
        if not budget:
            # What the collator's own batches take fits: the user asked for it.
            budget = max(padded_tokens([batch], samples) for batch in batches)
            if plan.fill and plan.layout in IN_ROWS:
                budget = max(budget, GROUP_TOKENS)  # and not a longer row: what it takes has not been measured
        # A GPU computes while the next micro-batch is launched: only what is shorter than a launch costs extra.
        overhead, floor = (0, plan.overhead) if self._here.on_gpu else (plan.overhead, 0)
        return Limits(budget, overhead, plan.round_to, floor, few_shapes=plan.few_shapes, width=self._widest)

    def finish(self) -> None:
        """Leave the model as it was found."""
        while self._undo:
            self._undo.pop()()

    # ---- going on ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        plan = self.plan.as_dict() if self.is_decided else None
        shapes = sorted(self._graph_choice.shapes)
        seen = {"shapes": shapes, "whole": sorted(self._whole), "widest": self._widest, "tokens": self._tokens}
        if self._graphed is not None:
            seen["times"] = dict(self._graphed.step.times)
        return {"looks": self._looks, **seen, "plan": plan}

    def follow(self, state: dict[str, Any]) -> None:
        """Do what another process of this run has decided, or nothing where that is impossible here."""
        self.load_state_dict(state)
        if state.get("plan") and not self.is_decided:
            self.plan.note("layouts", False, "what another process decided is not possible on this one")
            self._carry_out(None, None)
        if self.is_decided:
            self._announce(self.plan)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the plan of a checkpoint, if it was made for a place like this one; else it is made again."""
        self._looks = state.get("looks", 0)
        self._graph_choice.shapes = set(state.get("shapes", ()))
        self._whole = set(state.get("whole", ()))
        self._widest, self._tokens = state.get("widest", 0), state.get("tokens", 0)
        plan = SpeedPlan.from_dict(state["plan"]) if state.get("plan") else None
        if plan is None or (plan.changes_anything and plan.made_for != self._here.described()):
            return
        model = self._here.model
        layout = None if plan.layout == AS_MADE else make_layout(plan.layout, model)
        head = output_head(model) if plan.linear_loss else None
        missing = (plan.linear_loss and head is None) or plan.activations not in self._here.policies
        missing |= plan.graphed and self._here.why_not_graph is not None
        if isinstance(layout, str) or missing:
            return
        self.plan = plan
        self._carry_out(layout, None if head is None else PendingHead(head))
        if self._graphed is not None:
            self._graphed.step.times.update(state.get("times", {}))
