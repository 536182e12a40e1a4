"""TFTrainingArguments: all shared arguments, and the strategy TensorFlow makes of them.

TensorFlow is imported when the strategy is asked for, not before.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, ClassVar

from ..args.base import BaseArguments
from ..args.field import specs
from ..args.names import ParallelMode
from ..args.problems import Problems
from ..args.tensorflow import TensorFlowArgs
from ..errors import ArgumentsError
from .refusals import IDLE, apply_refusals

POLICIES = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16", "no": None}
"""Keras's names of mixed precision."""


# TensorFlowArgs comes first so that output_dir stays the first positional argument.
@dataclass
class TFTrainingArguments(TensorFlowArgs, BaseArguments):
    """All arguments of a run with TensorFlow or Keras."""

    framework: ClassVar[str] = "tf"

    def settle_framework(self, problems: Problems) -> None:
        apply_refusals(self, problems)

    def without_effect(self) -> list[str]:
        known, found = specs(type(self)), super().without_effect()
        given = [name for name in IDLE if getattr(self, name) != known[name].default and name not in found]
        return [*found, *(name for name in given if name != "dataloader_pin_memory" or not self.use_cpu)]

    # ---- the strategy -----------------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Any:
        """Where TensorFlow computes; models should be built in its `scope()`. Found once, or assigned."""
        if getattr(self, "_strategy", None) is None:
            self._strategy = self._setup_strategy()
            self.set_precision()
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: Any) -> None:
        self._strategy = strategy
        self.set_precision()

    def set_precision(self) -> None:
        """Make mixed precision Keras's global policy: it holds for the layers made from here on."""
        policy = POLICIES[self.mixed_precision]
        if policy is not None:
            from .models import set_policy

            set_policy(policy)

    def _setup_strategy(self) -> Any:
        import tensorflow as tf

        if self.tpu_name:
            return self._tpu_strategy(tf)
        if self.world_size > 1:
            options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=float(self.ddp_timeout))
            return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        gpus = [] if self.use_cpu else tf.config.list_logical_devices("GPU")
        if len(gpus) > 1:
            return tf.distribute.MirroredStrategy()
        return tf.distribute.OneDeviceStrategy("/gpu:0" if gpus else "/cpu:0")

    def _tpu_strategy(self, tf: Any) -> Any:
        """The strategy of a TPU; a written path that no machine here can run."""
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
                self.tpu_name, zone=self.tpu_zone, project=self.gcp_project
            )
            tf.config.experimental_connect_to_cluster(resolver)
            tf.tpu.experimental.initialize_tpu_system(resolver)
            return tf.distribute.TPUStrategy(resolver)
        except (ValueError, RuntimeError, tf.errors.OpError) as error:
            raise RuntimeError(f"Couldn't connect to TPU {self.tpu_name}! {error}") from error

    @property
    def n_replicas(self) -> int:
        """Devices that compute together, over all workers."""
        return int(self.strategy.num_replicas_in_sync)

    @property
    def n_gpu(self) -> int:
        """What n_replicas was called before."""
        return self.n_replicas

    @property
    def train_batch_size(self) -> int:
        """Samples of one micro-batch over all replicas."""
        return self.per_device_train_batch_size * self.n_replicas

    @property
    def eval_batch_size(self) -> int:
        """Samples of one evaluation batch over all replicas."""
        return self.per_device_eval_batch_size * self.n_replicas

    # ---- processes --------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Worker processes in TF_CONFIG."""
        return max(len(_cluster().get("cluster", {}).get("worker", [])), 1)

    @property
    def process_index(self) -> int:
        """This worker's index in TF_CONFIG."""
        return int(_cluster().get("task", {}).get("index", 0)) if self.world_size > 1 else 0

    @property
    def local_process_index(self) -> int:
        """Workers are counted over all machines: TF_CONFIG does not say which ones share one."""
        return self.process_index

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether TF_CONFIG names several workers."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL


def _cluster() -> dict[str, Any]:
    text = os.environ.get("TF_CONFIG", "")
    try:
        return dict(json.loads(text)) if text else {}
    except ValueError as error:
        raise ArgumentsError(f"the environment variable TF_CONFIG is not JSON: {error}") from None
