"""Models whose positions depend on more than the sample: on the longest of a batch, or the offset in a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .samples import OddSamples, Samples


def longest_alike(model: nn.Module) -> int | None:
    """Longest batch for which each sample's positions are independent of the others; None for any length.

    Rotary embeddings that scale with the longest sequence of a batch (LongRoPE, dynamic NTK) do so beyond a certain
    length; samples of longer batches cannot be regrouped.
    """
    limits = [limit for module in model.modules() for limit in _limits_of(module)]
    return min(limits, default=None)


def check_lengths(samples: Samples, limit: int | None) -> None:
    """Raise `OddSamples` if a batch is longer than `limit`."""
    if limit is not None and max(axis.width for axis in samples.axes.values()) > limit:
        raise OddSamples(
            f"beyond {limit:,} tokens the model's rotary embedding depends on the longest sequence of a batch"
        )


def _limits_of(rope: nn.Module) -> list[int]:
    kinds, parameters = getattr(rope, "rope_type", None), _parameters_of(rope)
    if isinstance(kinds, str):
        found = [_limit(rope, kinds, parameters)]
    elif isinstance(kinds, Mapping):
        found = [_limit(rope, kind, parameters.get(layer) or parameters) for layer, kind in kinds.items()]
    else:
        return []
    return [each for each in found if each is not None]


def _parameters_of(rope: nn.Module) -> Mapping[str, Any]:
    found = getattr(getattr(rope, "config", None), "rope_parameters", None)
    return found if isinstance(found, Mapping) else {}


def _limit(rope: nn.Module, kind: Any, parameters: Mapping[str, Any]) -> int | None:
    if not isinstance(kind, str) or not ("dynamic" in kind or kind == "longrope"):
        return None
    whole = getattr(rope, "original_max_seq_len", None)
    if kind == "longrope":
        return int(parameters.get("original_max_position_embeddings") or whole or 0)
    # At exactly its original length, a dynamic embedding keeps the scaling of the previous batch.
    return int(whole or 0) - 1


def counts_by_row(model: nn.Module) -> str | None:
    """Why a model depends on the offset in a row, regardless of position_ids; None if no dependence is known."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", False):
            return "the model's attention temperature depends on the position in a row"
    return None
