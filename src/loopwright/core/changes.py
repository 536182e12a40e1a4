"""Changes that callbacks and overrides make during training: applied at the next update, or refused."""

from __future__ import annotations

from ..errors import ArgumentsError, NotAvailable
from .part import Part


class Changes(Part):
    """Applies changes at update boundaries. The checks run in every update and are cheap while nothing has changed."""

    def begin_following(self) -> None:
        """Record the optimizer and the schedule at the start of training."""
        self.run.optimizer, self.run.schedule = self.trainer.optimizer, self.trainer.lr_scheduler

    def follow_overrides(self) -> None:
        """Apply methods assigned since the last update; called before the batches of an update are read."""

    def follow_changes(self) -> None:
        """Apply changes to parameters and optimizer; called before the micro-batches of an update."""

    def follow_optimizer(self, *, is_clipped: bool = False) -> None:
        """Switch to an optimizer or a schedule that was assigned during training, before or after clipping.

        This version refuses it, for backends that compile whole updates.
        """
        raise NotAvailable(
            f"trainer.optimizer or trainer.lr_scheduler was assigned after step {self.state.global_step}, but "
            "steps are already compiled with the previous ones; assign them before train()"
        )

    def warn_about_ignored_changes(self) -> None:
        """Warn about changes made during training that no longer have an effect."""

    def follow_accumulation(self) -> None:
        """Apply a changed gradient_accumulation_steps to the following updates, and replan the rest of the run."""
        asked, before, step = self.args.gradient_accumulation_steps, self.run.plan, self.state.global_step
        if not isinstance(asked, int) or asked < 1:
            raise ArgumentsError(
                f"gradient_accumulation_steps={asked!r} was set after step {step}; it must be an integer above 0"
            )
        self.run.asked_accumulation = asked
        if asked == before.accumulation:
            return
        self.run.is_resized = True
        self.run.plan = self.internals.saving.replanned()
        self.state.max_steps, self.state.num_train_epochs = self.run.plan.max_steps, self.run.plan.epochs
        text = f"gradient_accumulation_steps was changed from {before.accumulation} to {asked} after step {step}"
        if self.run.plan.max_steps != before.max_steps:
            text += (
                f": the run now has {self.run.plan.max_steps:,} steps instead of {before.max_steps:,}, and the "
                "learning rate schedule is unchanged"
            )
        self.notices.warn_once(text)
