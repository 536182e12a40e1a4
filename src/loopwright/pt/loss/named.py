"""Losses with named values: `{name: scalar}`, or `(loss, {name: scalar})`, as results of `compute_loss`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.measure.named_values import check_name
from ...core.update import MicroBatch, Update
from ...errors import ModelError
from .targets import LossKind

SAME = 1e-3
"""Largest relative difference between two computations of one value, some of which are in half precision."""
Values = dict[str, Any]


def split_named(result: Any) -> tuple[Any, Values]:
    """The loss, and the named values beside it, from any result of a loss computation.

    A dict has the loss under "loss"; without that name, the loss is the sum of its values.
    """
    if isinstance(result, Mapping):
        named = dict(result)
        if not named:
            raise ModelError("compute_loss returned an empty dict; return the loss, or its parts by name")
        loss = named.pop("loss", None)
        return (_summed(_checked(named)) if loss is None else loss), _checked(named)
    if isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[1], Mapping):
        return result[0], _checked(dict(result[1]))
    return result, {}


def _summed(named: Values) -> Any:
    pairs = [name for name, value in named.items() if isinstance(value, (tuple, list))]
    if pairs and len(named) > 1:
        raise ModelError(
            f"compute_loss returned a dict without 'loss' whose value {pairs[0]!r} is (sum, count); values with other "
            "counts cannot be added to a loss: return it as 'loss' as well"
        )
    return sum(named.values()) if not pairs else named[pairs[0]]


def _checked(named: Values) -> Values:
    for name, value in named.items():
        check_name(name)
        parts = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value,)
        for part in parts:
            if not isinstance(part, (int, float)) and not (isinstance(part, Tensor) and part.numel() == 1):
                shape = f" of shape {tuple(part.shape)}" if isinstance(part, Tensor) else f": {str(part)[:60]}"
                raise ModelError(
                    f"the loss has a value named {name!r} that is a {type(part).__name__}{shape}; return scalars, or "
                    "(sum, count) pairs, and of a model's outputs only the loss"
                )
    return named


class Given(NamedTuple):
    """The named values of one micro-batch."""

    values: Values
    micro: MicroBatch
    items: Any
    """The num_items_in_batch that the loss was given; None if none."""


class NamedLosses:
    """Collects the named values of an update, and weights those of each micro-batch."""

    def __init__(self, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        """Whether other ranks may have values in an update in which this one has none."""
        self._given: list[Given] = []
        self._weighted: list[tuple[str, Any, MicroBatch]] = []
        """Losses of datasets, with the weight of their micro-batch."""
        self.has_any = False
        """Whether the update has any; a plain attribute, because it is read in every update."""
        self._divides: dict[str, bool] = {}
        """Whether a value is divided by num_items_in_batch, by name; absent while it is not known."""
        self._names: tuple[set[str], set[str]] = (set(), set())
        """The names that the loss has used, and those of the losses of datasets."""

    def add(self, values: Values, micro: MicroBatch, items: Any) -> None:
        """Add the values of a micro-batch."""
        self._names[0].update(values)
        self._check_names()
        self._give(values, micro, items)

    def _check_names(self) -> None:
        both = self._names[0] & self._names[1]
        if both:
            raise ModelError(
                f"the loss has a value named {min(both)!r}, which is the loss of a dataset of train_dataset; use "
                "another name"
            )

    def _give(self, values: Values, micro: MicroBatch, items: Any) -> None:
        if not micro.is_dummy:
            self.has_any = True
            self._given.append(Given({name: _detached(value) for name, value in values.items()}, micro, items))

    def add_source(self, name: str, given: Any, weighted: Any, micro: MicroBatch) -> None:
        """Add the loss of a micro-batch whose samples are all of one dataset, as it was given and weighted."""
        if micro.is_dummy:
            return
        self._names[1].add(name)
        self._check_names()
        if isinstance(given, (tuple, list)):
            self._give({name: tuple(given)}, micro, None)
        else:
            self.has_any = True
            self._weighted.append((name, weighted.detach(), micro))

    def clear(self) -> None:
        """Drop the values of an update that starts, or starts again."""
        self._given, self._weighted, self.has_any = [], [], False

    def of_update(
        self, update: Update, compute: Callable[[Any, Any], Values], kind: LossKind | None
    ) -> dict[str, tuple[Any, Any]]:
        """Numerator and denominator of each value.

        `compute(inputs, items)` computes the values of a batch again, to find out whether they are divided by the
        number of items; if it returns none, they are like the loss, which is of this kind.
        """
        given, self._given = self._given, []
        found: dict[str, tuple[Any, Any]] = {}
        for name, loss, micro in self._weighted:
            total, weight = found.get(name, (0.0, 0.0))
            found[name] = (total + loss, weight + _share(update, micro.index, kind))
        self._weighted, self.has_any = [], False
        for each in given:
            share = _share(update, each.micro.index, kind)
            is_whole = len(given) == 1 and not update.shared
            factor = share if each.items is None or is_whole else each.items / update.total_items
            for name, value in each.values.items():
                if isinstance(value, (tuple, list)):
                    pair = (value[0], value[1])
                else:
                    usual = kind is LossKind.SCALED
                    is_divided = factor is not share and self._is_divided(name, each, compute, usual=usual)
                    pair = (value * (factor if is_divided else share), share)
                before = found.get(name)
                found[name] = pair if before is None else (before[0] + pair[0], before[1] + pair[1])
        return found

    def _is_divided(self, name: str, given: Given, compute: Callable[[Any, Any], Values], *, usual: bool) -> bool:
        """Whether a value halves when num_items_in_batch doubles."""
        if name not in self._divides:
            once, twice = (compute(given.micro.inputs, given.items * factor) for factor in (1, 2))
            if not once:
                return usual
            for each in once.keys() & twice.keys():
                if not isinstance(once[each], (tuple, list)) and float(once[each]):
                    ratio = float(twice[each]) / float(once[each])
                    self._divides[each] = abs(ratio - 0.5) <= SAME
        return self._divides.get(name, False)


def _share(update: Update, index: int, kind: LossKind | None) -> Any:
    """The fraction of the update's targets in a micro-batch."""
    if not update.items or (len(update.batches) == 1 and not update.shared):
        return 1.0
    if update.weights is not None and kind is not LossKind.TOTAL:
        return update.weights[index] / update.total_weight
    return update.items[index] / update.total_items


def _detached(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_detached(each) for each in value)
    if isinstance(value, Tensor):
        value = value.detach().reshape(())
        return value if value.dtype in (torch.float32, torch.float64) else value.float()
    return float(value)
