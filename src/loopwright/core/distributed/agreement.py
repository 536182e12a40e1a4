"""Agreement: the ranks of a run are compared before they train.

Ranks with other learning rates, code, data or models train without an error, and their replicas diverge. Each rank
describes what all must have in common. One all-gather of a few numbers compares the digests; the descriptions are
exchanged only if these differ, for the error, which is raised on every rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...args.base import BaseArguments
from ...args.secrets import masked_text
from ...errors import CheckpointError, RanksDisagree
from ..checkpoint.schema import label
from ..part import Part
from .description import described, described_arguments, described_code, digest, methods_of, name_of, versions

Gather = Callable[[list[float]], list[list[float]]]
"""Numbers of this rank -> the numbers of all ranks, by rank."""

CHUNK = 6
"""Bytes that a float64 holds exactly as an integer."""
LONGEST = 160
"""Characters of a value in an error."""


@dataclass
class Description:
    """What a rank has, as texts by name."""

    same: dict[str, str] = field(default_factory=dict)
    """Must be equal on all ranks."""
    usual: dict[str, str] = field(default_factory=dict)
    """Usually equal: a difference is a warning."""


def differences(own: Description, gather: Gather) -> tuple[list[str], list[str]]:
    """Sentences on what differs between the ranks and must not, and on what usually does not; a collective."""
    content = json.dumps([own.same, own.usual], sort_keys=True).encode()
    head = hashlib.sha256(content).digest()[: 4 * CHUNK]
    rows = gather([*_numbers(head), float(len(content))])
    if all(row == rows[0] for row in rows):
        return [], []
    longest = int(max(row[-1] for row in rows))
    longest += -longest % CHUNK
    found = [json.loads(_bytes(row)) for row in gather(_numbers(content.ljust(longest)))]
    return _sentences([row[0] for row in found]), _sentences([row[1] for row in found])


def _numbers(content: bytes) -> list[float]:
    return [float(int.from_bytes(content[at : at + CHUNK], "big")) for at in range(0, len(content), CHUNK)]


def _bytes(numbers: list[float]) -> bytes:
    return b"".join(int(each).to_bytes(CHUNK, "big") for each in numbers)


def _sentences(rows: list[dict[str, str]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [
        _sentence(name, [row.get(name, "missing") for row in rows])
        for name in names
        if len({row.get(name) for row in rows}) > 1
    ]


def _sentence(name: str, values: list[str]) -> str:
    """'learning_rate is 0.001 on rank 0 and 0.01 on ranks 1 and 2'."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    parts = [f"{_short(value)} on {_listed(where)}" for value, where in ranks.items()]
    return f"{name} is {', '.join(parts[:-1])} and {parts[-1]}"


def _short(value: str) -> str:
    text = masked_text(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({digest(value)[:8]})"


def _listed(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]]
    return f"ranks {', '.join(shown)}" if len(ranks) <= 8 else f"ranks {', '.join(shown)} and {len(ranks) - 8} more"


def compare_arguments(args: BaseArguments, gather: Gather) -> None:
    """Raise on every rank if the arguments that decide how ranks communicate differ; a collective."""
    same, _ = described_arguments(args)
    must, _ = differences(Description(same), gather)
    if must:
        raise RanksDisagree(must)


class Agreement(Part):
    """Compares the ranks of a run; nothing happens with a single one. Frameworks add what they have."""

    packages: tuple[str, ...] = ("loopwright", "numpy")

    def before_training(self, resume: Any) -> None:
        """Compare arguments, versions, code and data; called first by `train()`."""
        if self.strategy.world_size == 1:
            return
        own = self.settings()
        code = {**self.functions(), **methods_of(type(self.trainer))}
        data = self.data()
        own.same.update(versions(self.packages), **data.same)
        own.usual.update(data.usual)
        own.same["trainer class"] = name_of(type(self.trainer))
        own.same.update((name, described_code(each)) for name, each in code.items())
        own.usual.update((f"what {name} uses", described(each)) for name, each in code.items())
        own.same["resume_from_checkpoint of train()"] = described(resume)
        own.usual["callbacks"] = described(self._callbacks())
        self.compare(own)

    def after_resuming(self, file: Path) -> None:
        """Compare what the ranks have restored, each from its own file, before they act on it."""
        if self.strategy.world_size == 1:
            return
        must, _ = differences(Description(self.restored()), self.strategy.numbers_of_ranks)
        if must:
            raise CheckpointError(
                f"{label(file)}: the ranks have read different states of the run: {'; '.join(must)}. A file of the "
                "checkpoint was damaged or changed; resume from another checkpoint"
            )

    def before_updates(self) -> None:
        """Compare what the updates depend on; called in the first update of a run, before its forward pass."""
        self.run.has_agreed = True
        if self.strategy.world_size > 1:
            own = self.settings()
            own.same.update(self.plan(), **self.optimizer(), **self.weights())
            self.compare(own)

    def before_save(self) -> None:
        """Compare the settings, which callbacks may have changed since, and the weights of replicas."""
        if self.strategy.world_size == 1:
            return
        own = self.settings()
        own.same.update(self.optimizer())
        own.usual = self.weights()
        must, diverged = differences(own, self.strategy.numbers_of_ranks)
        if must:
            raise RanksDisagree(must)
        if diverged and not self.run.has_diverged:
            self.run.has_diverged = True
            self.notices.warn_once(
                f"the replicas have diverged by step {self.state.global_step}: {'; '.join(diverged[:3])}. The "
                "checkpoint has the weights of rank 0; find out what rank-dependent code changes them"
            )

    def compare(self, own: Description) -> None:
        """Raise, or warn, on every rank if the ranks differ."""
        must, usually = differences(own, self.strategy.numbers_of_ranks)
        if must:
            raise RanksDisagree(must)
        for text in usually:
            self.notices.warn_once(f"the ranks differ, which may be a mistake: {text}")

    def _callbacks(self) -> list[type]:
        """Classes of the user's callbacks; those of the library depend on the rank."""
        kinds = [type(each) for each in self.callback_handler.callbacks]
        return [kind for kind in kinds if not kind.__module__.startswith(("loopwright.", "transformers."))]

    # ---- what a rank has --------------------------------------------------------------------------------------------

    def settings(self) -> Description:
        """The arguments, and where the run computes."""
        same, usual = described_arguments(self.args)
        same["strategy"] = type(self.strategy).__name__
        return Description(same, usual)

    def restored(self) -> dict[str, str]:
        """The state of the run that decides what the ranks do together."""
        progress = self.run.progress
        found = {"global_step": described(self.state.global_step), "spikes": described(self.run.spikes.state_dict())}
        names = ("epoch", "samples_in_epoch", "samples_seen")
        return {**found, **{name: described(getattr(progress, name)) for name in names}}

    def plan(self) -> dict[str, str]:
        """The arithmetic of the run."""
        return {"number of steps": described(self.run.planned_updates)}

    def functions(self) -> dict[str, Any]:
        """The functions and objects passed to the trainer."""
        names = ("data_collator", "compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics")
        return {name: getattr(self.trainer, name, None) for name in names}

    def data(self) -> Description:
        """Lengths and columns of the datasets."""
        return Description()

    def optimizer(self) -> dict[str, str]:
        """Optimizer and schedule with their numbers."""
        return {}

    def weights(self) -> dict[str, str]:
        """Hashes of the weights of which each rank has a copy."""
        return {}
