"""The trainer's methods that follow what callbacks and overrides change while it trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..core.base import BaseTrainer
from ..errors import ModelError
from .schedulers import steps_on_metric

METHODS = ("training_step", "compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager",
           "_prepare_inputs", "_prepare_input", "_get_num_items_in_batch", "get_batch_samples")  # fmt: skip
"""Methods that are looked at once, so that calling them costs nothing: assigned anew, they are looked at again."""
TAKEN_ONCE = (
    "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate", "weight_decay", "optim",
    "lr_scheduler_type", "warmup_steps", "warmup_ratio", "seed", "data_seed", "label_smoothing_factor", "bf16", "fp16",
    "gradient_checkpointing", "neftune_noise_alpha", "torch_compile", "packing", "per_device_train_batch_tokens",
    "dataloader_num_workers", "dataloader_drop_last", "train_sampling_strategy", "speed",
)  # fmt: skip
"""Arguments that training reads when it begins, and never again."""
IN_STATE = ("logging_steps", "eval_steps", "save_steps")
"""Arguments that the state has taken over, where callbacks may change them."""


@dataclass
class Known:
    """What training goes by; everything is compared with it by identity."""

    model: Any = None
    schedule: Any = None
    methods: tuple[Any, ...] = ()
    losses: tuple[Any, ...] = ()
    changes: int = -1
    data: tuple[Any, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)


class ChangeMethods(BaseTrainer):
    """Nothing is taken once: what users assign during training counts from the next update on, or is refused."""

    args: Any
    strategy: Any
    model: Any
    compute_loss_func: Any
    label_smoother: Any
    train_dataset: Any
    data_collator: Any
    _known: Known | None = None
    """None while nothing is trained."""

    def _know(self) -> None:
        """Note what training begins with."""
        known = self._known = Known(self.model, self.lr_scheduler, self._methods(), self._losses())
        known.data = (self.train_dataset, self.data_collator)
        known.arguments = {name: getattr(self.args, name, None) for name in (*TAKEN_ONCE, *IN_STATE)}
        known.changes = self.strategy.changes

    def _adopt_assigned_model(self) -> None:
        """Take a model that was assigned between two runs; an optimizer of the model before it is let go."""
        held = {id(p) for group in getattr(self.optimizer, "param_groups", ()) for p in group["params"]}
        if held and held.isdisjoint(map(id, self.model.parameters())):
            self.optimizer = self.lr_scheduler = None
            self.notices.tell_once("trainer.model was replaced: its optimizer and schedule are made anew")
        self._adopt_model(self.model)

    def _adopt_model(self, model: Any) -> None:
        raise NotImplementedError

    # ---- before each update -----------------------------------------------------------------------------------------

    def follow_overrides(self) -> None:
        """Before the batches of an update are looked at: go over to a method or a loss that was assigned."""
        known = self._known
        if known is None:
            return
        methods, losses = self._methods(), self._losses()
        if methods == known.methods and losses[0] is known.losses[0] and losses[1] is known.losses[1]:
            return
        known.methods, known.losses = methods, losses
        self._follow_loss()
        self.strategy.note_change()

    def follow_changes(self) -> None:
        """Before the micro-batches of an update: the model, its parameters and the optimizer as they are now."""
        known = self._known
        assert known is not None
        if self.model is not known.model:
            raise ModelError(
                f"trainer.model was assigned after step {self.state.global_step}, while the model before it is in "
                "training: its optimizer and its place in memory belong to that one. Change the model in place, put it "
                "back before the next update (as for an evaluation with averaged weights), or train() again"
            )
        self.follow_optimizer()
        self.strategy.look()
        if self.strategy.changes != known.changes:
            known.changes = self.strategy.changes
            self.model_wrapped = self.strategy.rewrap(self.model_wrapped)

    def follow_optimizer(self) -> None:
        """Go over to an optimizer or a schedule that was assigned."""
        if self.optimizer is not self.strategy.optimizer:
            self._follow_optimizer()
        if self._known is not None and self.lr_scheduler is not self._known.schedule:
            self._known.schedule = self.lr_scheduler
            self.schedule_follows_metric = steps_on_metric(self.lr_scheduler)
            self.callback_handler.context["lr_scheduler"] = self.lr_scheduler
            self.strategy.note_change()

    def follow_optimizer_late(self) -> None:
        """After gradients were clipped: loss scaling has divided by its scale for one optimizer, which then steps."""
        if not self.strategy.precision.scales:
            self.follow_optimizer()

    def _follow_optimizer(self) -> None:
        if self.optimizer is None:
            raise ModelError("trainer.optimizer was set to None during training; assign another optimizer, or leave it")
        self.optimizer = self.callback_handler.context["optimizer"] = self.strategy.change_optimizer(self.optimizer)
        scheduled = getattr(self.lr_scheduler, "optimizer", self.optimizer)
        if scheduled is not self.optimizer:
            self.notices.tell_once(
                f"trainer.optimizer was replaced after step {self.state.global_step}, and the schedule still sets the "
                "learning rates of the one before: the new one keeps its own. Assign trainer.lr_scheduler too"
            )

    def _methods(self) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in METHODS])

    def _losses(self) -> tuple[Any, ...]:
        return self.compute_loss_func, self.label_smoother

    def _follow_loss(self) -> None:
        raise NotImplementedError

    # ---- what cannot be followed ------------------------------------------------------------------------------------

    def tell_unfollowed(self) -> None:
        """Say once what was assigned during training and has no effect on it."""
        known, args = self._known, self.args
        if known is None:
            return
        changed = [name for name in known.arguments if getattr(args, name, None) != known.arguments[name]]
        once = [name for name in changed if name in TAKEN_ONCE]
        if once:
            self.notices.tell_once(f"changed during training, without effect on this run: {', '.join(once)}")
        intervals = [name for name in changed if name in IN_STATE]
        if intervals:
            self.notices.tell_once(f"changed during training, without effect: {', '.join(intervals)}; set state's")
        for name, before in zip(("train_dataset", "data_collator"), known.data, strict=True):
            if getattr(self, name) is not before:
                self.notices.tell_once(
                    f"trainer.{name} was replaced during training, which goes on with the loader it began with; change "
                    "the object itself, or train() again"
                )
