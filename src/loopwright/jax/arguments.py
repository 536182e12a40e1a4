"""JAXTrainingArguments: the arguments of TFTrainer, for the devices JAX has in this process."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from ..args.problems import Problems
from ..tf.arguments import TFTrainingArguments

REFUSED = {
    "xla": "JAX always compiles with XLA",
    "fp16": "there is no loss scaling here yet; bf16=True needs none",
    "tpu_name": "JAX finds the TPU of this machine by itself",
    "tpu_zone": "JAX finds the TPU of this machine by itself",
    "gcp_project": "JAX finds the TPU of this machine by itself",
}


class Devices:
    """The devices of this process, in the shape of a tf.distribute strategy: models need no scope."""

    def __init__(self, devices: list[Any]) -> None:
        self.devices, self.num_replicas_in_sync = devices, len(devices)

    def scope(self) -> Any:
        return nullcontext()


@dataclass
class JAXTrainingArguments(TFTrainingArguments):
    """All arguments of a run with Keras on JAX."""

    def settle_framework(self, problems: Problems) -> None:
        super().settle_framework(problems)
        for name, why in REFUSED.items():
            if getattr(self, name):
                problems.add(f"{name}={getattr(self, name)!r}: not with JAXTrainer: {why}", name)
        if self.on_nonfinite == "raise":
            problems.add("on_nonfinite='raise': not with JAXTrainer: use 'skip'", "on_nonfinite")

    def _setup_strategy(self) -> Devices:
        import jax

        return Devices(jax.devices("cpu") if self.use_cpu else jax.devices())

    @property
    def world_size(self) -> int:
        """One process: JAX's multi-process runs are not supported."""
        return 1
