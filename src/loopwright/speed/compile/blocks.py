"""Compiling a model's repeated blocks in place: names and masks are unchanged, and a block that fails runs eagerly.

Torch caches compiled code per function, not per module, so all blocks of a class share it: sixteen equal blocks need
one compilation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...notices import Notices
from .cache import save_compile_cache
from .preparation import await_imports
from .recompiles import RecompileCounter


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks a model repeats: members of lists of two or more modules of one class, outermost lists only."""
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or module in inside or len(module) < 2:
            continue
        if len({type(child) for child in module}) == 1:
            blocks.extend(block for block in dict.fromkeys(module) if block not in inside)
            inside.update(child for block in module for child in block.modules())
    return blocks


def compile_blocks(
    model: nn.Module,
    *,
    backend: str | Any | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    scope: str = "blocks",
    max_recompiles: int | None = None,
    short_rows: bool = False,
    notices: Notices,
) -> Compiled:
    """Compile each repeated block in place; the whole model if `scope` is "model" or it has no repeated blocks.

    `dynamic=True` compiles once for all shapes, False once for each; None starts with the first shape and switches to
    all shapes at the second one. `short_rows`: rows are both below and above a few thousand tokens, where inductor
    would otherwise choose the fusion by their length, and compile again.
    """
    await_imports()
    modules = repeated_blocks(model) if scope == "blocks" else []
    if not modules and scope == "blocks":
        notices.warn_once("torch_compile: the model has no repeated blocks, so it is compiled whole")
    names = {module: name for name, module in model.named_modules()}
    session = Compiled(notices, max_recompiles=max_recompiles)
    session.begin(len(modules) or 1, short_rows=short_rows, constant_numbers=have_equal_numbers(modules))
    for module in modules or [model]:
        module.compile(backend=backend or "inductor", mode=mode, dynamic=dynamic)
        call = CompiledCall(module, names[module] or "the model", session)
        session.calls.append(call)
        module._compiled_call_impl = call
    return session


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Disable the compiled forms of a model and its parts: a few samples of other shapes would each be compiled."""
    compiled = [(module, module._compiled_call_impl) for module in model.modules() if module._compiled_call_impl]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


def have_equal_numbers(blocks: list[nn.Module]) -> bool:
    """Whether all blocks of a class have the same float attributes, such as scales and rates."""
    numbers: dict[type, list[float]] = {}
    for block in blocks:
        mine = [value for part in block.modules() for value in vars(part).values() if type(value) is float]
        if numbers.setdefault(type(block), mine) != mine:
            return False
    return bool(blocks)


class Compiled:
    """The compiled parts of a model: recompilations, fallbacks, and torch's settings meanwhile."""

    def __init__(self, notices: Notices, *, max_recompiles: int | None = None) -> None:
        self.calls: list[CompiledCall] = []
        self.fell_back: dict[str, str] = {}
        """Reasons by the name of the block."""
        self.counter = RecompileCounter(notices, allowed=max_recompiles)
        self._notices = notices
        self._before: list[tuple[Any, str, Any]] = []
        self._kept = 0
        self.cache_key: str | None = None
        """The key under which compiled code is kept for later runs; None if it is not."""

    def begin(self, blocks: int, *, short_rows: bool = False, constant_numbers: bool = False) -> None:
        """Count compilations, and change torch's settings so that there are few."""
        self.counter.start()
        more = [*(_one_fusion() if short_rows else []), *(_constant_numbers() if constant_numbers else [])]
        for config, name, value in [*_settings(blocks), *more]:
            if hasattr(config, name):
                self._before.append((config, name, getattr(config, name)))
                setattr(config, name, value)

    def keep(self) -> None:
        """Save the compile cache for later runs, if there were compilations since the last time."""
        if self.cache_key is not None and self.counter.compilations != self._kept:
            self._kept = self.counter.compilations
            save_compile_cache(self.cache_key)

    def finish(self) -> None:
        """Stop counting and restore torch's settings; compiled blocks stay compiled."""
        self.counter.stop()
        while self._before:
            setattr(*self._before.pop())

    def figures(self) -> dict[str, Any]:
        """The counts for a report."""
        return {"blocks": len(self.calls), "fell_back": dict(self.fell_back), **self.counter.figures()}

    def fall_back(self, failed: CompiledCall, error: Exception) -> None:
        """Run a block eagerly from now on and warn; after two failures for one reason, also the rest of its class."""
        reason = _first_line(error)
        self._leave(failed, reason)
        kind = type(failed.module)
        alike = [call for call in self.calls if type(call.module) is kind]
        failures = [call for call in alike if self.fell_back.get(call.name) == reason]
        rest = [call for call in alike if call.name not in self.fell_back]
        others = ""
        if len(failures) > 1 and rest and not any(call.has_run for call in rest):
            for call in rest:
                self._leave(call, reason)
            others = f", and the {len(rest)} others of its class,"
        self._notices.warn_once(
            f"torch_compile: {failed.name} ({kind.__name__}){others} could not be compiled and runs eagerly: {reason}"
        )

    def _leave(self, call: CompiledCall, reason: str) -> None:
        call.module._compiled_call_impl = None
        self.fell_back[call.name] = reason


