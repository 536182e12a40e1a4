"""TFTrainingArguments: all shared arguments, and the tf.distribute strategy they define.

TensorFlow is imported when `strategy` is first read.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import ArgumentsError
from ..keras.arguments import KerasTrainingArguments


@dataclass
class TFTrainingArguments(KerasTrainingArguments):
    """All arguments of a run with TensorFlow or Keras."""

    trainer_name: ClassVar[str] = "TFTrainer"

    # ---- the strategy -----------------------------------------------------------------------------------------------

    def set_precision(self) -> None:
        if self.mixed_precision != "no":
            import tensorflow as tf

            _ = tf.keras.__version__  # imports tf_keras where tf.keras is that, so that its policy is set too
        super().set_precision()

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
        """The strategy of a TPU; not tested on one."""
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
                self.tpu_name, zone=self.tpu_zone, project=self.gcp_project
            )
            tf.config.experimental_connect_to_cluster(resolver)
            tf.tpu.experimental.initialize_tpu_system(resolver)
            return tf.distribute.TPUStrategy(resolver)
        except (ValueError, RuntimeError, tf.errors.OpError) as error:
            raise RuntimeError(f"cannot connect to TPU {self.tpu_name}: {error}") from error

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
        """The index over all nodes: TF_CONFIG does not contain which workers share a node."""
        return self.process_index


def _cluster() -> dict[str, Any]:
    text = os.environ.get("TF_CONFIG", "")
    try:
        return dict(json.loads(text)) if text else {}
    except ValueError as error:
        raise ArgumentsError(f"the environment variable TF_CONFIG is not valid JSON: {error}") from None
