"""Liger's kernels in a model: replacements that can be installed and removed, and their proof."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ..args.field import nearest
from ..errors import ArgumentsError, MissingPackage
from .proof.prober import Candidate, Proof, ProofRefused
from .proof.prover import Prover
from .training_setup import TrainingSetup

LIBRARIES = ("torch", "builtins", "typing", "abc", "collections", "enum", "functools", "loopwright")
"""Packages whose classes Liger does not change."""
_ABSENT = object()


def check_liger_installed() -> None:
    """Raise unless the package can be imported."""
    if find_spec("liger_kernel") is None:
        raise MissingPackage("liger-kernel", needed_for="use_liger_kernel=True", install="liger-kernel")


def why_without_liger(model: nn.Module) -> str | None:
    """Why Liger has no kernels for a model, or None."""
    from liger_kernel.transformers import monkey_patch

    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind is None:
        return f"{type(model).__name__} is not a model of transformers: it has no config.model_type"
    if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"the installed version of Liger has no kernels for the model type {kind!r}"
    return None


class LigerKernels:
    """What Liger replaces in a model, its classes and their Python modules."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        from liger_kernel.transformers import monkey_patch

        apply = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
        known = [name for name in inspect.signature(apply).parameters if name != "model"]
        for name in options:
            if name not in known:
                raise ArgumentsError(
                    f"liger_kernel_config: {name!r} is not an option for the model type {model.config.model_type!r}"
                    f"{nearest(name, known)}; use {', '.join(known)}"
                )
        holders = list(_holders(model))
        before = [dict(_entries(each)) for each in holders]
        self._changes: list[tuple[Any, str, Any, Any]] = []
        try:
            apply(model=model, **options)
        finally:
            for holder, old in zip(holders, before, strict=True):
                now = dict(_entries(holder))
                for name in [*now, *(name for name in old if name not in now)]:
                    was, value = old.get(name, _ABSENT), now.get(name, _ABSENT)
                    if was is not value:
                        self._changes.append((holder, name, was, value))
            self.remove()

    def apply(self) -> None:
        """Install the replacements."""
        for holder, name, _, value in self._changes:
            _set(holder, name, value)

    def remove(self) -> None:
        """Restore what was replaced."""
        for holder, name, was, _ in self._changes:
            _set(holder, name, was)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A context with the replacements."""
        self.apply()
        try:
            yield
        finally:
            self.remove()

    def attributes(self, model: nn.Module) -> set[str]:
        """Names of the attributes of modules that are replaced, with the paths of the modules."""
        paths = {id(module): path for path, module in model.named_modules()}
        return {f"{paths[id(holder)]}.{name}" for holder, name, _, _ in self._changes if id(holder) in paths}


def prove_liger(kernels: LigerKernels, setup: TrainingSetup, batches: list[Any]) -> Proof:
    """Compare loss and gradients of a micro-batch with and without the kernels, in train mode without dropout."""
    prover = Prover(setup)
    candidate = Candidate.on_batches("Liger's kernels", kernels.installed)
    try:
        reference = prover.update(None, batches[:1])
    except ProofRefused as refusal:
        return Proof(candidate.name).refuse(str(refusal))
    return prover.prove_update(candidate, reference)


def _holders(model: nn.Module) -> Iterator[Any]:
    """Objects whose attributes Liger may replace."""
    classes: dict[type, None] = {}
    for module in model.modules():
        yield module
        yield module._modules
        classes.update(dict.fromkeys(type(module).__mro__))
    own = [cls for cls in classes if cls.__module__.split(".")[0] not in LIBRARIES]
    yield from own
    places = {cls.__module__ for cls in own} | {"transformers.loss.loss_utils"}
    yield from (sys.modules[name] for name in sorted(places) if name in sys.modules)
    yield torch.nn.functional


def _entries(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else vars(holder)


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, (dict, nn.Module)):  # as an entry: torch's modules register what is assigned to them
        entries = _entries(holder)
        if value is _ABSENT:
            entries.pop(name, None)
        else:
            entries[name] = value
    elif value is _ABSENT:
        if name in vars(holder):
            delattr(holder, name)
    else:
        setattr(holder, name, value)
