"""The token budget of a micro-batch from the total device memory, and what to recompute if that is too small.

Everything is derived from the size of the device and from small forwards of the model, never from the memory that is
free now: two runs must make the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ..compile.blocks import repeated_blocks
from ..fused_loss.cross_entropy import CPU_CHUNK_BYTES, GPU_CHUNK_BYTES
from ..layouts.candidates import Layout
from ..layouts.rows import Limits, padded_tokens
from ..layouts.samples import IGNORED, Samples, few_of
from ..output_layer import ReplacedHead
from ..planner.decision import COLLATED, GROUP_TOKENS, IN_ROWS, ROW_TOKENS, SpeedPlan
from ..proof.prober import Proof
from ..training_setup import TrainingSetup
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
"""The longest sample that is measured; longer ones are extrapolated."""
GIB = 2**30


@dataclass(frozen=True)
class Demand:
    """How large micro-batches should be, in tokens."""

    least: int
    """The collator's largest micro-batch, which the user's settings imply."""
    most: int
    """The size beyond which there is nothing to gain."""
    longest: int
    """The longest sample, which no layout can split."""


@dataclass(frozen=True)
class Budget:
    """Most tokens per micro-batch, and what is recomputed to allow that."""

    tokens: int
    policy: str
    needed: int
    usable: int
    without: int
    """Bytes the collator's largest micro-batch needs without recomputation."""

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable

    @property
    def reason(self) -> str:
        """The reason for the report, with the numbers."""
        text = f"micro-batches of up to {self.tokens:,} tokens need an estimated {self.needed / GIB:.1f} GiB"
        text += f" of {self.usable / GIB:.1f}"
        if self.policy != POLICIES[0]:
            text += f"; without recomputation the collator's batches would need {self.without / GIB:.1f}"
        return text if self.fits else f"{text}; it may not fit"

    @property
    def numbers(self) -> dict[str, float]:
        return {"budget_tokens": self.tokens, "budget_gib": self.needed / GIB, "usable_gib": self.usable / GIB}


@dataclass(frozen=True)
class MeasuredMemory:
    """The memory of activations, without weights and optimizer, and what it was measured for."""

    measured_for: str
    """The layout, the loss, and the length of the longest sample."""
    estimate: MemoryEstimate


def plan_memory(
    plan: SpeedPlan,
    setup: TrainingSetup,
    *,
    samples: Samples,
    batches: Sequence[Any],
    layout: Layout | None,
    head: ReplacedHead | None,
    prove: Callable[[str], Proof],
    earlier: MeasuredMemory | None = None,
) -> MeasuredMemory | None:
    """Set the plan's token budget and recomputation policy; `prove` compares a policy on the samples of the proof.

    Returns what was measured, for a later run of the same model, which gives it as `earlier`.
    """
    total = setup.device_memory()
    if total is None or setup.token_budget is not None or setup.recomputes:
        return None
    longest = int(samples.lengths.max())
    measured_for = f"{plan.layout}, {'no logits' if plan.linear_loss else 'logits'}, {longest} tokens"
    measured = earlier
    if measured is None or measured.measured_for != measured_for:
        try:
            measured = MeasuredMemory(measured_for, _estimate(setup, plan, samples, layout, head))
        except Exception as error:  # any error of the model while it is measured: no budget is planned
            problem = f"{type(error).__name__}: {error}"
            plan.note("token budget", False, f"the activation memory could not be measured: {problem}")
            return None
    estimate = replace(measured.estimate, fixed=measured.estimate.fixed + setup.model_bytes())
    demand, policies = demand_of(plan, samples, batches), list(setup.policies)
    budget = choose_budget(estimate, usable_bytes(total), demand, policies)
    while budget.policy != POLICIES[0]:
        proof = prove(budget.policy)
        if proof.accepted:
            break
        plan.note(_recomputing(budget.policy), False, proof.reason, proof.numbers)
        policies.remove(budget.policy)
        budget = choose_budget(estimate, usable_bytes(total), demand, policies)
    _note(plan, budget)
    return measured


def _note(plan: SpeedPlan, budget: Budget) -> None:
    plan.activations = budget.policy
    if plan.layout != COLLATED:
        plan.budget = budget.tokens
        plan.note("token budget", True, budget.reason, budget.numbers)
    if budget.policy != POLICIES[0]:
        plan.note(_recomputing(budget.policy), True, budget.reason, budget.numbers)


