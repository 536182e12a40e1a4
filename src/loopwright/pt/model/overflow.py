"""DebugUnderflowOverflow: smallest and largest magnitudes of every module's weights, inputs and outputs.

The report has the format of transformers' class of the same name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ModelError

INDENT = " " * 18
HEADER = f"{'abs min':8} {'abs max':8} metadata"


class DebugUnderflowOverflow:
    """Stops at the first infinite or NaN value of a forward pass, and prints the frames that led to it.

    A frame is one call of a module: its name, and the range of its weights, inputs and outputs. The last
    `max_frames_to_save` frames are kept. The forward passes in `trace_batch_nums`, counted from 0, are printed in full,
    without the check. With `abort_after_batch_num`, the forward pass after that number stops training.
    """

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int = 21,
        trace_batch_nums: Collection[int] | None = None,
        abort_after_batch_num: int | None = None,
        *,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model = model
        self.trace_batch_nums = trace_batch_nums or ()
        self.abort_after_batch_num = abort_after_batch_num
        self.frames: deque[str] = deque(maxlen=max_frames_to_save)
        self.batch_number = 0
        self.detected_overflow = False
        self._is_paused = is_paused
        """Whether the current forward pass is not one of training, and is left out."""
        self._starts_batch = True
        self._handles = [
            module.register_forward_hook(self._hook(name), with_kwargs=True) for name, module in model.named_modules()
        ]

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, name: str) -> Callable[..., None]:
        def after_forward(module: nn.Module, given: Any, named: dict[str, Any], output: Any) -> None:
            if not self._is_paused():
                self._take(name, module, given, named, output)

        return after_forward

    def _take(self, name: str, module: nn.Module, given: Any, named: dict[str, Any], output: Any) -> None:
        batch = self.batch_number
        is_traced = batch in self.trace_batch_nums
        frame = self._frame(name, module, given, named, output)
        if is_traced:
            print(frame)
        else:
            self.frames.append(frame)
        self._starts_batch = module is self.model
        self.batch_number += self._starts_batch
        if self.detected_overflow and not is_traced:
            self._report(batch)
            raise ModelError(
                f"debug: {name or type(module).__name__} has an infinite or NaN value in forward pass {batch}. The "
                "frames printed above show where the values became too large; see also on_nonfinite"
            )
        if self.abort_after_batch_num is not None and self.batch_number > self.abort_after_batch_num:
            raise ModelError(
                f"debug: stopped after {self.batch_number} forward passes, because "
                f"abort_after_batch_num={self.abort_after_batch_num}"
            )

    def _report(self, batch: int) -> None:
        print(f"\nDetected inf/nan during batch_number={batch}\nLast {len(self.frames)} forward frames:\n{HEADER}")
        print("\n".join(self.frames), end="\n\n\n")
        self.frames.clear()

    def _frame(self, name: str, module: nn.Module, given: Any, named: dict[str, Any], output: Any) -> str:
        self.detected_overflow = False
        lines = [f"\n\n{INDENT}*** Starting batch number={self.batch_number} ***", HEADER] if self._starts_batch else []
        lines.append(f"{INDENT}{name} {type(module).__name__}")
        for what, values in (("", dict(module.named_parameters(recurse=False))), ("input", given), ("input", named)):
            for place, value in _leaves(values, what):
                lines.append(self._line(place, value))
        lines += [self._line(place, value) for place, value in _leaves(output, "output")]
        return "\n".join(lines)

    def _line(self, place: str, value: Any) -> str:
        if not isinstance(value, Tensor):
            return f"{'None' if value is None else 'not a tensor':>17} {place}"
        found = absolute_range(value)
        if found is None:
            return f"{'no values':>17} {place}"
        smallest, largest, has_nan, has_inf = found
        for is_bad, what in ((has_nan, "nans"), (has_inf, "infs")):
            if is_bad:
                self.detected_overflow = True
                print(f"{place} has {what}")
        return f"{smallest:8.2e} {largest:8.2e} {place}"


@torch.no_grad()
def absolute_range(value: Tensor) -> tuple[float, float, bool, bool] | None:
    """The smallest and largest magnitude, whether there is a NaN and an infinity; None for a tensor without values."""
    value = value.to_local() if hasattr(value, "to_local") else value
    if not value.numel() or value.is_meta or value.is_sparse:
        return None
    if value.dtype is torch.bool or (value.is_floating_point() and value.dtype.itemsize == 1):
        value = value.float()
    size = value.abs()
    return float(size.min()), float(size.max()), bool(size.isnan().any()), bool(size.isinf().any())


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The values inside tuples, lists and mappings, with their places, such as output[0][1]."""
    if isinstance(value, (tuple, list)):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{place}[{index}]")
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _leaves(each, f"{place}[{name}]" if place else str(name))
    else:
        yield place, value