class CompiledCall:
    """Calls a module's compiled form, or the module itself if it cannot be compiled."""

    def __init__(self, module: nn.Module, name: str, session: Compiled) -> None:
        import torch._dynamo.exc as errors

        self.module, self.name = module, name
        self.has_run = False
        self._compiled = module._compiled_call_impl
        self._session, self._counter = session, session.counter
        # Failures of dynamo, a backend or inductor are of these classes; errors of the model are not.
        self._failure = (errors.TorchDynamoException, *_limits_of(errors))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self._compiled(*args, **kwargs)
        except self._failure as error:
            # An error of the model found during compilation is raised again here, with the model's own traceback.
            result = self.module._call_impl(*args, **kwargs)
            self._session.fall_back(self, error)
            return result
        self.has_run = True
        if self._counter.pending:
            self._counter.tell()
        return result


def _limits_of(errors: Any) -> list[type[Exception]]:
    """The error of a region that was compiled too often, if this torch has one."""
    return [errors.FailOnRecompileLimitHit] if hasattr(errors, "FailOnRecompileLimitHit") else []


def _settings(blocks: int) -> list[tuple[Any, str, Any]]:
    """Torch's settings while blocks are compiled; those that this torch does not have are skipped."""
    import torch._dynamo
    import torch._functorch.config
    import torch.fx.experimental._config

    dynamo, functorch = torch._dynamo.config, torch._functorch.config
    # Blocks that differ in a number (a scale per layer) are variants of one function: allow all of them, in training
    # and in evaluation, and a few shapes.
    variants = max(dynamo.recompile_limit, 16 + 3 * blocks)
    return [
        (dynamo, "recompile_limit", variants),
        (dynamo, "accumulated_recompile_limit", max(dynamo.accumulated_recompile_limit, 4 * variants)),
        # Compile the backward pass in the forward, where the block can still fall back if that fails.
        (functorch, "force_non_lazy_backward_lowering", True),
        # Recompute what only matmuls of the backward pass read (a normed input, a gated product): this saves a quarter
        # of the activations of a Llama block for a hundredth of its time.
        (functorch, "ban_recompute_materialized_backward", False),
        # Do not treat sizes that happen to be equal (64 tokens, 64 per head) as the same size, which would cost another
        # compilation when they differ.
        (torch.fx.experimental._config, "use_duck_shape", False),
    ]


def _one_fusion() -> list[tuple[Any, str, Any]]:
    """Settings that make fusion independent of the length of a row."""
    import torch._inductor.config

    return [(torch._inductor.config.triton, "mix_order_reduction", False)]


def _constant_numbers() -> list[tuple[Any, str, Any]]:
    """Settings that make a block's floats constants: as variables, they can make torch trace a block twice."""
    import torch._dynamo

    return [(torch._dynamo.config, "specialize_float", True)]


def _first_line(error: Exception) -> str:
    """The type of an error and its first line; for a backend's failure, those of the original error."""
    error = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"[:300]
