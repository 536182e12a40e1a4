"""The special tokens of a model follow its tokenizer when training begins, as in transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loopwright.pt.model.special_tokens import align_special_tokens

utils = pytest.importorskip("transformers.trainer_utils")

TOKENIZERS = [(2, None, 0), (5, 1, 0), (5, 6, 7), (None, None, None), (3, None, None)]
CONFIGS = [
    ((2, 1, 0), None),
    ((2, None, None), (2, 1, 0)),
    (([2, 3], 1, 0), ([2, 3], None, None)),
    ((2, 1, 0), (4, 1, 9)),
]


def holder(ids: Any) -> Any:
    return None if ids is None else SimpleNamespace(eos_token_id=ids[0], bos_token_id=ids[1], pad_token_id=ids[2])


def model_of(config: Any, generation: Any) -> Any:
    text = holder(config)
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text), generation_config=holder(generation))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("configs", CONFIGS)
def test_special_tokens_are_those_transformers_would_set(tokenizer: Any, configs: Any) -> None:
    ours, theirs, told = model_of(*configs), model_of(*configs), []
    before = vars(ours.config.get_text_config()).copy()
    align_special_tokens(ours, holder(tokenizer), told.append)
    utils.align_special_tokens(theirs, holder(tokenizer))
    assert ours.config.get_text_config() == theirs.config.get_text_config()
    assert ours.generation_config == theirs.generation_config
    assert bool(told) or vars(ours.config.get_text_config()) == before
    told.clear()
    align_special_tokens(ours, holder(tokenizer), told.append)
    assert not told, "nothing is left to align"


@pytest.mark.parametrize("processor", [None, object(), "tokenizer"])
def test_other_processors_and_models_are_left_alone(processor: Any) -> None:
    told: list[str] = []
    align_special_tokens(model_of((2, 1, 0), None), processor, told.append)
    align_special_tokens(object(), holder((5, 6, 7)), told.append)
    assert told == []
