"""Arguments that only TensorFlow uses."""

from __future__ import annotations

from dataclasses import dataclass

from ..field import Group, arg, positive


@dataclass
class TensorFlowArgs(Group):
    """Arguments that only TensorFlow uses."""

    title = "TensorFlow"

    tpu_name: str | None = arg(None, "The TPU to train on, by name; 'local' for the one on this machine.")
    tpu_zone: str | None = arg(None, "The zone of that TPU.")
    gcp_project: str | None = arg(None, "The project of that TPU.")
    poly_power: float = arg(1.0, "Power of the polynomial learning rate decay; 1 is linear.", check=positive)
    xla: bool = arg(False, "Compile forward and backward with XLA; batches keep one shape.")
