"""Replacements for transformers' `optimization_tf`: optimizers, a schedule and a gradient accumulator."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from ..keras.models import variable_name


class WarmUp(tf.keras.optimizers.schedules.LearningRateSchedule):
    """Linear warmup to a learning rate, then another schedule."""

    def __init__(
        self,
        initial_learning_rate: float,
        decay_schedule_fn: Callable[..., Any],
        warmup_steps: int,
        power: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.initial_learning_rate, self.decay_schedule_fn = initial_learning_rate, decay_schedule_fn
        self.warmup_steps, self.power, self.name = warmup_steps, power, name

    def __call__(self, step: Any) -> Any:
        with tf.name_scope(self.name or "WarmUp"):
            done = tf.cast(step, tf.float32)
            warmup = tf.cast(self.warmup_steps, tf.float32)
            rising = self.initial_learning_rate * tf.math.pow(done / tf.maximum(warmup, 1.0), self.power)
            after = tf.cast(self.decay_schedule_fn(step - self.warmup_steps), tf.float32)
            return tf.where(done < warmup, rising, after)

    def get_config(self) -> dict[str, Any]:
        return {
            "initial_learning_rate": self.initial_learning_rate,
            "decay_schedule_fn": self.decay_schedule_fn,
            "warmup_steps": self.warmup_steps,
            "power": self.power,
            "name": self.name,
        }


class AdamWeightDecay(tf.keras.optimizers.Adam):
    """Adam with decoupled weight decay on the variables selected by name patterns."""

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        weight_decay_rate: float = 0.0,
        include_in_weight_decay: list[str] | None = None,
        exclude_from_weight_decay: list[str] | None = None,
        name: str = "AdamWeightDecay",
        **kwargs: Any,
    ) -> None:
        kwargs.pop("weight_decay", None)  # added by Keras's get_config
        super().__init__(
            learning_rate=learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, amsgrad=amsgrad,
            weight_decay=weight_decay_rate or None, name=name, **kwargs,
        )  # fmt: skip
        self.weight_decay_rate = weight_decay_rate
        self._include, self._exclude = include_in_weight_decay, exclude_from_weight_decay
        self._names_by_key: dict[Any, str] = {}

    def build(self, variables: Any, *args: Any) -> None:
        variables = list(variables)
        self._names_by_key = {self._var_key(variable): variable_name(variable) for variable in variables}
        super().build(variables, *args)

    def _use_weight_decay(self, variable: Any) -> bool:
        name = self._names_by_key.get(self._var_key(variable), variable.name)
        if self.weight_decay_rate == 0:
            return False
        if any(re.search(pattern, name) for pattern in self._include or ()):
            return True
        return not any(re.search(pattern, name) for pattern in self._exclude or ())

    def get_config(self) -> dict[str, Any]:
        own = {
            "weight_decay_rate": self.weight_decay_rate,
            "include_in_weight_decay": self._include,
            "exclude_from_weight_decay": self._exclude,
        }
        return {**super().get_config(), **own}


def create_optimizer(
    init_lr: float,
    num_train_steps: int,
    num_warmup_steps: int,
    min_lr_ratio: float = 0.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.999,
    adam_epsilon: float = 1e-8,
    adam_clipnorm: float | None = None,
    adam_global_clipnorm: float | None = None,
    weight_decay_rate: float = 0.0,
    power: float = 1.0,
    include_in_weight_decay: list[str] | None = None,
) -> tuple[Any, Any]:
    """Adam, with weight decay if requested, and its schedule: warmup, then polynomial decay."""
    schedule: Any = tf.keras.optimizers.schedules.PolynomialDecay(
        initial_learning_rate=init_lr,
        decay_steps=max(num_train_steps - num_warmup_steps, 1),
        end_learning_rate=init_lr * min_lr_ratio,
        power=power,
    )
    if num_warmup_steps:
        schedule = WarmUp(init_lr, schedule, num_warmup_steps)
    options: dict[str, Any] = {
        "learning_rate": schedule, "beta_1": adam_beta1, "beta_2": adam_beta2, "epsilon": adam_epsilon,
        "clipnorm": adam_clipnorm, "global_clipnorm": adam_global_clipnorm,
    }  # fmt: skip
    if weight_decay_rate <= 0:
        return tf.keras.optimizers.Adam(**options), schedule
    spared = ["LayerNorm", "layer_norm", "layer_normalization", "bias"]
    decay: dict[str, Any] = {"weight_decay_rate": weight_decay_rate, "exclude_from_weight_decay": spared}
    return AdamWeightDecay(**options, **decay, include_in_weight_decay=include_in_weight_decay), schedule


class GradientAccumulator:
    """Accumulates gradients over calls, separately on every replica."""

    def __init__(self) -> None:
        self._gradients: list[Any] = []
        self._steps: Any = None

    @property
    def step(self) -> Any:
        """Number of calls since the last reset."""
        if self._steps is None:
            self._steps = _local_variable(tf.constant(0, tf.int64))
        return self._steps.value() if callable(self._steps.value) else self._steps.value

    @property
    def gradients(self) -> list[Any]:
        """The sums so far."""
        if not self._gradients:
            raise ValueError("the accumulator is empty; call it with gradients first")
        return [None if each is None else tf.convert_to_tensor(each) for each in self._gradients]

    def __call__(self, gradients: Iterable[Any]) -> None:
        """Add these gradients to the sums."""
        gradients = list(gradients)
        _ = self.step
        if not self._gradients:
            zeros = [None if each is None else tf.zeros_like(each) for each in gradients]
            self._gradients = [None if each is None else _local_variable(each) for each in zeros]
        if len(gradients) != len(self._gradients):
            raise ValueError(f"expected {len(self._gradients)} gradients, got {len(gradients)}")
        for total, gradient in zip(self._gradients, gradients, strict=True):
            if total is not None and gradient is not None:
                total.assign_add(tf.convert_to_tensor(gradient))
        self._steps.assign_add(1)

    def reset(self) -> None:
        """Set the sums to zero, on this replica."""
        if self._steps is not None:
            self._steps.assign(0)
        for total in self._gradients:
            if total is not None:
                total.assign(tf.zeros_like(total))


def _local_variable(value: Any) -> Any:
    """A variable with a separate value on every replica."""
    return tf.Variable(
        value, trainable=False, synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )  # fmt: skip
