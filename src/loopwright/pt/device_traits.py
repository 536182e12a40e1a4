"""What is known beforehand about kinds of devices, by the type of the live device; everything else is asked of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Kind:
    """How a kind of device wants to be used."""

    static_shapes: bool = False
    """Whether each new shape costs a compilation."""
    compile_backend: str | None = None
    """The backend of torch.compile that belongs to it."""
    strategy: str | None = None
    """`module:class` of the strategy that carries out updates on it, if that is a special one."""
    processes: str | None = None
    """The same, for several processes that each have such a device; None where torch's own ones are used."""
    install: str = ""
    """What its vendor says to run."""


NEURON_INDEX = "https://pip.repos.neuron.amazonaws.com"

KINDS: dict[str, Kind] = {
    "neuron": Kind(
        static_shapes=True,
        compile_backend="neuron",
        install=(
            f"pip install torch-neuronx --extra-index-url {NEURON_INDEX} (Trn2 and Trn3; the package of that name on "
            "PyPI is empty)"
        ),
    ),
    "tpu": Kind(static_shapes=True, compile_backend="tpu", install="pip install torch-tpu libtpu"),
    "xla": Kind(
        static_shapes=True,
        compile_backend="openxla",
        strategy="loopwright.xla.strategy:XlaDevice",
        processes="loopwright.xla.processes:XlaProcesses",
        install=(
            "pip install 'torch==2.9.*' 'torch_xla[tpu]==2.9.*', and set PJRT_DEVICE=TPU; on Trn1, torch-neuronx for "
            f"the same torch from {NEURON_INDEX}, and PJRT_DEVICE=NEURON"
        ),
    ),
}  # fmt: skip


def kind_of(device: torch.device) -> Kind:
    """What is known about the device's kind; nothing special for most."""
    return KINDS.get(device.type, Kind())
