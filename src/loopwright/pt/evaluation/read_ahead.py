"""Batches that are read before the ones ahead of them are evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import Any

import numpy as np
from torch import Tensor

from ...core.events import CallbackHandler

EVENT = "on_prediction_step"
ACTS_BETWEEN = f"a callback uses {EVENT} and may change the model after each batch"


def acts_between_batches(handler: CallbackHandler) -> bool:
    """Whether a callback of the user is called after each batch of an evaluation."""
    homes = [getattr(getattr(callback, EVENT), "__module__", None) or "" for callback, _ in handler.listening_to(EVENT)]
    return not all(home.startswith(("loopwright.", "transformers.")) for home in homes)


class ReadAhead:
    """An iterable whose batches have memory of their own already."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def kept(batch: Any) -> Any:
    """A batch with memory of its own: a loader may fill the same dict or the same tensors for every batch."""
    if isinstance(batch, Mapping):
        own: Any = copy(batch)
        for name, value in batch.items():
            own[name] = kept(value)
        return own
    if type(batch) in (list, tuple):
        return type(batch)(map(kept, batch))
    if type(batch) is Tensor:
        return batch.clone()
    return batch.copy() if isinstance(batch, np.ndarray) else batch
