"""A report on an update with a non-finite loss or gradients, made by running it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.evaluation.predictions import map_nested
from ...core.logs.incident import as_json_number
from ..checkpoint.full_tensor import whole_of
from ..checkpoint.tensors import write_tensors


def examine(folder: Path, model: nn.Module, batches: list[Any], run: Callable[[Any], Any]) -> dict[str, Any]:
    """Write the micro-batches and run them again: losses, gradient norms, the first module with a bad output."""
    write_tensors(folder / "batch.safetensors", _named_tensors(batches))
    losses: list[Any] = []
    with first_bad_output(model) as found:
        for batch in batches:
            losses.append(as_json_number(run(batch)))
    norms = {
        name: as_json_number(whole_of(parameter.grad).norm())
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    bad = [name for name, norm in norms.items() if isinstance(norm, str)]
    first = found[0] if found else None
    return {"losses": losses, "first_bad_module": first, "gradient_norms": norms, "bad_gradients": bad}


@contextmanager
def first_bad_output(model: nn.Module) -> Iterator[list[str]]:
    """Collects, in execution order, the modules whose output was not finite."""
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not _finite(output):
                found.append(name or "(the model itself)")

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _finite(value: Any) -> bool:
    """Whether every floating tensor in nested outputs is finite."""
    bad: list[bool] = []

    def look(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            bad.append(not bool(torch.isfinite(leaf).all()))
        return leaf

    map_nested(look, dict(value) if isinstance(value, Mapping) else value)
    return not any(bad)


def bad_weights(model: nn.Module) -> list[str]:
    """Names of weights with non-finite values."""
    return [name for name, value in model.state_dict().items() if not _finite(whole_of(value))]


def _named_tensors(batches: list[Any]) -> dict[str, Tensor]:
    named = {}
    for index, batch in enumerate(batches):
        values = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, list) else []
        named.update({f"{index}/{name}": value for name, value in values if isinstance(value, Tensor)})
    return named
