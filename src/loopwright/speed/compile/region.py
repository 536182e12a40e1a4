"""Compiling a model's repeated blocks, or a model without any as a whole, for a few shapes of their inputs.

The compiled code draws the random numbers that the model draws as it is written (inductor's `fallback_random`), so that
dropout is the same and the two can be compared in training as it is. Inputs of other shapes, evaluation and predictions
run as written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...notices import Notices
from ..attention.needless_masks import without_needless_masks
from ..cuda_graphs.recorder import shape_key
from .blocks import Compiled, CompiledCall, have_equal_numbers, repeated_blocks
from .preparation import await_imports

BLOCKS, MODEL = "blocks", "model"
"""What is compiled: each repeated block, or the whole model with its loss."""
ITEMS = "num_items_in_batch"


# ---- what keeps transformers' models from being one region ----------------------------------------------------------


@contextmanager
def traced_without_masks() -> Iterator[None]:
    """Have transformers make no masks that are not needed, and ignore its log messages."""
    _ignore_logging()
    with without_needless_masks():
        yield


def _ignore_logging() -> None:
    """Log messages in forward would end the region; they were shown when it ran as written."""
    import torch._dynamo

    ignored = getattr(torch._dynamo.config, "ignore_logger_methods", None)
    if isinstance(ignored, set):
        names = ("warning_once", "info_once", "warning_advice", "warning", "info", "debug")
        ignored.update(method for name in names if (method := getattr(logging.Logger, name, None)) is not None)


# ---- the region -----------------------------------------------------------------------------------------------------


class Region:
    """Compiled modules in place of the modules as written, while they are installed."""

    def __init__(
        self, model: nn.Module, *, notices: Notices, backend: Any = None, is_deterministic: bool = False
    ) -> None:
        await_imports()
        blocks = repeated_blocks(model)
        self.scope, modules = (BLOCKS, blocks) if blocks else (MODEL, [model])
        names = {module: name for name, module in model.named_modules()}
        self.session = Compiled(notices)
        self.session.begin(len(modules), constant_numbers=not blocks or have_equal_numbers(blocks))
        options = None if backend is not None else _options(is_deterministic)
        kind = BlockCall if blocks else RegionCall
        for module in modules:
            module.compile(backend=backend or "inductor", fullgraph=not blocks, dynamic=False, options=options)
            self.session.calls.append(kind(module, names[module] or "the model", self.session))
            module._compiled_call_impl = None

    @property
    def calls(self) -> list[RegionCall]:
        return [call for call in self.session.calls if isinstance(call, RegionCall)]

    @property
    def times(self) -> int:
        """Calls of compiled modules so far."""
        return sum(call.times for call in self.calls)

    def install(self) -> None:
        self._put(is_on=True)

    def _put(self, *, is_on: bool) -> None:
        for call in self.calls:
            is_left = call.name in self.session.fell_back
            call.module._compiled_call_impl = call if is_on and not is_left else None

    def finish(self) -> None:
        """Run the modules as written from now on, and restore torch's settings."""
        self._put(is_on=False)
        self.session.finish()

    @contextmanager
    def installed(self, is_on: bool = True) -> Iterator[None]:
        """Use the compiled modules, or the modules as written, within the context."""
        before = [(call.module, call.module._compiled_call_impl) for call in self.calls]
        self._put(is_on=is_on)
        try:
            yield
        finally:
            for module, call in before:
                module._compiled_call_impl = call

    @contextmanager
    def open(self) -> Iterator[None]:
        """Compile for every shape that occurs within the context; errors of the compiler are raised."""
        for call in self.calls:
            call.is_open = True
        try:
            yield
        finally:
            for call in self.calls:
                call.is_open = False


class RegionCall(CompiledCall):
    """Calls a compiled module in training, for the shapes it was compiled for; otherwise the module itself."""

    _around: Callable[[], AbstractContextManager[None]] = staticmethod(traced_without_masks)

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
        key = self._key(args, kwargs)
        if key not in self.shapes and not (self.is_open and key is not None):
            self.others += 1
            return module._call_impl(*args, **kwargs)
        if ITEMS in kwargs:
            kwargs = self._without_number(kwargs)
        with self._around():
            # A region that is being proved raises what the compiler raises.
            result = self._compiled(*args, **kwargs) if self.is_open else super().__call__(*args, **kwargs)
        self.shapes.add(key)
        self.times += 1
        return result

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = {name: value for name, value in kwargs.items() if name != ITEMS}
        return shape_key({**{str(place): value for place, value in enumerate(args)}, **named})

    def _without_number(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The number of items as a tensor: as a plain number it would be part of the code, compiled for each value."""
        items = kwargs[ITEMS]
        if type(items) is not int and type(items) is not float:
            return kwargs
        if self._items is None or self._items[0] != items:
            device = next(self.module.parameters()).device
            # Filled on the device: copying a number there would wait for it.
            self._items = (items, torch.full((), items, device=device))
        return {**kwargs, ITEMS: self._items[1]}


class BlockCall(RegionCall):
    """Calls a compiled block; its shape is that of its first tensor, which determines the sizes of all others."""

    _around = staticmethod(nullcontext)

    def _without_number(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """No number of items: models pass it on to blocks, which compute no loss (the proof shows it)."""
        return {name: value for name, value in kwargs.items() if name != ITEMS}

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                return (value.shape, value.dtype)
        return None


def _options(is_deterministic: bool) -> dict[str, Any]:
    import torch._inductor.config as inductor

    options: dict[str, Any] = {"fallback_random": True}
    if is_deterministic and hasattr(inductor, "deterministic"):
        options["deterministic"] = True  # no kernel is chosen by timing it
    return options
