"""Applying the plan: has it made from the first updates, lays out the samples of every update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..core.batches import Update
from .budget import limits_for
from .candidates import Layout, make_layout
from .deciding import output_head
from .graphing import GraphedTraining, share_of
from .layouts import Limits
from .pending import PendingHead
from .plan import AS_MADE, UNPADDED, SpeedPlan
from .planning import GRAPHS, Planner
from .samples import SOURCE, NoSamples, OddSamples, Samples, take_apart
from .situation import Situation


class Conductor:
    """Lays out updates, and brings the model's attention and head in and out around each of them."""

    def __init__(
        self, situation: Situation, *, announce: Callable[[SpeedPlan], None], tell: Callable[[str], None]
    ) -> None:
        self._here, self._announce, self._tell = situation, announce, tell
        self._planner = Planner(situation)
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
        self._whole: set[str] = set()
        """Entries of batches that were seen to run along no tokens."""
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

    def as_made(self, update: Update) -> list[Any]:
        """The micro-batches of the current update as the collator made them."""
        return update.batches if self._last is None else self._last[0]

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

    # ---- the plan ---------------------------------------------------------------------------------------------------

    def consider(self, batches: list[Any]) -> None:
        """Have the plan made as soon as an update shows that it pays, and carry it out."""
        made = self._planner.consider(batches, self._taken_apart)
        if made is None:
            return
        self.plan = made.plan
        self._carry_out(made.layout, made.head)
        self._announce(self.plan)
        if self._here.token_budget and self._layout is None and made.padding > 0:
            self._tell(
                f"per_device_train_batch_tokens={self._here.token_budget:,}: micro-batches are padded and may take "
                "more, since no layout is proved here; speed_report() says why"
            )

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

    def give_up_graphs(self, reason: str) -> None:
        """Micro-batches turned out to be no graphs: the run goes on without, and so does whoever resumes it."""
        self.plan.graphed = False
        self.plan.take_back(GRAPHS, reason)
        self._planner.choose_compiling(self.plan)
        if self.plan.compiled:
            self._here.compile(self.plan.short_rows)
        self._announce(self.plan)

    def _taken_apart(self, batches: list[Any]) -> Samples:
        samples = take_apart(
            batches, is_pair=self._here.is_pair, counts_trailing=not self._here.shifts(), whole=self._whole
        )
        self._whole.update(samples.per_sample())
        return samples

    def _limits(self, batches: list[Any], samples: Samples) -> Limits:
        return limits_for(self.plan, self._here, batches, samples, widest=self._widest)

    def finish(self) -> None:
        """Leave the model as it was found."""
        while self._undo:
            self._undo.pop()()

    # ---- going on ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        plan = self.plan.as_dict() if self.is_decided else None
        seen = {**self._planner.state_dict(), "whole": sorted(self._whole), "widest": self._widest}
        if self._graphed is not None:
            seen["times"] = dict(self._graphed.step.times)
        return {**seen, "plan": plan}

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
        self._planner.load_state_dict(state)
        self._whole, self._widest = set(state.get("whole", ())), state.get("widest", 0)
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
