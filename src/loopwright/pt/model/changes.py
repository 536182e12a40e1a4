"""Changes that callbacks and overrides make during training."""

from __future__ import annotations

from operator import attrgetter

from ...core.changes import Changes
from ...errors import ModelError
from ..optim.schedulers import steps_on_metric
from ..part import TorchPart
from .known import Known

METHODS = attrgetter(
    "training_step", "compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager",
    "_prepare_inputs", "_prepare_input", "_get_num_items_in_batch", "get_batch_samples",
)  # fmt: skip
"""Methods that are inspected once, so that calls have no overhead; inspected again when assigned."""
TAKEN_ONCE = (
    "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate", "weight_decay", "optim",
    "lr_scheduler_type", "warmup_steps", "warmup_ratio", "seed", "data_seed", "label_smoothing_factor", "bf16", "fp16",
    "gradient_checkpointing", "neftune_noise_alpha", "torch_compile", "batch_packing", "per_device_train_batch_tokens",
    "dataloader_num_workers", "dataloader_drop_last", "train_sampling_strategy", "speed",
)  # fmt: skip
"""Arguments that are read only when training begins."""
IN_STATE = ("logging_steps", "eval_steps", "save_steps")
"""Arguments that are copied to the state, where callbacks may change them."""


class TorchChanges(TorchPart, Changes):
    """Applies assignments during training from the next update on, or refuses them."""

    def begin_following(self) -> None:
        super().begin_following()
        known = self.run.known = Known(
            self.model, METHODS(self.trainer), (self.trainer.compute_loss_func, self.trainer.label_smoother)
        )
        known.data = (self.trainer.train_dataset, self.trainer.data_collator)
        known.arguments = {name: getattr(self.args, name, None) for name in (*TAKEN_ONCE, *IN_STATE)}

    def adopt_assigned_model(self) -> None:
        """Adopt a model assigned between two runs; drops an optimizer of the previous model."""
        held = {id(p) for group in getattr(self.trainer.optimizer, "param_groups", ()) for p in group["params"]}
        if held and held.isdisjoint(map(id, self.model.parameters())):
            self.trainer.optimizer = self.trainer.lr_scheduler = None
            self.notices.warn_once("trainer.model was replaced: creating a new optimizer and scheduler")
        self.internals.adopt_model(self.model)

    # ---- before each update -----------------------------------------------------------------------------------------

    def follow_overrides(self) -> None:
        """Switch to methods or losses that were assigned; called before the batches of an update are read."""
        if self.run.known is not None and self.has_new_overrides(self.run.known):
            self.run.known.methods = METHODS(self.trainer)
            self.run.known.losses = (self.trainer.compute_loss_func, self.trainer.label_smoother)
            self.internals.loss.follow_loss()
            self.strategy.note_change()

    def has_new_overrides(self, known: Known) -> bool:
        """Whether a method or a loss was assigned since the last check."""
        function, smoother = known.losses
        is_same = self.trainer.compute_loss_func is function and self.trainer.label_smoother is smoother
        return not is_same or METHODS(self.trainer) != known.methods

    def follow_changes(self) -> None:
        """Apply changes to the model, parameters and optimizer; called before the micro-batches of an update."""
        known = self.run.known
        if known is None:
            return  # an update outside training, such as one for ahead-of-time compilation
        if self.model is not known.model:
            raise ModelError(
                f"trainer.model was assigned after step {self.state.global_step}, but the optimizer still holds the "
                "previous model's parameters. Change the model in place, restore it before the next step, or call "
                "train() again"
            )
        if self.strategy.detect_changes():
            self.trainer.model_wrapped = self.strategy.rewrap(self.trainer.model_wrapped)

    def follow_accumulation(self) -> None:
        super().follow_accumulation()
        self.strategy.note_change()

    def follow_optimizer(self, *, is_clipped: bool = False) -> None:
        if self.trainer.lr_scheduler is None:
            raise ModelError("trainer.lr_scheduler was set to None during training; assign another schedule")
        if self.trainer.lr_scheduler is not self.run.schedule:
            self.run.schedule = self.trainer.lr_scheduler
            self.run.schedule_follows_metric = steps_on_metric(self.trainer.lr_scheduler)
            self.callback_handler.context["lr_scheduler"] = self.trainer.lr_scheduler
            self.strategy.note_change()
        # Loss scaling has unscaled the gradients of the previous optimizer, so that one steps.
        is_too_late = is_clipped and self.strategy.precision.scales
        if self.trainer.optimizer is not self.run.optimizer and not is_too_late:
            self._take_optimizer()

    def _take_optimizer(self) -> None:
        if self.trainer.optimizer is None:
            raise ModelError("trainer.optimizer was set to None during training; assign another optimizer")
        self.run.optimizer = self.trainer.optimizer = self.strategy.change_optimizer(self.trainer.optimizer)
        self.callback_handler.context["optimizer"] = self.trainer.optimizer
        scheduled = getattr(self.trainer.lr_scheduler, "optimizer", self.trainer.optimizer)
        if scheduled is not self.trainer.optimizer:
            self.notices.warn_once(
                f"trainer.optimizer was replaced after step {self.state.global_step}, but the scheduler still "
                "updates the previous one; the new one keeps its own learning rates. Assign trainer.lr_scheduler too"
            )

    # ---- changes without effect --------------------------------------------------------------------------------------

    def warn_about_ignored_changes(self) -> None:
        """Warn once about assignments during training that have no effect."""
        known, args = self.run.known, self.args
        if known is None:
            return
        changed = [name for name in known.arguments if getattr(args, name, None) != known.arguments[name]]
        once = [name for name in changed if name in TAKEN_ONCE]
        if once:
            self.notices.warn_once(f"changed during training, without effect on this run: {', '.join(once)}")
        intervals = [name for name in changed if name in IN_STATE]
        if intervals:
            self.notices.warn_once(
                f"changed during training, without effect: {', '.join(intervals)}; set those of trainer.state"
            )
        for name, before in zip(("train_dataset", "data_collator"), known.data, strict=True):
            if getattr(self.trainer, name) is not before:
                self.notices.warn_once(
                    f"trainer.{name} was replaced during training, which continues with the previous loader; change "
                    "the object itself, or call train() again"
                )
