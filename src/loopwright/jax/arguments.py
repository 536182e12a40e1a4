"""JAXTrainingArguments: all shared arguments, for the JAX devices of this process."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from ..keras.arguments import KerasTrainingArguments
from ..keras.refusals import Refusal

REFUSED = {
    "xla": Refusal("JAX always compiles with XLA"),
    "torch_compile": Refusal("every step is compiled with XLA already"),
    "torch_compile_scope": Refusal("every step is compiled with XLA already", lambda value: value != "blocks"),
    "fp16": Refusal("loss scaling is not available with JAX; use bf16=True, which does not need it"),
    "tpu_name": Refusal("JAX detects the TPU of this machine automatically"),
    "tpu_zone": Refusal("JAX detects the TPU of this machine automatically"),
    "gcp_project": Refusal("JAX detects the TPU of this machine automatically"),
    "on_nonfinite": Refusal("use 'skip'", lambda value: value == "raise"),
}
"""Arguments that only JAX refuses, or refuses for another reason than TensorFlow."""


class Devices:
    """The devices of this process, with the interface of a tf.distribute strategy; models need no scope."""

    def __init__(self, devices: list[Any]) -> None:
        self.devices, self.num_replicas_in_sync = devices, len(devices)

    def scope(self) -> Any:
        return nullcontext()


@dataclass
class JAXTrainingArguments(KerasTrainingArguments):
    """All arguments of a run with Keras on JAX."""

    trainer_name: ClassVar[str] = "JAXTrainer"
    refused: ClassVar[dict[str, Refusal]] = REFUSED

    def _setup_strategy(self) -> Devices:
        import jax

        return Devices(jax.devices("cpu") if self.use_cpu else jax.devices())

    @property
    def world_size(self) -> int:
        """Always 1: JAX's multi-process runs are not supported."""
        return 1

    @property
    def process_index(self) -> int:
        """Always 0."""
        return 0

    @property
    def local_process_index(self) -> int:
        """Always 0."""
        return 0
