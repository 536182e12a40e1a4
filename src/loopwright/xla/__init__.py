"""Lazy torch_xla: operations are recorded and run as one compiled graph at the end of a step."""

from __future__ import annotations

from typing import Any

from ..pt.device_traits import Kind, register

NEURON_INDEX = "https://pip.repos.neuron.amazonaws.com"


def _runtime() -> Any:
    from . import runtime

    return runtime


def _metrics() -> str:
    return str(_runtime().metrics_report())


def _strategy(*given: Any) -> Any:
    from .strategy import XlaDevice

    return XlaDevice.of(*given)


def _processes(*given: Any) -> Any:
    from .processes import XlaProcesses

    return XlaProcesses.of(*given)


register(
    "xla",
    Kind(
        static_shapes=True,
        compile_backend="openxla",
        strategy=_strategy,
        processes=_processes,
        runtime=_runtime,
        metrics=_metrics,
        install="pip install 'torch==2.9.*' 'torch_xla[tpu]==2.9.*', and PJRT_DEVICE=TPU in the environment; on Trn1 "
        f"torch-neuronx of the same torch from {NEURON_INDEX}, and PJRT_DEVICE=NEURON",
    ),
)
register("tpu", Kind(static_shapes=True, compile_backend="tpu", install="pip install torch-tpu libtpu"))
