"""Methods that create the optimizer and the schedule."""

from __future__ import annotations

from typing import Any

from ...errors import ModelError
from ..models import compute_dtypes, trainable
from ..part import KerasPart
from .optimizers import build_optimizer, number, scales_loss
from .schedules import KerasRate, PlateauRate, build_rate, is_keras_schedule


class KerasOptim(KerasPart):
    """Optimizer, schedule and learning rates."""

    _base_rate: float = 0.0
    _rated: Any = None
    """The optimizer from which the base learning rate was read."""

    def prepare(self) -> None:
        if self.trainer.lr_scheduler is not None and getattr(self, "_own_scheduler", False):
            self.trainer.lr_scheduler = None
        self._own_scheduler = self.trainer.lr_scheduler is None
        with self.strategy.scope():
            self.trainer.create_optimizer_and_scheduler(num_training_steps=self.run.plan.max_steps)
        self._tell_unused_options()
        if self.args.fp16 or "float16" in compute_dtypes(self.model):
            self.trainer.optimizer = self._with_loss_scale(self.trainer.optimizer)
        self.trainer.optimizer = self.strategy.setup_optimizer(self.trainer.optimizer)
        self.run.schedule_follows_metric = isinstance(self.trainer.lr_scheduler, PlateauRate)
        self.callback_handler.context.update(
            optimizer=self.trainer.optimizer, lr_scheduler=self.trainer.lr_scheduler, train_dataloader=self.run.source
        )

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create both, unless they were given; may be overridden to set `self.optimizer` and `self.lr_scheduler`."""
        if self.trainer.optimizer is None:
            self.trainer.optimizer = build_optimizer(self.args, trainable(self.model), self.internals.info.family)
            self._base_rate, self._rated = self.args.learning_rate, self.trainer.optimizer
        inner = getattr(self.trainer.optimizer, "inner_optimizer", self.trainer.optimizer)
        own = getattr(inner, "_learning_rate", None)
        if self.trainer.lr_scheduler is not None and not hasattr(self.trainer.lr_scheduler, "state_dict"):
            own = self.trainer.lr_scheduler  # a Keras schedule is assigned to the optimizer
            if not is_keras_schedule(inner._learning_rate):
                self.trainer.optimizer.learning_rate = own
            self.trainer.lr_scheduler = None
        if self.trainer.lr_scheduler is None:
            self.trainer.lr_scheduler = self._make_scheduler(own, num_training_steps)

    def _make_scheduler(self, own: Any, num_training_steps: int) -> Any:
        if is_keras_schedule(own):
            return KerasRate(self.strategy, own, int(number(self.trainer.optimizer.iterations)))
        if self._rated is not self.trainer.optimizer:  # later values were set by the schedule
            self._base_rate, self._rated = number(self.trainer.optimizer.learning_rate), self.trainer.optimizer
        return build_rate(self.args, self.strategy, self._base_rate, num_training_steps)

    def _tell_unused_options(self) -> None:
        """Warn about an optimizer and an averaging that only `fit` would use."""
        compiled, used = getattr(self.model, "optimizer", None), self.trainer.optimizer
        default = self.internals.info.family.optimizers.RMSprop
        if compiled is not None and compiled is not used and not _is_default(compiled, default):
            self.notices.warn_once(
                f"the model was compiled with {type(compiled).__name__}, but {type(used).__name__} is used, as optim "
                "says; pass optimizers=(model.optimizer, None) to train with the compiled one"
            )
        if getattr(getattr(used, "inner_optimizer", used), "use_ema", False):
            self.notices.warn_once(
                "the optimizer has use_ema=True, but its averages are not written into the weights at the end, as fit "
                "does; call trainer.optimizer.finalize_variable_values(trainer.model.trainable_variables) after train()"
            )

    def _with_loss_scale(self, optimizer: Any) -> Any:
        if scales_loss(optimizer):
            return optimizer
        with self.strategy.scope():
            if self.internals.info.legacy:
                return self.internals.info.family.mixed_precision.LossScaleOptimizer(optimizer)
            return self.internals.info.family.optimizers.LossScaleOptimizer(optimizer)

    def get_learning_rates(self) -> list[float]:
        if self.trainer.optimizer is None:
            raise ModelError("there is no optimizer yet; call train() first")
        return [self.trainer._get_learning_rate()]

    def _get_learning_rate(self) -> float:
        return float(self.trainer.lr_scheduler.get_last_lr()[0])


def _is_default(optimizer: Any, default: Any) -> bool:
    """Whether this is the optimizer of a model that was compiled without one."""
    if type(optimizer) is not default:
        return False
    return {**optimizer.get_config(), "name": None} == {**default().get_config(), "name": None}
