"""KerasRun: what exists only while a Keras model is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.run import Run


@dataclass(kw_only=True)
class KerasRun(Run):
    """One call of `train()` of a Keras trainer."""

    source: Any = None
    """The training data, in its order."""
    stream: Any = None
    """The state of a stream, from the checkpoint the run resumes from."""
    epoch_rng: Any = None
    """RNG states at the beginning of the epoch, where the data owns its order."""
    work: Any = None
    """Counts tokens and operations."""
