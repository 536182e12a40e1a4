"""Positions of a model: how many it has, and whether they depend on the longest of a batch or the offset in a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from .samples import OddSamples, Samples

LIMITS = ("max_target_positions", "max_position_embeddings", "n_positions")
SOURCE_LIMITS = ("max_source_positions", "max_encoder_position_embeddings")
FIRST_POSITION = 4
"""Rows at the beginning of a table of positions that may be left out: some models count from the padding token on."""
PARTS = ("decoder", "text_config", "generator", "encoder")
"""Parts of a configuration that may have positions of their own; the last one is that of the source."""


def most_positions(model: nn.Module, *, of_sources: bool = False) -> int | None:
    """The longest target that configuration and position tables of the decoder allow; None if it is unknown.

    With `of_sources` those of the encoder count too.
    """
    config = getattr(model, "config", None)
    parts = [config, *(getattr(config, name, None) for name in (PARTS if of_sources else PARTS[:-1]))]
    named = [getattr(part, name, None) for part in parts for name in (*LIMITS, *(SOURCE_LIMITS * of_sources))]
    found = [*named, *_tables(model, of_sources)]
    return min((value for value in found if isinstance(value, int) and value > 0), default=None)


def has_position_bias(model: nn.Module) -> bool:
    """Whether attention has a bias for distances between tokens, as T5's."""
    return any(hasattr(module, "relative_attention_bias") for module in model.modules())


def keeps_scores(model: nn.Module) -> bool:
    """Whether attention may keep a score, or a bias, for every two tokens of a sample."""
    used = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return has_position_bias(model) or used in (None, "eager")


def takes_any_length(model: nn.Module) -> bool:
    """Whether distances between tokens are the only positions, as for T5; MPNet has a table of positions as well."""
    return has_position_bias(model) and next(_tables(model, of_sources=True), None) is None


def _tables(model: nn.Module, of_sources: bool) -> Iterator[int]:
    """The positions of the tables in the decoder, or of all of them if no module is named so."""
    tables = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and "pos" in name.rpartition(".")[2]
    }
    decoding = {name: table for name, table in tables.items() if "decoder" in name.split(".")}
    chosen = tables if of_sources else decoding or tables
    return (len(table.weight) - FIRST_POSITION for table in chosen.values())


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
