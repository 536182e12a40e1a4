"""Training on AWS Trainium with the whole Trainer API; the same script also runs on other devices."""

from __future__ import annotations

from ..pt.device_traits import Kind, register
from ..xla import NEURON_INDEX

register(
    "neuron",
    Kind(
        static_shapes=True,
        compile_backend="neuron",
        install=f"pip install torch-neuronx --extra-index-url {NEURON_INDEX} (Trn2 and Trn3; the package of that name "
        "on PyPI is an empty one)",
    ),
)
