"""Temporarily replacing a model's attention, through transformers' interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from . import varlen as document_attention
from .dispatch import HAS, VARLEN_TAKES, attend, attend_as_told, attend_twice, varlen_options
from .mask_patterns import mask_of_documents

NAME = "loopwright"
"""The name under which our attention is registered with transformers."""
INSTEAD_OF: dict[str, tuple[str, Callable[..., Any]]] = {
    "sdpa": (NAME, attend),
    "eager": (f"{NAME}_twice", attend_twice),
    "flash_attention_2": (f"{NAME}_told", attend_as_told),
    "flash_attention_3": (f"{NAME}_told", attend_as_told),
}
"""Replacements for transformers' attention implementations: the name to register, which must not contain one of the
original names because models search for these, and the function."""


class AttentionSwitch:
    """Temporarily replaces a model's attention."""

    def __init__(
        self,
        model: nn.Module,
        instead_of: dict[str, tuple[str, Callable[..., Any]]] = INSTEAD_OF,
        mask: Callable[..., Any] = mask_of_documents,
    ) -> None:
        self._instead_of = instead_of
        self._configs = _configs_with_attention(model)
        self.reason = self._register(mask)

    def _register(self, mask: Callable[..., Any]) -> str | None:
        """Register our attention with transformers; returns why it cannot be used, or None."""
        if not self._configs:
            return "the model does not look up its attention implementation by name"
        used = [config._attn_implementation for config in self._configs]
        others = [name for name in used if name not in self._instead_of]
        if others:
            return f"the model's attention implementation is {others[0]!r}"
        try:
            from transformers import AttentionInterface, AttentionMaskInterface
        except ImportError:
            return "transformers has no attention interface"
        VARLEN_TAKES.update(varlen_options())
        if torch.cuda.is_available():
            HAS["kernel"] = use_newest_flash() is None and document_attention.has_kernel()
        for name, attention in self._instead_of.values():
            AttentionInterface.register(name, attention)
            AttentionMaskInterface.register(name, mask)
        return None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace the attention that the model uses now."""
        were = [config._attn_implementation for config in self._configs]
        for config, name in zip(self._configs, were, strict=True):
            if name in self._instead_of:
                config._attn_implementation_internal = self._instead_of[name][0]
        try:
            yield
        finally:
            for config, name in zip(self._configs, were, strict=True):
                config._attn_implementation_internal = name


def _configs_with_attention(model: nn.Module) -> list[Any]:
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return list(found.values())


def use_newest_flash() -> str | None:
    """Activate FlashAttention 4 or 3 in torch if one is installed; returns its name."""
    try:
        from torch.nn.attention import activate_flash_attention_impl
    except ImportError:
        return None
    from importlib.util import find_spec

    for name, package in (("FA4", "flash_attn.cute"), ("FA3", "flash_attn_interface")):
        try:
            if find_spec(package) is not None:
                activate_flash_attention_impl(name)
                return name
        except Exception:  # installed, but not for this GPU or this torch
            continue
    return None
