"""Joining the micro-batches of an update into larger ones, for batches that are not text: images, arrays, features.

The update keeps its samples, so its gradient is the same. Losses and models that mix samples are refused by the proof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from .changed_batches import CannotChange, ChangedBatches
from .planner.choice import same
from .planner.cost import LAUNCH_SHARE, Work
from .planner.decision import SpeedPlan
from .proof.region import trial
from .training_setup import TrainingSetup

JOINED = "joined micro-batches"
JOINING_DEVICES = ("cuda",)
FILLED = 0.8
"""Share of the memory beside weights, gradients and optimizer states that activations may take."""


class CannotJoin(CannotChange):
    """Micro-batches cannot be joined; the message gives the reason."""


def joined(batches: Sequence[Any], count: int) -> list[Any]:
    """Micro-batches of `count` of the given ones each, in their order; raises `CannotJoin`."""
    return [_one(batches[start : start + count]) for start in range(0, len(batches), count)]


def _one(parts: Sequence[Any]) -> dict[str, Any]:
    first = parts[0]
    if not all(isinstance(each, Mapping) and each.keys() == first.keys() for each in parts):
        raise CannotJoin("micro-batches have different entries")
    return {name: _entry(name, [each[name] for each in parts], parts) for name in first}


def _entry(name: str, values: list[Any], parts: Sequence[Any]) -> Any:
    first = values[0]
    if not isinstance(first, Tensor):
        if any(type(each) is not type(first) or each != first for each in values):
            raise CannotJoin(f"{name!r} has different values in the micro-batches")
        return first
    if any(not isinstance(each, Tensor) or each.dtype != first.dtype for each in values):
        raise CannotJoin(f"{name!r} has different types in the micro-batches")
    if not first.dim() or any(each.shape[1:] != first.shape[1:] for each in values):
        raise CannotJoin(f"{name!r} has different shapes in the micro-batches")
    if any(len(each) != _samples(part) for each, part in zip(values, parts, strict=True)):
        raise CannotJoin(f"{name!r} does not have one row for each sample")
    return torch.cat(values)


def _samples(batch: Mapping[str, Any]) -> int:
    return next(len(each) for each in batch.values() if isinstance(each, Tensor) and each.dim())


# ---- choosing -------------------------------------------------------------------------------------------------------


def choose_joining(plan: SpeedPlan, setup: TrainingSetup, batches: list[Any], work: Work | None) -> list[Any]:
    """Decide how many micro-batches are joined; returns those of the update, joined if that is proved."""
    is_text = any(isinstance(each, Mapping) and "input_ids" in each for each in batches)
    if len(batches) < 2 or is_text or setup.device.type not in JOINING_DEVICES:
        return batches
    reason = _why_not(setup, work, batches)
    count = 1 if reason is not None else _most(setup, batches)
    if reason is None and count < 2:
        reason = "activations of two micro-batches would not fit"
    if reason is None:
        proof = JoinedUse(setup, count).prove(batches)
        reason = None if proof.accepted else proof.reason
    if reason is not None:
        plan.note(JOINED, False, reason)
        return batches
    plan.joined, plan.made_for = count, setup.described()
    plan.note(JOINED, True, f"{count} micro-batches are computed together; {same(proof)}", proof.numbers)
    return joined(batches, count)


def _why_not(setup: TrainingSetup, work: Work | None, batches: list[Any]) -> str | None:
    if setup.is_shared:
        return "there is more than one rank"
    if setup.why_only_grouped is not None:
        return setup.why_only_grouped
    if any(isinstance(module, _BatchNorm) for module in setup.model.modules()):
        return "the model has batch statistics"
    if setup.level == "max":
        return None if setup.learn(batches) else setup.why_not_additive() or "the denominator of the loss is unknown"
    kind = setup.device.type
    if work is None or work.launching(kind, compiled=True) < LAUNCH_SHARE * work.computing(kind, compiled=True):
        return "micro-batches are large enough"
    return None if setup.learn(batches) else setup.why_not_additive() or "the denominator of the loss is unknown"


def _most(setup: TrainingSetup, batches: list[Any]) -> int:
    """The largest number that divides the update's micro-batches and fits into memory."""
    total, most = setup.device_memory(), len(batches)
    if total is None:
        return most if setup.level == "max" else 1
    room = FILLED * (0.92 * total - setup.model_bytes())
    fits = int(room // max(_activation_bytes(setup, batches[0]), 1))
    return max((count for count in range(1, most + 1) if most % count == 0 and count <= fits), default=1)


def _activation_bytes(setup: TrainingSetup, batch: Any) -> int:
    """Bytes that autograd keeps for the backward pass of a micro-batch, without the weights."""
    own = {each.untyped_storage().data_ptr() for each in setup.model.parameters()}
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with setup.sandbox(), setup.as_trained(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        setup.model.train()
        trial(setup, batch)()
    return sum(sizes.values())


# ---- in training ----------------------------------------------------------------------------------------------------


class JoinedUse(ChangedBatches):
    """Joins the micro-batches of updates."""

    name = JOINED
    why_off = "micro-batches are no longer joined"

    def __init__(self, setup: TrainingSetup, count: int, **options: Any) -> None:
        super().__init__(setup, **options)
        self.count = count

    def change(self, batches: list[Any]) -> list[Any]:
        return joined(batches, self.count)
