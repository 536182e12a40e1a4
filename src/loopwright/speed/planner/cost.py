"""The cost of an update, from its operators: operations and bytes by number format, and launches of the host.

The operators of one micro-batch are counted, not timed: two runs of the same script get the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..measure.peaks import device_peak

HOST_SECONDS = {"cpu": 0.0, "cuda": 1.2e-5}
"""Seconds of the host for one operator in eager mode, forward or backward."""
LEAST_SECONDS = {"cpu": 1e-6, "cuda": 3e-6}
"""Seconds of the device for the smallest kernel."""
BYTES_PER_SECOND = {"cpu": 1e10, "cuda": 2.5e12}
PEAKS = {"cpu": {"half": 5e10, "single": 5e10}, "cuda": {"half": 5e14, "single": 5e13}}
"""Operations per second of matrix products, for devices whose data sheet is not in the table."""
SUSTAINED = 0.55
"""Share of the data sheet's peak that matrix products of ordinary sizes reach."""
FUSED_BYTES = 0.4
"""Share of the bytes of element-wise operators that is still read and written once they are fused."""
FUSED_LAUNCHES = 0.8
"""Share of the launches that remains."""
LAUNCH_SHARE = 0.3
"""Launching time, as a share of computing, from which graphs are captured: hosts differ in speed by a factor of two or
more, and also load data."""
COMPILE_SECONDS, COMPILE_SECONDS_PER_OPERATOR = 5.0, 0.025
"""Seconds for compiling: at least, and for each operator of forward and backward."""
WARM = 0.3
"""Share of that if the compiled code is in the cache: tracing remains."""
MARGIN = 1.25
"""How many times the cost of compiling the rest of the run must save: an estimate may be wrong."""
_FREE = frozenset({
    "view", "_unsafe_view", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "detach",
    "as_strided", "split", "alias", "reshape", "t", "unbind", "lift_fresh", "empty", "empty_like", "new_empty",
    "device",
})  # fmt: skip
"""Operators that launch nothing."""


@dataclass
class Work:
    """The operators of one micro-batch, forward and backward."""

    launches: int = 0
    device_seconds: float = 0.0
    """Estimated seconds of all kernels in eager mode."""
    product_seconds: float = 0.0
    """Of them, those of matrix products, convolutions and attention, which compiling does not change."""
    plain_bytes: float = 0.0
    """Bytes that all other operators read and write."""

    def launching(self, kind: str, *, compiled: bool) -> float:
        """Estimated seconds of the host."""
        return self.launches * _of(HOST_SECONDS, kind) * (FUSED_LAUNCHES if compiled else 1.0)

    def computing(self, kind: str, *, compiled: bool) -> float:
        """Estimated seconds of the device."""
        fused = self.product_seconds + FUSED_BYTES * self.plain_bytes / _of(BYTES_PER_SECOND, kind)
        return fused if compiled else self.device_seconds

    def seconds(self, kind: str, *, compiled: bool) -> float:
        """Estimated seconds of host and device, which work at the same time."""
        return max(self.launching(kind, compiled=compiled), self.computing(kind, compiled=compiled))

    def saved_by_graph(self, kind: str, *, compiled: bool) -> float:
        """Estimated seconds saved if nothing is launched; none if the device is busy for much longer than the host."""
        launching, computing = (each(kind, compiled=compiled) for each in (self.launching, self.computing))
        return max(launching - computing, launching / 2) if launching >= LAUNCH_SHARE * computing else 0.0

    def compiling(self, *, warm: bool, repeats: int = 1) -> float:
        """Estimated seconds for compiling it, or one of `repeats` equal parts of it."""
        seconds = COMPILE_SECONDS + COMPILE_SECONDS_PER_OPERATOR * self.launches / repeats
        return seconds * (WARM if warm else 1.0)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def pays_to_compile(work: Work, *, times: float, kind: str, warm: bool, repeats: int = 1) -> bool:
    """Whether `times` further micro-batches save more than compiling costs."""
    saved = (work.seconds(kind, compiled=False) - work.seconds(kind, compiled=True)) * times
    return saved >= MARGIN * work.compiling(warm=warm, repeats=repeats)


def count_work(run: Callable[[], Any], device: torch.device) -> Work:
    """Count the operators of `run`: forward and backward of a micro-batch."""
    counter = _Counter(device)
    with counter:
        run()
    return counter.work


class _Counter(TorchDispatchMode):
    """Adds up the operators that reach a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.work, self._kind = Work(), device.type
        rates = PEAKS.get(device.type, PEAKS["cuda"])
        self._rates = {"half": _known(device, "bf16") or rates["half"], "single": _known(device, "fp32")
                       or rates["single"]}  # fmt: skip
        if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
            self._rates["single"] = _known(device, "tf32") or rates["single"]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet.__name__ not in _FREE:
            self._add(packet, args, kwargs or {}, result)
        return result

    def _add(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)] + outputs
        moved = sum(each.numel() * each.element_size() for each in tensors)
        moving = max(moved / _of(BYTES_PER_SECOND, self._kind), _of(LEAST_SECONDS, self._kind))
        self.work.launches += 1
        operations = _operations(packet, args, kwargs, result)
        if operations is None:
            self.work.plain_bytes += moved
            self.work.device_seconds += moving
            return
        half = bool(outputs) and outputs[0].element_size() <= 2
        spent = max(operations / self._rates["half" if half else "single"], moving)
        self.work.device_seconds += spent
        self.work.product_seconds += spent


def _operations(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float | None:
    """The operations of a matrix product, convolution or attention; None for others."""
    count = flop_registry.get(packet)
    try:
        return None if count is None else float(count(*args, **kwargs, out_val=result))
    except Exception:  # torch's formula does not support these arguments
        return None


def _known(device: torch.device, number_format: str) -> float | None:
    peak = device_peak(device, number_format)
    return None if peak is None or math.isnan(peak) else SUSTAINED * peak


def _of(table: dict[str, float], kind: str) -> float:
    return table.get(kind, table["cuda"])
