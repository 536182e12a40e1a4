"""Padding the targets of encoder-decoder batches to a few widths, so that the shapes of micro-batches repeat.

Speech to text, for example: recordings have one length and transcripts do not, so every batch would have a new shape,
for which there is no graph, no compiled code, and for which cuDNN prepares its attention kernels again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .changed_batches import CannotChange, ChangedBatches, same
from .inputs import PlannerInputs
from .layouts.samples import IGNORED
from .planner.decision import SpeedPlan

WIDENED = "targets of a few widths"
WIDENING_DEVICES = ("cuda",)
WIDTH_STEP = 64
"""Widths are multiples of this."""
LABELS = "labels"
BESIDE = ("decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "decoder_position_ids")
"""Other inputs of a decoder; batches that have one are left as they are."""
LIMITS = ("max_target_positions", "max_position_embeddings", "n_positions")
FIRST_POSITION = 4
"""Rows at the beginning of a table of positions that may be left out: some models count from the padding token on."""
DECODERS = ("decoder", "text_config", "generator")
"""Parts of a configuration that may describe the decoder."""


def widened(batches: Sequence[Any], most: int | None) -> list[Any]:
    """The micro-batches with labels as wide as the next multiple of `WIDTH_STEP`; raises `CannotChange`."""
    if most is None:  # a position out of range would abort the process on a GPU instead of raising an error
        raise CannotChange("the longest possible target is unknown")
    return [_wide(batch, most) for batch in batches]


def _wide(batch: Any, most: int) -> dict[str, Any]:
    labels = batch.get(LABELS) if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.is_floating_point():
        raise CannotChange("labels are not rows of tokens")
    if any(name in batch for name in BESIDE):
        raise CannotChange("batches have inputs of the decoder besides labels")
    missing = min(-labels.shape[1] % WIDTH_STEP, max(most - labels.shape[1], 0))
    wide = nn.functional.pad(labels, (0, missing), value=IGNORED) if missing else labels
    return {**batch, LABELS: wide}


def widest(model: nn.Module) -> int | None:
    """The longest target that configuration and position tables of the decoder allow; None if it is unknown."""
    config = getattr(model, "config", None)
    parts = [config, *(getattr(config, name, None) for name in DECODERS)]
    named = [getattr(part, name, None) for part in parts for name in LIMITS]
    return min((value for value in [*named, *_positions(model)] if isinstance(value, int) and value > 0), default=None)


def _positions(model: nn.Module) -> Iterator[int]:
    """The positions of the tables in the decoder, or of all of them if no module is named so."""
    tables = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and "pos" in name.rpartition(".")[2]
    }
    decoding = {name: table for name, table in tables.items() if "decoder" in name.split(".")}
    return (len(table.weight) - FIRST_POSITION for table in (decoding or tables).values())


# ---- choosing -------------------------------------------------------------------------------------------------------


class WidthChoice:
    """Decides whether targets are padded, before graphs and compiled code are chosen by the shapes of batches."""

    def __init__(self, situation: PlannerInputs) -> None:
        self._here = situation
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
        here = self._here
        is_text = any(isinstance(each, Mapping) and "input_ids" in each for each in batches)
        if here.device.type not in WIDENING_DEVICES or not here.is_pair or is_text or here.is_shared:
            return None
        if here.only_grouped is not None or here.user_hook() is not None:
            return None
        try:
            return widened(batches, widest(here.model))
        except CannotChange:
            return None

    def choose(self, plan: SpeedPlan, batches: list[Any]) -> list[Any] | None:
        """The update's micro-batches, padded if that is needed and proved; None if it is refused."""
        here, changed = self._here, self._changed(batches)
        if changed is None or len(self._widths) < 2 or not self._ignores:
            return batches
        proof = WidenedUse(here).prove(batches)
        if not proof.accepted:
            plan.note(WIDENED, False, proof.reason)
            return None
        plan.widened, plan.made_for = True, here.described()
        plan.note(WIDENED, True, f"widths are multiples of {WIDTH_STEP}; {same(proof)}", proof.numbers)
        return changed


# ---- in training ----------------------------------------------------------------------------------------------------


class WidenedUse(ChangedBatches):
    """Pads the targets of updates."""

    name = WIDENED
    why_off = "targets are no longer padded to a few widths"

    def __init__(self, situation: PlannerInputs, *, is_proved: bool = True) -> None:
        super().__init__(situation, is_proved=is_proved)
        self._most = widest(situation.model)

    def change(self, batches: list[Any]) -> list[Any]:
        return widened(batches, self._most)
