"""What the parts behind a trainer of Keras models have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.part import Part
from .arguments import KerasTrainingArguments
from .hooks import KerasHooks
from .run import KerasRun
from .strategy import KerasStrategy

if TYPE_CHECKING:
    from .internals import KerasInternals


class KerasPart(Part):
    """One subject behind a trainer of Keras models."""

    internals: KerasInternals
    trainer: KerasHooks
    strategy: KerasStrategy
    run: KerasRun
    args: KerasTrainingArguments
