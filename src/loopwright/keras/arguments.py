"""KerasTrainingArguments: all shared arguments, and the strategy with its replicas.

Keras and its backends are imported when `strategy` is first read.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ..args.base import BaseArguments
from ..args.field import specs
from ..args.groups.tensorflow import TensorFlowArgs
from ..args.problems import Problems
from .refusals import IDLE, Refusal, apply_refusals

POLICIES = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16", "no": None}
"""Keras's names of mixed precision."""


class Distribution(Protocol):
    """The members of a tf.distribute strategy that are used; JAX has an equivalent."""

    @property
    def num_replicas_in_sync(self) -> int: ...
    def scope(self) -> AbstractContextManager[Any]: ...


# TensorFlowArgs comes first so that output_dir stays the first positional argument.
@dataclass
class KerasTrainingArguments(TensorFlowArgs, BaseArguments):
    """All arguments of a run with Keras, on any backend."""

    trainer_name: ClassVar[str]
    """The trainer's name in messages."""
    refused: ClassVar[dict[str, Refusal]] = {}
    """Arguments that the backend refuses in addition."""

    def settle_framework(self, problems: Problems) -> None:
        apply_refusals(self, problems, trainer=self.trainer_name, more=self.refused)

    def without_effect(self) -> list[str]:
        known, found = specs(type(self)), super().without_effect()
        given = [name for name in IDLE if getattr(self, name) != known[name].default and name not in found]
        return [*found, *(name for name in given if name != "dataloader_pin_memory" or not self.use_cpu)]

    # ---- the strategy -----------------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Distribution:
        """The distribution strategy, created once or assigned; build models in its `scope()`."""
        if getattr(self, "_strategy", None) is None:
            self._strategy = self._setup_strategy()
            self.set_precision()
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: Distribution) -> None:
        self._strategy = strategy
        self.set_precision()

    def _setup_strategy(self) -> Distribution:
        raise NotImplementedError

    def set_precision(self) -> None:
        """Set Keras's global mixed precision policy, which applies to layers created afterwards."""
        policy = POLICIES[self.mixed_precision]
        if policy is not None:
            from .models import set_policy

            set_policy(policy)

    @property
    def n_replicas(self) -> int:
        """Number of replicas over all workers."""
        return int(self.strategy.num_replicas_in_sync)

    @property
    def n_gpu(self) -> int:
        """The old name of n_replicas."""
        return self.n_replicas

    @property
    def train_batch_size(self) -> int:
        """Samples of one micro-batch over all replicas."""
        return self.per_device_train_batch_size * self.n_replicas

    @property
    def eval_batch_size(self) -> int:
        """Samples of one evaluation batch over all replicas."""
        return self.per_device_eval_batch_size * self.n_replicas
