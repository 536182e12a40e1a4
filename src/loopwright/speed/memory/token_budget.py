"""The token budget of a micro-batch, from the total device memory; what to recompute where that is too small.

Everything follows from the size of the device and from what small forwards of the model keep, never from what happens
to be free: two runs must come to the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..compile.blocks import repeated_blocks
from ..fused_loss.cross_entropy import CPU_CHUNK_BYTES, GPU_CHUNK_BYTES
from ..fused_loss.lazy_logits import PendingHead
from ..inputs import PlannerInputs
from ..layouts.candidates import Layout
from ..layouts.rows import Limits, padded_tokens
from ..layouts.samples import IGNORED, Samples, few_of
from ..planner.decision import AS_MADE, GROUP_TOKENS, IN_ROWS, ROW_TOKENS, SpeedPlan
from ..proof.prober import Proof
from .estimate import (
    POLICIES,
    ActivationBytes,
    MemoryEstimate,
    estimate_memory,
    measure_activations,
    measure_twice,
    tokens_that_fit,
    usable_bytes,
)

MEASURED_TOKENS = 512
"""The longest sample that is measured; what a longer one keeps is reckoned from that."""
GIB = 2**30


@dataclass(frozen=True)
class Demand:
    """How large micro-batches should be, in tokens."""

    least: int
    """The largest micro-batch the collator made: the user asked for it."""
    most: int
    """What there is nothing to gain beyond."""
    longest: int
    """The longest sample, which no layout can cut."""


@dataclass(frozen=True)
class Budget:
    """Tokens a micro-batch may have, and what is recomputed for that."""

    tokens: int
    policy: str
    needed: int
    usable: int
    without: int
    """Bytes the collator's largest micro-batch needs when nothing is recomputed."""

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable

    @property
    def reason(self) -> str:
        """Why, with the numbers."""
        text = f"micro-batches of up to {self.tokens:,} tokens need an estimated {self.needed / GIB:.1f} GiB"
        text += f" of {self.usable / GIB:.1f}"
        if self.policy != POLICIES[0]:
            text += f"; without recomputation the collator's batches would need {self.without / GIB:.1f}"
        return text if self.fits else f"{text}; it may not fit"

    @property
    def numbers(self) -> dict[str, float]:
        return {"budget_tokens": self.tokens, "budget_gib": self.needed / GIB, "usable_gib": self.usable / GIB}


def plan_memory(
    plan: SpeedPlan,
    here: PlannerInputs,
    *,
    samples: Samples,
    batches: Sequence[Any],
    layout: Layout | None,
    head: PendingHead | None,
    prove: Callable[[str], Proof],
) -> None:
    """Fill in the plan's token budget and what is recomputed; `prove` tries a policy on the probe's samples."""
    total = here.device_memory()
    if total is None or here.token_budget is not None or here.recomputes:
        return
    try:
        estimate = _estimate(here, plan, samples, layout, head)
    except Exception as error:  # whatever a model says to being looked at: it trains as before
        plan.note(
            "token budget", False, (f"the activation memory could not be measured: {type(error).__name__}: {error}")
        )
        return
    demand, policies = demand_of(plan, samples, batches), list(here.policies)
    budget = choose_budget(estimate, usable_bytes(total), demand, policies)
    while budget.policy != POLICIES[0]:
        proof = prove(budget.policy)
        if proof.accepted:
            break
        plan.note(_recomputing(budget.policy), False, proof.reason, proof.numbers)
        policies.remove(budget.policy)
        budget = choose_budget(estimate, usable_bytes(total), demand, policies)
    _note(plan, budget)


def _note(plan: SpeedPlan, budget: Budget) -> None:
    plan.activations = budget.policy
    if plan.layout != AS_MADE:
        plan.budget = budget.tokens
        plan.note("token budget", True, budget.reason, budget.numbers)
    if budget.policy != POLICIES[0]:
        plan.note(_recomputing(budget.policy), True, budget.reason, budget.numbers)


def _recomputing(policy: str) -> str:
    return {"selective": "recomputing everything but matmuls and attention", "full": "recomputing whole blocks"}[policy]


# ---- what is wanted -------------------------------------------------------------------------------------------------


