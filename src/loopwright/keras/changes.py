"""What callbacks change while a Keras model trains: an update is compiled, so it is compiled again or refused."""

from __future__ import annotations

from ..core.changes import Changes
from .part import KerasPart


class KerasChanges(KerasPart, Changes):
    """Compiles updates again for new rules; says what cannot be followed."""

    def follow_changes(self) -> None:
        """Recompile updates if max_grad_norm or on_nonfinite has changed."""
        rules = self.internals.rules()
        if rules != self.strategy.rules:
            self.strategy.prepare(self.internals.loss.micro_gradients, rules)

    def warn_about_ignored_changes(self) -> None:
        if list(map(id, self.strategy.trained)) != list(map(id, self.model.trainable_variables)):
            self.notices.warn_once(
                "layers were frozen, unfrozen or added during training, but steps are compiled for the original "
                "variables; call train() again after such a change"
            )
