"""Flyte: checkpoints of a task, and the log history as a deck. Inside a Flyte task only."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from ..notices import logger
from .base import Reporter, require
from .callback import ReporterCallback
from .model_files import wait_for

if TYPE_CHECKING:
    from ..args.base import BaseArguments


class FlyteReporter(Reporter):
    """Saves checkpoints with the task's checkpoint object, from which a restarted task resumes."""

    name: ClassVar[str] = "flyte"

    def __init__(self) -> None:
        require("flytekit", "flyte")
        from flytekit import current_context

        self.cp = current_context().checkpoint

    def log(self, values: dict[str, Any], step: int) -> None:
        """Metrics are shown at the end."""

    def artifact(self, path: str | os.PathLike[str], name: str) -> None:
        wait_for(path)
        self.cp.save(os.fspath(path))

    def as_callback(self) -> FlyteCallback:
        return FlyteCallback(reporter=self)


class FlyteCallback(ReporterCallback):
    """Reports to Flyte: `sync_checkpoints` saves each checkpoint, `save_log_history` shows the logs as a deck."""

    reporter: FlyteReporter

    def __init__(
        self, save_log_history: bool = True, sync_checkpoints: bool = True, *, reporter: FlyteReporter | None = None
    ) -> None:
        super().__init__(reporter or FlyteReporter())
        self.cp, self.sync_checkpoints = self.reporter.cp, sync_checkpoints
        self.save_log_history = save_log_history and _has_deck()

    def on_save(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self.sync_checkpoints:
            self.send_checkpoint(args, state)

    def on_train_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_end(args, state, control, **kwargs)
        if self.save_log_history and state.is_world_process_zero:
            import pandas
            from flytekit import Deck
            from flytekitplugins.deck.renderer import TableRenderer

            Deck("Log History", TableRenderer().to_html(pandas.DataFrame(list(state.log_history))))


def _has_deck() -> bool:
    if find_spec("flytekitplugins") is not None and find_spec("flytekitplugins.deck") and find_spec("pandas"):
        return True
    logger.warning("the log history is not shown in Flyte: pip install flytekitplugins-deck-standard pandas")
    return False