def demand_of(plan: SpeedPlan, samples: Samples, batches: Sequence[Any]) -> Demand:
    """What the layout would like micro-batches to be."""
    lengths = np.stack([axis.lengths for axis in samples.axes.values()], axis=1)
    longest = int(lengths.sum(axis=1).max())
    padded = max(padded_tokens([batch], samples) for batch in batches)
    if plan.layout == AS_MADE:
        return Demand(padded, padded, longest)
    if plan.layout in IN_ROWS:
        names = next(iter(samples.axes.values())).names
        ends = np.cumsum([batch[names[0]].shape[0] for batch in batches])
        real = max(int(part.sum()) for part in np.split(lengths, ends[:-1]))
        return Demand(real, max(real, ROW_TOKENS), longest)
    widths = -(-lengths.max(axis=0) // plan.round_to) * plan.round_to
    whole = len(lengths) * int(widths.sum())
    return Demand(min(padded, whole), min(whole, max(padded, GROUP_TOKENS)), longest)


def choose_budget(estimate: MemoryEstimate, usable: int, demand: Demand, policies: Sequence[str]) -> Budget:
    """The largest useful budget under the first policy with which the collator's largest micro-batch fits."""
    without = estimate.at(demand.least)
    fitting = [policy for policy in policies if estimate.at(demand.least, policy) <= usable]
    policy = fitting[0] if fitting else policies[-1]
    tokens = min(demand.most, tokens_that_fit(estimate, usable, policy))
    tokens = max(tokens, demand.least if fitting else demand.longest)
    return Budget(tokens, policy, estimate.at(tokens, policy), usable, without)


def limits_for(
    plan: SpeedPlan, here: PlannerInputs, batches: Sequence[Any], samples: Samples, *, widest: int = 0
) -> Limits:
    """How large micro-batches of an update may be, and what one more of them costs, under a plan."""
    # Where nothing was measured: what the collator's own batches take fits, since the user asked for it.
    budget = plan.budget or here.token_budget or max(padded_tokens([batch], samples) for batch in batches)
    # A GPU computes while the next micro-batch is launched: only what is shorter than a launch costs extra.
    overhead, floor = (0, plan.overhead) if here.on_gpu else (plan.overhead, 0)
    return Limits(budget, overhead, plan.round_to, floor, few_shapes=plan.few_shapes, width=widest)


# ---- what the model keeps -------------------------------------------------------------------------------------------


def _estimate(
    here: PlannerInputs, plan: SpeedPlan, samples: Samples, layout: Layout | None, head: PendingHead | None
) -> MemoryEstimate:
    lengths = np.sum([axis.lengths for axis in samples.axes.values()], axis=0)
    place, whole = int(lengths.argmax()), int(lengths.max())
    blocks = repeated_blocks(here.model)

    def forward(rows: int, tokens: int = MEASURED_TOKENS) -> int:
        few = few_of(samples.select(np.full(rows, place)), rows, tokens)
        return _forward(here, plan, _all_targets(few), layout)

    with ExitStack() as stack:
        stack.enter_context(here.as_trained())
        if layout is not None:
            stack.enter_context(layout.active())
        if head is not None:
            head.count = None
            head.install()
            stack.callback(head.remove)
        one, two = measure_twice(forward, sizes=(1, 2), model=here.model, blocks=blocks, sandbox=here.sandbox)
        if one.tokens < whole:
            with here.sandbox():
                half = measure_activations(lambda: forward(1, MEASURED_TOKENS // 2), model=here.model, blocks=blocks)
            one, two = at_length(whole, one, two, half)
    chunk = 0 if head is None else GPU_CHUNK_BYTES if here.on_gpu else CPU_CHUNK_BYTES
    return estimate_memory(one, two, model=here.model_bytes() + chunk)


def _forward(here: PlannerInputs, plan: SpeedPlan, few: Samples, layout: Layout | None) -> int:
    """One forward with its loss, as training does it; returns the tokens computed."""
    if layout is None:
        batch = few.trimmed()
        here.loss_of([here.put(batch)], lambda each: each)
        return padded_tokens([batch], few)
    limits = Limits(budget=2**62, overhead=1, round_to=plan.round_to)
    laid = layout.lay(few, limits, shifts=here.shifts(), fill=plan.fill)
    here.loss_of([here.put(each) for each in laid.batches], layout.for_model)
    return laid.computed_tokens


def _all_targets(samples: Samples) -> Samples:
    """As if every token had a target: which of them do differs from update to update."""
    labels = samples.tensors.get("labels")
    if labels is None or labels.is_floating_point() or labels.dim() < 2:
        return samples
    filled = labels.masked_fill(labels == IGNORED, 0)
    return Samples({**samples.tensors, "labels": filled}, samples.axes, samples.constants)


def at_length(
    whole: int, one: ActivationBytes, two: ActivationBytes, half: ActivationBytes
) -> tuple[ActivationBytes, ActivationBytes]:
    """What one and two samples of `whole` tokens keep, from shorter ones and from one of half their length.

    What a token keeps grows with the length of its sample where attention keeps its scores, and not at all elsewhere.
    """
    names = [each.name for each in fields(ActivationBytes) if each.name != "tokens"]
    kept: list[dict[str, int]] = [{}, {}]
    for name in names:
        first, second, short = (getattr(each, name) for each in (one, two, half))
        slope = (second - first) / (two.tokens - one.tokens)
        constant = max(0.0, first - slope * one.tokens)
        growth = max(0.0, slope - (short - constant) / half.tokens) / max(1, one.tokens - half.tokens)
        slope += growth * (whole - one.tokens)
        for index in range(2):
            kept[index][name] = int(constant + slope * whole * (index + 1))
    return ActivationBytes(tokens=whole, **kept[0]), ActivationBytes(tokens=2 * whole, **kept[1])
