"""The state of the trainer and its callbacks as JSON, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...notices import Notices
from ..hooks import HookUser
from ..logs.json_values import LEFT_OUT, json_or_left_out
from ..logs.log_history import EncodedRows, LogHistory
from ..state import callback_states, restore_callback_states


class SavedState(HookUser):
    """What trainer_state.json contains."""

    notices: Notices

    def callback_states(self) -> dict[str, Any]:
        found = callback_states([*self.callback_handler.callbacks, self.control])
        return self._saved(found, "the state of {}")

    def check_callback_states(self) -> None:
        """Warn before the first update about a callback whose state cannot be saved; an error in strict mode."""
        if self.args.should_save:
            self.callback_states()

    def state_document(self) -> dict[str, Any]:
        """The trainer's state for `write_json`; a value of the user's that is none is left out, with a warning."""
        state = self.state
        state.stateful_callbacks = self.callback_states()
        names = [each.name for each in dataclasses.fields(state) if each.name != "log_history"]
        values = self._saved({name: getattr(state, name) for name in names}, "state.{}")
        return {"log_history": self.encoded_history(), **values}

    def encoded_history(self) -> EncodedRows:
        """The log history as JSON text; only the rows added since the last call are encoded."""
        history, tell = self.state.log_history, self.notices.warn_once
        # A list that the user assigned may be changed in ways that cannot be noticed: it is encoded as a whole.
        rows = history if isinstance(history, LogHistory) else LogHistory(history)
        return rows.encoded(lambda row: json_or_left_out(row, "a row of state.log_history", tell))

    def _saved(self, values: dict[str, Any], title: str) -> dict[str, Any]:
        """Values as JSON values; those that cannot be saved are left out, each as a whole."""
        tell = self.notices.warn_once
        found = {name: json_or_left_out(each, title.format(name), tell) for name, each in values.items()}
        return {name: each for name, each in found.items() if each is not LEFT_OUT}

    def restore_callbacks(self, states: dict[str, Any]) -> None:
        if not self.args.restore_callback_states_from_checkpoint:
            return
        states = {name: state for name, state in states.items() if name != "TrainerControl"}
        without = callback_states(self.callback_handler.callbacks).keys() - states.keys()
        left = restore_callback_states(self.callback_handler.callbacks, states)
        if left:
            self.notices.warn_once(
                f"the checkpoint has state of callbacks that this trainer does not have: {', '.join(left)}"
            )
        if without:
            names = ", ".join(sorted(without))
            self.notices.warn_once(f"the checkpoint has no state of these callbacks: {names}")

    def load_callback_state(self) -> None:
        """Restore the callbacks from `state`, and outside of training also the flags of `control`.

        A run that resumes decides itself whether to stop.
        """
        saved = self.state.stateful_callbacks
        self.restore_callbacks(saved)
        own = {name: each for name, each in saved.items() if name == "TrainerControl"}
        if self.args.restore_callback_states_from_checkpoint and not self.trainer.is_in_train:
            restore_callback_states([self.control], own)
