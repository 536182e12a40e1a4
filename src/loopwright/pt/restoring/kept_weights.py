"""The weights of modules while losses are tested: copied where that is affordable, otherwise checked for writes."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..devices import is_lazy

ON_HOST, ON_DEVICE = 8_000_000, 64_000_000
"""Most weights of which all are copied, on the host and on a device."""
FROZEN = 128_000_000
"""Most weights without gradients that are copied even if there are more weights: a loss may update a teacher."""


class KeptWeights:
    """The weights of modules at one moment."""

    def __init__(self, modules: list[nn.Module], *, on_host: bool = False) -> None:
        """`on_host`: copies are in the memory of the host, which takes longer."""
        parameters = [] if is_sharded(modules) else [p for p in parameters_of(modules) if _has_data(p)]
        copied = _affordable(parameters)
        self._copies = [(p, p.detach().to("cpu" if on_host else p.device, copy=True)) for p in copied]
        known = set(map(id, copied))
        self._watched = [p for p in parameters if id(p) not in known and type(p) is nn.Parameter and p.numel()]
        self._first = _first_numbers(self._watched)

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, value in self._copies:
                parameter.data.copy_(value)

    @property
    def has_changed(self) -> bool:
        """Whether weights that are not copied were written to, which is not undone."""
        pairs = zip(self._first, _first_numbers(self._watched), strict=True)
        return any(bool(((now != before) & (before == before)).any()) for before, now in pairs)  # not of NaN


def _affordable(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    on_host = any(p.device.type == "cpu" for p in parameters)
    if sum(p.numel() for p in parameters) <= (ON_HOST if on_host else ON_DEVICE):
        return parameters
    frozen = [p for p in parameters if type(p) is nn.Parameter and not p.requires_grad]
    return frozen if sum(p.numel() for p in frozen) <= FROZEN else []


def _first_numbers(parameters: list[nn.Parameter]) -> list[Tensor]:
    """The first number of each weight; a version counter would not notice a write by `.data`."""
    groups = defaultdict(list)
    for parameter in parameters:
        groups[parameter.device, parameter.dtype].append(parameter.detach()[(0,) * parameter.dim()])
    return [torch.stack(each) for each in groups.values()]


def _has_data(parameter: nn.Parameter) -> bool:
    return parameter.device.type != "meta" and not is_lazy(parameter.device) and parameter.layout is torch.strided


def parameters_of(modules: list[nn.Module]) -> list[nn.Parameter]:
    """The parameters of these modules, without those of modules in them, each once."""
    found = (parameter for module in modules for parameter in module._parameters.values())
    return [parameter for parameter in dict.fromkeys(found) if parameter is not None]


def is_sharded(modules: list[nn.Module]) -> bool:
    """Whether a rank holds parts of these modules' weights only."""
    if any(type(module).__name__.startswith("FSDP") for module in modules):
        return True
    return any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in parameters_of(modules))
