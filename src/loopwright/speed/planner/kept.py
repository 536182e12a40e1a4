"""What an earlier run has proved about the same model, kept in the user's cache folder.

Only what agreed on a few samples is kept, and what was counted. A later run decides everything else from its own data
and memory (which layout is worth it, the token budget, graphs, compiling), compares the loss of its first update and
the gradients of two micro-batches, and makes its plan from the beginning if they differ. The file is data: JSON of a
declared form, signed by this user.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...core.checkpoint.schema import any_number, count, maybe, named, number, record, text
from ...notices import logger
from ..fused_loss.lazy_logits import HEAD
from ..layouts.candidates import Layout
from ..layouts.rows import Limits, padded_tokens
from ..layouts.samples import Samples, place_of, rows_of
from ..memory.estimate import POLICIES, MemoryEstimate
from ..memory.token_budget import MeasuredMemory, limits_for
from ..model_stamp import described
from ..proof.distance import HALF, NOISE_APART
from ..proof.guard import Coverage, Seen
from ..proof.prober import Candidate, Proof, Reference
from ..proof.prover import NOISE, silent, with_silent
from ..training_setup import TrainingSetup
from ..user_cache import NotOurs, home, read_signed, write_signed
from .choice import Decision
from .cost import Work
from .decision import COLLATED, ONE_ROW, SpeedPlan

MOST_FILES = 256
"""Files that are kept, the latest ones."""
MOST_NOISE = HALF.gradient / NOISE_APART
"""Rounding error from which the tolerance depends on the weights, and is determined in each run."""
EARLIER = "plan of an earlier run"
COMPARED_AGAIN = 2
"""Micro-batches of the first update whose gradients are compared again."""
_BYTES = record({policy: number(0) for policy in POLICIES}, others=False)
_MEMORY = record({"fixed": count(), "per_token": _BYTES}, others=False)
_FORM = record(
    {
        **dict.fromkeys(("made_for", "form", "shape", "code"), text),
        "proved": named(named(any_number)),
        "work": maybe(named(number(0))),
        "memory": maybe(record({"measured_for": text, "estimate": _MEMORY}, others=False)),
        "row": count(),
    },
    others=False,
)


@dataclass(frozen=True)
class KeptPlan:
    """What is kept of a plan."""

    made_for: str
    """Device, versions and code for which it was proved."""
    proved: dict[str, dict[str, float]] = field(default_factory=dict)
    """The numbers of the proofs on a few samples, by the name of what agreed."""
    form: str = ""
    """What updates consist of."""
    shape: str = ""
    """The shape of the micro-batch whose work was counted."""
    work: Work | None = None
    memory: MeasuredMemory | None = None
    code: str = ""
    """The code as it was imported after the comparisons: a forward may import more than there was before."""
    row: int = 0
    """Tokens of the longest row whose gradients agreed."""

    @classmethod
    def of(
        cls,
        plan: SpeedPlan,
        coverage: Coverage | None,
        *,
        form: str,
        shape: str,
        work: Work | None,
        memory: MeasuredMemory | None = None,
    ) -> KeptPlan | None:
        """What may be kept of a plan that was proved; None if a later run could not use it.

        Graphs and recomputation have proofs of their own, which a later run makes itself.
        """
        is_used = plan.layout != COLLATED or plan.linear_loss
        if coverage is None or not is_used or plan.graphed or plan.activations != "none":
            return None
        if not plan.number(NOISE) <= MOST_NOISE:
            return None
        names = {plan.layout, *([HEAD] if plan.linear_loss else [])}
        used = [choice for choice in plan.choices if choice.is_on and choice.name in names]
        proved = {choice.name: _of_few(choice.numbers) for choice in used}
        row = max((seen.row for seen in coverage.forms), default=0)
        return cls(plan.made_for, proved, form, shape, work, memory, row=row)

    @classmethod
    def from_json(cls, content: bytes) -> KeptPlan:
        """Raises `ValueError` if the content has another form."""
        values = json.loads(content)
        problem = _FORM(values, "the plan")
        if problem is not None:
            raise ValueError(problem)
        work = values["work"]
        if work is not None and set(work) != {each.name for each in fields(Work)}:
            raise ValueError("the plan.work has other names")
        memory = values["memory"]
        if memory is not None:
            memory = MeasuredMemory(memory["measured_for"], MemoryEstimate(**memory["estimate"]))
        return cls(**{**values, "work": None if work is None else Work(**work), "memory": memory})


def form_of(samples: Samples) -> str:
    """A hash of the entries of an update (names, kinds, padding) and of whether its rows hold several samples.

    For an update of another form, comparisons on a few samples may give another result.
    """
    seen = Seen.of(samples, row=0)
    constants = sorted((name, described(value)) for name, value in seen.constants.items())
    parts = [sorted(seen.entries.items()), constants, sorted(seen.paddings.items()), seen.sides]
    return hashlib.sha256(repr([*parts, sorted(seen.first_targets.items()), samples.share_rows()]).encode()).hexdigest()


def _of_few(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if not name.startswith("update_")}


class PlanFile:
    """The file in which the plan of this model and these settings is kept; every problem with it is only reported."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self._key: str | None = None
        self._has_key = False

    @cached_property
    def earlier(self) -> KeptPlan | None:
        """What an earlier run has kept for the same device, versions, code and settings, read once."""
        try:
            path = self._path()
            if path is None or not path.is_file():
                return None
            kept = KeptPlan.from_json(read_signed(path, path.name))
            os.utime(path)  # it is in use: others are removed first
        except NotOurs as reason:
            _tell(f"in {path} {reason}")
            return None
        except Exception as error:  # the plan is made from the beginning
            _tell(f"could not be read: {type(error).__name__}: {error}")
            return None
        return kept if kept.made_for == self._setup.described() else None

    def save(self, kept: KeptPlan | None) -> None:
        """Keep this for later runs; None removes what was kept."""
        try:
            path = self._path()
            if path is None:
                return
            if kept is None:
                path.unlink(missing_ok=True)
                return
            kept = replace(kept, code=self._setup.code_key() or "")
            content = json.dumps(asdict(kept), sort_keys=True).encode()
            write_signed(path, path.name, content, most=MOST_FILES)
        except Exception as error:  # a run must not fail because of what is kept for the next one
            _tell(f"could not be saved: {type(error).__name__}: {error}")

    def fits(self, kept: KeptPlan) -> bool:
        """Whether what was loaded is for the code that a comparison has now imported."""
        try:
            return kept.code == (self._setup.code_key() or "")
        except Exception as error:  # the plan is made from the beginning
            _tell(f"could not be used: {type(error).__name__}: {error}")
            return False

    def _path(self) -> Path | None:
        if not self._has_key:
            self._key, self._has_key = self._setup.plan_key(), True
        return None if self._key is None else home() / "plans" / f"{self._key}.json"


