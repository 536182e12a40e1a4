"""Padding the targets of encoder-decoder batches to a few widths, so that the shapes of micro-batches repeat.

Speech to text, for example: recordings have one length and transcripts do not, so every batch would have a new shape,
for which there is no graph, no compiled code, and for which cuDNN prepares its attention kernels again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .changed_batches import CannotChange, ChangedBatches
from .layouts.positions import most_positions
from .layouts.samples import IGNORED
from .planner.choice import same
from .planner.decision import SpeedPlan
from .training_setup import TrainingSetup

WIDENED = "targets of a few widths"
WIDENING_DEVICES = ("cuda",)
LEAST_WIDTH = 64
"""Widths are powers of two, at least this one: each takes a compilation and a graph."""
LABELS = "labels"
BESIDE = ("decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "decoder_position_ids")
"""Other inputs of a decoder; batches that have one are left as they are."""


def widened(batches: Sequence[Any], most: int | None) -> list[Any]:
    """The micro-batches with labels as wide as the next power of two; raises `CannotChange`."""
    if most is None:  # a position out of range would abort the process on a GPU instead of raising an error
        raise CannotChange("the longest possible target is unknown")
    return [_wide(batch, most) for batch in batches]


def _wide(batch: Any, most: int) -> dict[str, Any]:
    labels = batch.get(LABELS) if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.is_floating_point():
        raise CannotChange("labels are not rows of tokens")
    if any(name in batch for name in BESIDE):
        raise CannotChange("batches have inputs of the decoder besides labels")
    width = labels.shape[1]
    missing = max(min(max(LEAST_WIDTH, 1 << (width - 1).bit_length()), most) - width, 0)
    wide = nn.functional.pad(labels, (0, missing), value=IGNORED) if missing else labels
    return {**batch, LABELS: wide}


# ---- choosing -------------------------------------------------------------------------------------------------------


class WidthChoice:
    """Decides whether targets are padded, before graphs and compiled code are chosen by the shapes of batches."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self._widths: set[int] = set()
        self._ignores = False
        """Whether labels had ignored places: elsewhere such a label may abort the process on a GPU."""

    def look(self, batches: list[Any]) -> list[Any]:
        """The micro-batches in the shapes they would have."""
        found = self._changed(batches)
        if found is None:
            return batches
        self._widths |= {batch[LABELS].shape[1] for batch in batches}
        self._ignores = self._ignores or any(bool((batch[LABELS] == IGNORED).any()) for batch in batches)
        return found if self._ignores else batches

    def _changed(self, batches: list[Any]) -> list[Any] | None:
        setup = self._setup
        is_text = any(isinstance(each, Mapping) and "input_ids" in each for each in batches)
        if setup.device.type not in WIDENING_DEVICES or not setup.is_pair or is_text or setup.is_shared:
            return None
        if setup.why_only_grouped is not None or setup.user_hook() is not None:
            return None
        try:
            return widened(batches, most_positions(setup.model))
        except CannotChange:
            return None

    def choose(self, plan: SpeedPlan, batches: list[Any]) -> list[Any] | None:
        """The update's micro-batches, padded if that is needed and proved; None if it is refused."""
        setup, changed = self._setup, self._changed(batches)
        if changed is None or len(self._widths) < 2 or not self._ignores:
            return batches
        proof = WidenedUse(setup).prove(batches)
        if not proof.accepted:
            plan.note(WIDENED, False, proof.reason)
            return None
        plan.widened, plan.made_for = True, setup.described()
        plan.note(WIDENED, True, f"widths are powers of two; {same(proof)}", proof.numbers)
        return changed


# ---- in training ----------------------------------------------------------------------------------------------------


class WidenedUse(ChangedBatches):
    """Pads the targets of updates."""

    name = WIDENED
    why_off = "targets are no longer padded to a few widths"

    def __init__(self, setup: TrainingSetup, **options: Any) -> None:
        super().__init__(setup, **options)
        self._most = most_positions(setup.model)

    def change(self, batches: list[Any]) -> list[Any]:
        return widened(batches, self._most)
