"""Creating the optimizer and the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...args.groups.optimizer import OptimizerArgs
from ...args.reading import read_dict
from ...core.user_code.overrides import adapt, is_overridden
from ...errors import ArgumentsError, ModelError
from ..part import TorchPart
from ..precision import check_fp16_weights
from .groups import Frozen, split_groups
from .optimizers.decay import decay_parameter_names
from .optimizers.table import build_optimizer, optimizer_class_and_kwargs
from .schedulers import build_scheduler, steps_on_metric


class TorchOptim(TorchPart):
    """Optimizer, schedule and learning rates."""

    _own_scheduler: bool = False
    """Whether the scheduler was created by a run, not given."""
    _early_scheduler: Any = None
    """The one that `create_scheduler` made before the run, as transformers' Trainer makes it again for each run."""
    _early_updates: int = 0
    """How many updates it is for."""
    _split_optimizer: Any = None
    """The optimizer to which param_groups was applied."""
    _frozen: Frozen | None = None

    def prepare(self) -> None:
        updates = self.run.scheduled_updates = self.run.scheduled_then or self.run.plan.max_steps
        if self._own_scheduler or self._is_made_again(updates):
            self.trainer.lr_scheduler = None
        self._own_scheduler = self.trainer.lr_scheduler is None
        self.trainer.create_optimizer_and_scheduler(num_training_steps=updates)
        self._early_scheduler = None
        self._check_is_split()
        check_fp16_weights(self.model, self.strategy.precision)
        is_split = self.trainer.optimizer is self._split_optimizer
        self.trainer.optimizer = self.strategy.setup_optimizer(self.trainer.optimizer)
        self._split_optimizer = self.trainer.optimizer if is_split else None
        self.trainer.model_wrapped = self.strategy.rewrap(self.trainer.model_wrapped)
        if self.args.speed != "off":
            self.strategy.fold_clipping(lambda: not self.callback_handler.listens("on_pre_optimizer_step"))
        self.run.schedule_follows_metric = steps_on_metric(self.trainer.lr_scheduler)
        self.callback_handler.context.update(
            optimizer=self.trainer.optimizer,
            lr_scheduler=self.trainer.lr_scheduler,
            train_dataloader=self.run.loader,
        )

    def _is_made_again(self, updates: int) -> bool:
        """Whether the scheduler was made by `create_scheduler` before the run; a message says if its length changes."""
        if self._early_scheduler is None or self.trainer.lr_scheduler is not self._early_scheduler:
            return False
        if self._early_updates != updates:
            self.notices.warn_once(
                f"the schedule of create_scheduler(num_training_steps={self._early_updates}) is made again for the "
                f"{updates} steps of this run, as transformers does; pass optimizers=(optimizer, scheduler) to keep one"
            )
        return True

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create both, unless they were given."""
        optimizer = self.trainer.create_optimizer()
        self.trainer.optimizer = optimizer if optimizer is not None else self.trainer.optimizer
        scheduler = adapt(self.trainer.create_scheduler, "optimizer")(
            num_training_steps, optimizer=self.trainer.optimizer
        )
        self.trainer.lr_scheduler = scheduler if scheduler is not None else self.trainer.lr_scheduler

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The optimizer set in the arguments, over the trainable parameters."""
        if self.trainer.optimizer is None:
            own = (
                is_overridden(self.trainer, "get_optimizer_cls_and_kwargs")
                and self.trainer.optimizer_cls_and_kwargs is None
            )
            chosen = (
                self.trainer.get_optimizer_cls_and_kwargs(self.args, self.model)
                if own
                else self.trainer.optimizer_cls_and_kwargs
            )
            self.trainer.optimizer = build_optimizer(
                model or self.model,
                self.args,
                cls_and_kwargs=chosen,
                total_updates=self.run.planned_updates,
                decay_names=self.trainer.get_decay_parameter_names(model or self.model),
                tell=self.notices.warn_once,
            )
            self._split(self.trainer.optimizer, model or self.model)
        return self.trainer.optimizer

    def _split(self, optimizer: Any, model: nn.Module) -> None:
        groups = read_dict(self.args.param_groups)
        if groups is not None:
            split_groups(optimizer, model, groups)
            self._split_optimizer = optimizer

    def freeze(self) -> None:
        """Freeze the parameters that `param_groups` names, until the run ends."""
        groups = read_dict(self.args.param_groups)
        self._frozen = None if groups is None else Frozen(self.model, groups)

    def unfreeze(self) -> None:
        """The counterpart of `freeze`."""
        if self._frozen is not None:
            self._frozen.remove()
            self._frozen = None

    @contextmanager
    def another(self) -> Iterator[Any]:
        """A context with a new optimizer of the arguments, after which the trainer has its own again."""
        before, split = self.trainer.optimizer, self._split_optimizer
        self.freeze()
        self.trainer.optimizer = None
        try:
            yield self.trainer.create_optimizer()
        finally:
            self.trainer.optimizer, self._split_optimizer = before, split
            self.unfreeze()

    def _check_is_split(self) -> None:
        """Raise if param_groups would have no effect, because the optimizer was not created by the trainer."""
        groups = read_dict(self.args.param_groups) or {}
        has_options = any(not options.get("freeze") for options in groups.values())
        if has_options and self.trainer.optimizer is not self._split_optimizer:
            raise ArgumentsError(
                "param_groups needs the optimizer of the arguments, but optimizers= was given or create_optimizer was "
                "overridden; create the groups there, or call super().create_optimizer()"
            )

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule set in the arguments."""
        if self.trainer.lr_scheduler is None:
            self.trainer.lr_scheduler = build_scheduler(
                self.args.lr_scheduler_type,
                optimizer or self.trainer.optimizer,
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                kwargs=read_dict(self.args.lr_scheduler_kwargs),
                args=self.args,
            )
            self._early_scheduler, self._early_updates = self.trainer.lr_scheduler, num_training_steps
        return self.trainer.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: OptimizerArgs, model: nn.Module | None = None) -> tuple[Any, dict[str, Any]]:
        """The class and keyword arguments of the optimizer set in the arguments."""
        return optimizer_class_and_kwargs(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The parameters that weight decay applies to: neither biases nor norms."""
        return decay_parameter_names(model)

    def get_learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._needs_optimizer().param_groups]

    def get_num_trainable_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def get_optimizer_group(self, param: Any = None) -> Any:
        """The group of a parameter, or the parameters of all groups."""
        groups = self._needs_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next(group for group in groups if any(param is each for each in group["params"]))

    def _needs_optimizer(self) -> Any:
        if self.trainer.optimizer is None:
            raise ModelError("there is no optimizer yet: call train() or create_optimizer() first")
        return self.trainer.optimizer

    def _get_learning_rate(self) -> float:
        return float(self.trainer.optimizer.param_groups[0]["lr"])