def _recomputing(policy: str) -> str:
    return {"selective": "recomputing everything but matmuls and attention", "full": "recomputing whole blocks"}[policy]


# ---- required sizes -------------------------------------------------------------------------------------------------


def demand_of(plan: SpeedPlan, samples: Samples, batches: Sequence[Any]) -> Demand:
    """The sizes of micro-batches that suit the layout."""
    lengths = np.stack([axis.lengths for axis in samples.axes.values()], axis=1)
    longest = int(lengths.sum(axis=1).max())
    padded = max(padded_tokens([batch], samples) for batch in batches)
    if plan.layout == COLLATED:
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
    plan: SpeedPlan, setup: TrainingSetup, batches: Sequence[Any], samples: Samples, *, widest: int = 0
) -> Limits:
    """Size limit of an update's micro-batches and cost of one more, under a plan."""
    # Without a measurement, the size of the collator's batches fits, since the user's settings imply it.
    budget = plan.budget or setup.token_budget or max(padded_tokens([batch], samples) for batch in batches)
    # A GPU computes while the next micro-batch is launched: only micro-batches shorter than a launch cost extra.
    overhead, floor = (0, plan.overhead) if setup.on_gpu else (plan.overhead, 0)
    return Limits(budget, overhead, plan.round_to, floor, few_shapes=plan.few_shapes, width=widest)


# ---- memory of the model --------------------------------------------------------------------------------------------


def _estimate(
    setup: TrainingSetup, plan: SpeedPlan, samples: Samples, layout: Layout | None, head: ReplacedHead | None
) -> MemoryEstimate:
    lengths = samples.lengths
    place, whole = int(lengths.argmax()), int(lengths.max())
    blocks = repeated_blocks(setup.model)

    def forward(rows: int, tokens: int = MEASURED_TOKENS) -> int:
        few = few_of(samples.select(np.full(rows, place)), rows, tokens)
        return _forward(setup, plan, _all_targets(few), layout)

    with ExitStack() as stack:
        stack.enter_context(setup.as_trained())
        if head is not None:
            head.count = None
            head.install()
            stack.callback(head.remove)
        if layout is not None:
            stack.enter_context(layout.active())
        one, two = measure_twice(forward, sizes=(1, 2), model=setup.model, blocks=blocks, sandbox=setup.sandbox)
        if one.tokens < whole:
            with setup.sandbox():
                half = measure_activations(lambda: forward(1, MEASURED_TOKENS // 2), model=setup.model, blocks=blocks)
            one, two = at_length(whole, one, two, half)
    chunk = 0 if head is None else GPU_CHUNK_BYTES if setup.on_gpu else CPU_CHUNK_BYTES
    return estimate_memory(one, two, model=chunk)


def _forward(setup: TrainingSetup, plan: SpeedPlan, few: Samples, layout: Layout | None) -> int:
    """One forward with its loss, as in training; returns the number of tokens computed."""
    if layout is None:
        batch = few.trimmed()
        setup.loss_of([setup.to_device(batch)], lambda each: each)
        return padded_tokens([batch], few)
    limits = Limits(budget=2**62, overhead=1, round_to=plan.round_to)
    laid = layout.lay(few, limits, shifts=setup.shifts(), fill=plan.fill)
    setup.loss_of([setup.to_device(each) for each in laid.batches], layout.for_model)
    return laid.computed_tokens


def _all_targets(samples: Samples) -> Samples:
    """The samples with a target for every token, since the number of targets differs between updates."""
    labels = samples.tensors.get("labels")
    if labels is None or labels.is_floating_point() or labels.dim() < 2:
        return samples
    filled = labels.masked_fill(labels == IGNORED, 0)
    return Samples({**samples.tensors, "labels": filled}, samples.axes, samples.constants)


def at_length(
    whole: int, one: ActivationBytes, two: ActivationBytes, half: ActivationBytes
) -> tuple[ActivationBytes, ActivationBytes]:
    """Activations of one and two samples of `whole` tokens, from shorter samples and from one of half their length.

    Activations per token grow with the length of the sample if attention saves its scores, and are constant otherwise.
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
