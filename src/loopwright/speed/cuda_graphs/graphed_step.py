"""Micro-batches of training as CUDA graphs: when that pays off, and the training step that replays them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...core.update import MicroBatch
from ...snapshot import restored
from ..layouts.rows import MASK
from ..planner.cost import Work
from ..planner.decision import (
    COLLATED,
    SpeedPlan,
    pays_to_record,
    pays_to_record_rows,
    seconds,
    seconds_launching,
)
from ..training_setup import TrainingSetup
from .contexts import any_wait_is_fine, autocast_without_cache
from .recorder import MOST_SHAPES, GraphedStep, Recorder, shape_key

MOST_ROWS = 32
"""Most row lengths that become graphs; each is captured when it occurs for the second time."""
SAME_LOSS = 1e-3
"""Allowed relative difference of the captured loss: rounding in half precision, not a different loss."""

LossOf = Callable[[dict[str, Any], Any], Tensor]
"""The loss of inputs on the device and num_items_in_batch, or None."""


# ---- estimated benefit ----------------------------------------------------------------------------------------------


class GraphChoice:
    """Collects the shapes of micro-batches and decides whether they become graphs."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self.shapes: set[str] = set()
        """The shapes seen so far, as text, because they are saved with the run."""

    def look(self, batches: Sequence[Any]) -> None:
        if self._setup.why_not_graph is None and len(self.shapes) <= MOST_SHAPES:
            self.shapes |= {repr(shape_key(batch)) for batch in batches}

    def why_not(
        self, plan: SpeedPlan, batches: Sequence[Any], *, row: int = 0, work: Work | None = None
    ) -> str | None:
        """Why micro-batches do not become graphs, or None if they do.

        `row` is the number of tokens in a row or group of the layout, `work` the counted operators of a micro-batch as
        collated.
        """
        setup, in_rows = self._setup, plan.layout != COLLATED
        if setup.why_not_graph is not None:
            return setup.why_not_graph
        for reason, is_so in (
            ("the fused loss has a different number of targets each time", plan.linear_loss),
            ("activations are recomputed", plan.activations != "none"),
            ("batches hold more than tensors and plain values", any(shape_key(batch) is None for batch in batches)),
            (f"micro-batches have more than {MOST_SHAPES} shapes", not in_rows and len(self.shapes) > MOST_SHAPES),
        ):
            if is_so:
                return reason
        if work is not None and not in_rows:
            return self._why_not_worth_counted(work, len(batches))
        if in_rows:
            return self._why_not_worth_it(row * setup.operations_per_token, 1, pays_to_record_rows)
        return self._why_not_worth_it(operations_of(batches, setup.operations_per_token), len(batches), pays_to_record)

    def _why_not_worth_counted(self, work: Work, micro_batches: int) -> str | None:
        setup, kind = self._setup, self._setup.device.type
        saved = work.saved_by_graph(kind, compiled=setup.why_not_region is None)
        if saved <= 0 and setup.level != "max":
            return "compute takes longer than kernel launches"
        if setup.level != "max" and not pays_to_record(saved * micro_batches * setup.updates_left(), kind):
            return "the run is too short to recover the cost of capturing"
        return None

    def _why_not_worth_it(
        self, operations: float | None, micro_batches: int, pays: Callable[[float, str], bool]
    ) -> str | None:
        setup, kind = self._setup, self._setup.device.type
        # With level "max", blocks that can be compiled gain more from that, once they compute enough.
        wants_all = setup.level == "max"
        if operations is None:
            return None if wants_all else "what a micro-batch computes does not depend on its shapes alone"
        launching = seconds_launching(setup.modules, kind)
        saved = launching - seconds(operations, kind)
        if saved <= 0 and not (wants_all and setup.why_not_compile is not None):
            return "compute takes longer than kernel launches"
        if not wants_all and not pays(saved * micro_batches * setup.updates_left(), kind):
            return "the run is too short to recover the cost of capturing"
        return None


def operations_of(batches: Sequence[Any], per_token: float) -> float | None:
    """Operations of the largest micro-batch, forward and backward; None if its shapes do not determine them."""
    units = [_units(batch) for batch in batches]
    known = [each for each in units if each is not None]
    return max(known) * per_token if known and len(known) == len(units) else None


def _units(batch: Any) -> int | None:
    """Tokens, or rows of features; None for inputs such as images or audio, whose cost is unknown."""
    if not isinstance(batch, Mapping):
        return None
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    if "input_ids" in tensors:
        tokens: int = tensors["input_ids"].numel()
        return tokens
    sizes = [value.shape[0] for value in tensors.values() if value.dim()]
    return max(sizes) if sizes and all(value.dim() <= 2 for value in tensors.values()) else None


# ---- the training step ----------------------------------------------------------------------------------------------


