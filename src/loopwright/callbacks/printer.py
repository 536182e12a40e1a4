"""Logs as printed dictionaries, one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.events import TrainerCallback
from ..core.shutdown.lost_output import lost_output_discarded
from .text import shown

if TYPE_CHECKING:
    from ..args.base import BaseArguments


class PrinterCallback(TrainerCallback):
    """Prints every log; floats with four significant digits."""

    def on_log(
        self, args: BaseArguments, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if state.is_local_process_zero and logs is not None:
            with lost_output_discarded():
                print(shown(logs), flush=True)
