"""Aligning the special tokens of a model's configuration with those of its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAMES = ("eos_token_id", "bos_token_id", "pad_token_id")


def align_special_tokens(model: Any, processing_class: Any, tell: Callable[[str], None]) -> None:
    """Set the special tokens of the model's configurations to those the tokenizer defines, and report the changes.

    A tokenizer may have a new end-of-sequence token, as in chat models; without this, generation would not stop at it.
    The generation configuration may hold several end-of-sequence tokens: the new one is added, as the first.
    """
    config = getattr(model, "config", None)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if config is None or not callable(getattr(config, "get_text_config", None)) or not _is_tokenizer(tokenizer):
        return
    generation = getattr(model, "generation_config", None)
    holders = [config.get_text_config(), *([] if generation is None else [generation])]
    changed = {}
    for name in NAMES:
        wanted = getattr(tokenizer, name, None)
        # A token that the tokenizer does not define is not one that the model should lose.
        if wanted is not None and any(wanted not in _listed(getattr(each, name, None)) for each in holders):
            changed[name] = wanted
            for number, each in enumerate(holders):
                _set(each, name, wanted, keeps_others=name == "eos_token_id", is_generation=number == 1)
    if changed:
        listed = ", ".join(f"{name}={value}" for name, value in changed.items())
        tell(f"the model's special tokens were set to those of the tokenizer: {listed}")


def _set(holder: Any, name: str, wanted: int, *, keeps_others: bool, is_generation: bool) -> None:
    found = getattr(holder, name, None)
    if keeps_others and (is_generation or isinstance(found, list)):  # each of them ends generation
        setattr(holder, name, [wanted, *(each for each in _listed(found) if each != wanted)])
    else:
        setattr(holder, name, wanted)


def _listed(ids: Any) -> list[Any]:
    if isinstance(ids, (list, tuple)):
        return list(ids)
    return [] if ids is None else [ids]


def _is_tokenizer(value: Any) -> bool:
    return hasattr(value, "pad_token_id") and hasattr(value, "eos_token_id")