def _tell(text: str) -> None:
    # A warning even in strict mode: without it the run is the same, only slower to start.
    logger.warning(f"speed: the plan of earlier runs {text}")


class NotKept(Exception):
    """A proof is needed that an earlier run has not made."""


class KeptDecision(Decision):
    """Takes from an earlier run what agreed on a few samples; compares the update again."""

    where = " in an earlier run"

    def __init__(self, setup: TrainingSetup, samples: Samples, batches: Sequence[Any], kept: KeptPlan) -> None:
        super().__init__(setup, samples, batches, {})
        self._kept = kept
        self.memory = kept.memory
        self.compared = "this step was compared again, and agrees"
        self._others: list[int] = []
        """The micro-batches of which only the loss is compared."""

    @property
    def is_comparable(self) -> bool:
        return True

    def _make_references(self) -> list[Reference]:
        return []

    def _prove_layout(self, name: str, layout: Layout) -> Proof:
        return self._agreed(name)

    def _prove(self, candidate: Candidate) -> Proof:
        return self._agreed(candidate.name)

    def prove_update(self) -> tuple[str, Proof] | Coverage:
        """Compare the update: gradients of `COMPARED_AGAIN` micro-batches, and the loss of the others.

        Rows are then longer than those whose gradients are compared. They are covered as far as their gradients agreed
        in the earlier run, if the loss of the others agrees in a row of that length.
        """
        found = super().prove_update()
        if not self._others or not isinstance(found, Coverage):
            return found
        plan, sizes = self.plan, [rows_of(batch) for batch in self.batches]
        limits = limits_for(plan, self._setup, self.batches, self.samples)
        batches = [self.batches[place] for place in self._others]
        # A loss may count samples without targets: then it is compared without them, and covers rows as long as those.
        for samples, within in (*self._filled(sizes, limits), (self.samples.in_batches(self._others, sizes), limits)):
            candidate = self._candidate(plan.layout, self.head, limits=within, more=self.prover.sparing(plan))
            proof = self.prover.prove_loss(candidate, samples, batches, plan)
            if proof.accepted:
                break
        else:
            return plan.layout, proof
        for seen in found.forms:
            assert self.layout is not None
            seen.row = max(seen.row, self.prover.seen(plan, self.layout, samples, within).row)
        part = f"{len(sizes) - len(self._others)} of {len(sizes)} micro-batches"
        self.compared = f"the loss of this step and the gradients of {part} were compared again, and agree"
        return found

    def _longest_row(self, limits: Limits) -> int:
        """The longest row of the earlier run, as far as there is memory for it without compiled code; or none."""
        if not self._setup.on_gpu:
            return self._kept.row
        return min(self._kept.row, limits.budget) if self._setup.can_spare else 0

    def _filled(self, sizes: Sequence[int], limits: Limits) -> list[tuple[Samples, Limits]]:
        """The update with the targets of `_others` alone; if it is one row, one as long as in the earlier run."""
        if self.layout is None or self.plan.layout not in ONE_ROW:
            return []
        is_other = np.repeat(np.isin(np.arange(len(sizes)), self._others), sizes)
        samples = silent(self.samples, ~is_other)
        if samples is None:
            return []
        row = self.prover.seen(self.plan, self.layout, samples, limits).row
        if row < samples.real_tokens:
            return [(samples, limits)]  # several rows, as in training
        most = max(row, self._longest_row(limits))
        filled = with_silent(samples, self.samples, most) or samples
        return [(filled, replace(limits, budget=max(limits.budget, most)))]

    def _reference_update(self) -> Reference:
        """The normal path on the micro-batch with the longest sample and on the one with the most padding."""
        sizes = [rows_of(batch) for batch in self.batches]
        if len(sizes) <= COMPARED_AGAIN:
            return super()._reference_update()
        longest = place_of(self.samples.longest_with_targets(), sizes)
        # Samples of one length, and those truncated to the same length, have no padding.
        paddings = {place: self._padding_in(place, sizes) for place in range(len(sizes)) if place != longest}
        others = sorted(paddings, key=lambda place: -paddings[place])
        chosen = sorted([longest, *others[: COMPARED_AGAIN - 1]])
        self._others = [place for place in range(len(sizes)) if place not in chosen]
        samples = self.samples.in_batches(chosen, sizes)
        # That the loss is the same twice was tested by the earlier run.
        return self.prover.update(samples, [self.batches[place] for place in chosen], repeats=False)

    def _padding_in(self, place: int, sizes: Sequence[int]) -> int:
        """The tokens of padding beside samples with targets in a micro-batch."""
        start = sum(sizes[:place])
        part, batch = self.samples.between(start, start + sizes[place]), self.batches[place]
        if not part.have_targets().any():
            return -1
        return padded_tokens([batch], part) - part.real_tokens

    def _covered(self, reference: Reference, limits: Limits) -> Coverage:
        """What was compared of this update. Lengths are compared again: code may read values the key does not have."""
        if self.layout is None or not self._others:
            return super()._covered(reference, limits)
        coverage = Coverage()
        coverage.add(self.prover.covered(self.plan, self.layout, self.head, reference, limits, longer_rows=False))
        return coverage

    def _agreed(self, name: str) -> Proof:
        numbers = self._kept.proved.get(name)
        if numbers is None:
            raise NotKept(name)
        return Proof(name, accepted=True, numbers=dict(numbers))