class GraphedTraining:
    """A training step that replays graphs, in place of the trainer's own.

    The captured loss gets no number of items: it is the mean over its own targets, times the micro-batch's share, so
    that the graph is valid for every update. The first micro-batch shows whether that is the same loss.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss_of: LossOf,
        micro_batch: Callable[[], MicroBatch],
        weigh: Callable[[Any, MicroBatch], Tensor],
        backward: Callable[[Tensor], Any],
        put: Callable[[Any], Any],
        plain: Callable[..., Tensor],
        give_up: Callable[[str], None],
        tell: Callable[[str], None],
        recorder: Recorder | None = None,
    ) -> None:
        self._model, self._given_loss_of, self._weigh, self._micro_batch = model, loss_of, weigh, micro_batch
        self._backward, self._put, self._given_plain, self._give_up = backward, put, plain, give_up
        self._prepare: Callable[[Any], Any] = lambda inputs: inputs
        self._is_proved = False
        self._drops_mask = True
        self._told = False
        self.step = GraphedStep(self._run, model, tell=tell, recorder=recorder)

    def __call__(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch; returns its share of the update's loss."""
        micro = self._micro_batch()
        share = micro.share  # None if it has no targets
        if share is None or not self._is_possible():
            return self._plain(model, inputs, num_items_in_batch=num_items_in_batch)
        given = self._put(inputs)
        if not self._is_proved:
            self._prove(given, inputs, micro, share)
            if not self._is_proved or not self._is_possible():
                return self._plain(model, inputs, num_items_in_batch=num_items_in_batch)
        self.step.overwrites = len(micro.update.batches) == 1
        loss = self.step.step(self._without_mask(given, inputs), share)
        self._is_possible()  # report a failure now, so that a checkpoint of this update includes it
        return loss

    def take_rows(self, prepare: Callable[[Any], Any]) -> None:
        """Accept micro-batches laid out in rows; `prepare` converts one on the device to the inputs of the model."""
        self._prepare = prepare
        self.step.most, self.step.from_time = MOST_ROWS, 2

    def take_images(self, prepare: Callable[[Any], Any]) -> None:
        """Convert the images of each micro-batch on the device."""
        self._prepare = prepare

    def _loss_of(self, inputs: dict[str, Any], items: Any) -> Tensor:
        return self._given_loss_of(self._prepare(inputs), items)

    def _plain(self, model: nn.Module, inputs: Any, **more: Any) -> Tensor:
        return self._given_plain(model, self._prepare(inputs), **more)

    def look_again(self) -> None:
        """Discard all graphs and prove the loss again, because a captured value has changed."""
        self._is_proved, self._drops_mask = False, True
        self.step.forget()

    def give_up(self, reason: str) -> None:
        """Stop replaying graphs."""
        self.step.reason = self.step.reason or reason
        self._is_possible()

    def close(self) -> None:
        """Discard all graphs; the trainer's own step is used from now on."""
        self._told = True
        self.step.close()

    def _is_possible(self) -> bool:
        if self.step.reason is None:
            return True
        if not self._told:
            self._told = True
            self._give_up(self.step.reason)
        return False

    def _run(self, inputs: dict[str, Any], weight: Any) -> Tensor:
        loss = self._loss_of(dict(inputs), None) * weight
        self.step.divide()
        self._backward(loss)
        return loss.detach()

    def _without_mask(self, given: dict[str, Any], inputs: Any) -> dict[str, Any]:
        """Inputs without a mask of ones only: models read the mask's values, which is not possible in a capture."""
        mask = inputs[MASK] if self._drops_mask and MASK in inputs else None
        if not isinstance(mask, Tensor) or mask.device.type != "cpu" or not mask.all():
            return given
        return {name: value for name, value in given.items() if name != MASK}

    def _prove(self, given: dict[str, Any], inputs: Any, micro: MicroBatch, share: float) -> None:
        """Check on one micro-batch that the loss to be captured equals the loss of training."""
        expected = self._looked_at(lambda: self._weigh(self._loss_of(dict(given), micro.items), micro))
        if not math.isfinite(expected):
            return  # try again with the next micro-batch
        self._is_proved = True
        try:
            if self._is_alike(self._without_mask(given, inputs), expected, share):
                return
        except TypeError:  # the model requires its mask
            pass
        self._drops_mask = False
        if not self._is_alike(given, expected, share):
            self.step.reason = "the loss changes when it is not given the number of items"

    def _is_alike(self, inputs: dict[str, Any], expected: float, share: float) -> bool:
        found = self._looked_at(lambda: self._loss_of(dict(inputs), None) * share)
        return abs(found - expected) <= SAME_LOSS * max(abs(expected), 1e-6)

    def _looked_at(self, compute: Callable[[], Tensor]) -> float:
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        with any_wait_is_fine(), restored(self._model, parameters), autocast_without_cache():
            return float(compute().detach())
