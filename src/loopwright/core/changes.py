"""Changes that callbacks and overrides make during training: applied at the next update, or refused."""

from __future__ import annotations

from ..errors import ArgumentsError, NotAvailable
from .part import Part


class Changes(Part):
    """Asked in every update, so each of these costs next to nothing while nothing has changed."""

    def begin_following(self) -> None:
        """Note what training begins with."""
        self.run.optimizer, self.run.schedule = self.trainer.optimizer, self.trainer.lr_scheduler

    def follow_overrides(self) -> None:
        """Before the batches of an update are looked at: take up methods that were assigned since the last one."""

    def follow_changes(self) -> None:
        """Before the micro-batches of an update: take up the parameters and the optimizer as they are now."""

    def follow_optimizer(self, *, is_clipped: bool = False) -> None:
        """Take up an optimizer or a schedule that was assigned; called when one was, and gradients are clipped or not.

        Where updates are compiled as a whole it is refused.
        """
        raise NotAvailable(
            f"trainer.optimizer or trainer.lr_scheduler was assigned after step {self.state.global_step}, but "
            "updates are already compiled with the previous ones; assign them before train()"
        )

    def tell_unfollowed(self) -> None:
        """Say what was changed during training and cannot have an effect any more."""

    def follow_accumulation(self) -> None:
        """Take up another gradient_accumulation_steps: for updates from here on, and in the plan of what is left."""
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
                f": the run now has {self.run.plan.max_steps:,} updates instead of {before.max_steps:,}, and the "
                "learning rate schedule is unchanged"
            )
        self.notices.warn_once(text)
