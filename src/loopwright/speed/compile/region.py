"""Compiling a model, or all of it but its output layer, as one region for a few shapes of its inputs.

The region draws the random numbers that the model draws as it is written (inductor's `fallback_random`), so that
dropout is the same and the two can be compared in training as it is. Inputs of other shapes, evaluation and
predictions run as written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...notices import Notices
from ..cuda_graphs.recorder import shape_key
from .blocks import Compiled, CompiledCall, repeated_blocks

MODEL, TRUNK = "model", "trunk"
"""What a region holds: the whole model with its loss, or all of it but the output layer."""
ITEMS = "num_items_in_batch"


def module_of(model: nn.Module, region: str, head: nn.Module | None) -> nn.Module | None:
    """The module that a region compiles; None if the model has no part without its output layer."""
    if region == MODEL:
        return model
    blocks, place = repeated_blocks(model), model
    while blocks and head is not None and any(module is head for module in place.modules()):
        inside = [child for child in place.children() if set(blocks) <= set(child.modules())]
        if not inside:
            return None
        place = inside[0]
    return None if place is model else place


class Region:
    """A compiled module in place of the module as written, while it is installed."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        *,
        notices: Notices,
        backend: Any = None,
        is_deterministic: bool = False,
    ) -> None:
        self.module, self.name = module, name
        self.session = Compiled(notices)
        self.session.begin(1, constant_numbers=True)
        options = None if backend is not None else _options(is_deterministic)
        module.compile(backend=backend or "inductor", fullgraph=True, dynamic=False, options=options)
        self.call = RegionCall(module, name, self.session)
        self.session.calls.append(self.call)
        module._compiled_call_impl = None

    def install(self) -> None:
        self.module._compiled_call_impl = self.call

    def remove(self) -> None:
        if self.module._compiled_call_impl is self.call:
            self.module._compiled_call_impl = None

    def finish(self) -> None:
        """Remove the region and restore torch's settings."""
        self.remove()
        self.session.finish()

    @contextmanager
    def installed(self, is_on: bool = True) -> Iterator[None]:
        """Use the region, or the module as written, within the context."""
        before, self.module._compiled_call_impl = self.module._compiled_call_impl, self.call if is_on else None
        try:
            yield
        finally:
            self.module._compiled_call_impl = before

    @contextmanager
    def open(self) -> Iterator[None]:
        """Compile for every shape that occurs within the context; errors of the compiler are raised."""
        self.call.is_open = True
        try:
            yield
        finally:
            self.call.is_open = False


class RegionCall(CompiledCall):
    """Calls the compiled module in training, for the shapes it was compiled for; otherwise the module itself."""

    def __init__(self, module: nn.Module, name: str, session: Compiled) -> None:
        super().__init__(module, name, session)
        self.shapes: set[Any] = set()
        self.is_open = False
        self.times = self.others = 0
        """Calls of the compiled module, and calls in training that had another shape."""
        self._items: tuple[Any, Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if not module.training or not torch.is_grad_enabled():
            return module._call_impl(*args, **kwargs)
        kwargs = self._with_counted(kwargs)
        key = shape_key({**{str(place): value for place, value in enumerate(args)}, **kwargs})
        if key not in self.shapes:
            if not self.is_open or key is None:
                self.others += 1
                return module._call_impl(*args, **kwargs)
        with causal_without_mask():
            # A region that is being proved raises what the compiler raises.
            result = self._compiled(*args, **kwargs) if self.is_open else super().__call__(*args, **kwargs)
        self.shapes.add(key)
        self.times += 1
        return result

    def _with_counted(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The number of items as a tensor: as a plain number it would be part of the code, compiled for each value."""
        items = kwargs.get(ITEMS)
        if type(items) is not int and type(items) is not float:
            return kwargs
        if self._items is None or self._items[0] != items:
            device = next(self.module.parameters()).device
            # Filled on the device: copying a number there would wait for it.
            self._items = (items, torch.full((), items, device=device))
        return {**kwargs, ITEMS: self._items[1]}


def _options(is_deterministic: bool) -> dict[str, Any]:
    import torch._inductor.config as inductor

    options: dict[str, Any] = {"fallback_random": True}
    if is_deterministic and hasattr(inductor, "deterministic"):
        options["deterministic"] = True  # no kernel is chosen by timing it
    return options


# ---- what keeps transformers' models from being one region ----------------------------------------------------------


@contextmanager
def causal_without_mask() -> Iterator[None]:
    """Have transformers make no mask where plain causal attention is meant, and ignore its log messages.

    While it is traced it would build a mask of ones and zeros, and lose the fast attention kernels.
    """
    import sys

    masks = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "_ignore_causal_mask_sdpa", None)
    if masks is None or original is None:
        yield
        return
    _ignore_logging()
    masks._ignore_causal_mask_sdpa = _without_mask(original)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        masks._ignore_causal_mask_sdpa = original  # type: ignore[attr-defined]


_CHANGED: dict[Any, Any] = {}


def _without_mask(original: Any) -> Any:
    """One function for each original, because compiled code checks that it is the same."""
    if original not in _CHANGED:

        def may_ignore(padding_mask: Any, q_length: Any, kv_length: Any, *rest: Any, **named: Any) -> bool:
            offsets = (*rest[:-1], named.get("q_offset", 0), named.get("kv_offset", 0))
            window = named.get("local_attention_size", rest[-1] if rest else None)
            is_plain = padding_mask is None and q_length == kv_length and all(each == 0 for each in offsets)
            if is_plain and (window is None or window > kv_length):
                return True
            return bool(original(padding_mask, q_length, kv_length, *rest, **named))

        _CHANGED[original] = may_ignore
    return _CHANGED[original]


def _ignore_logging() -> None:
    """Log messages in forward would end the region; they were shown when it ran as written."""
    import torch._dynamo

    ignored = getattr(torch._dynamo.config, "ignore_logger_methods", None)
    if isinstance(ignored, set):
        names = ("warning_once", "info_once", "warning_advice", "warning", "info", "debug")
        ignored.update(method for name in names if (method := getattr(logging.Logger, name, None)) is not None)
