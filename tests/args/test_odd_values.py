"""Every argument with every odd value: accepted, or refused by one clear error, in a short time."""

from __future__ import annotations

import time
from itertools import islice, product

import pytest

from loopwright.args.field import specs
from loopwright.args.secrets import masked_text
from loopwright.errors import LoopwrightError
from loopwright.pt.arguments import Seq2SeqTrainingArguments

from .odd_values import VALUES

PAIRS = list(product(specs(Seq2SeqTrainingArguments), VALUES))


def raw_errors(pairs: list[tuple[str, str]]) -> list[str]:
    """Arguments that raise anything but an error of loopwright, when they are made, shown or written; and slow ones."""
    found = []
    for name, label in pairs:
        started = time.process_time()
        try:
            made = Seq2SeqTrainingArguments(**{"output_dir": "run", name: VALUES[label]})
            made.to_dict()
            made.to_json_string()
            made.to_sanitized_dict()
        except LoopwrightError as error:
            if len(str(error)) > 3000:
                found.append(f"{name}={label}: a message of {len(str(error))} characters")
        except Exception as error:  # what is looked for
            found.append(f"{name}={label}: {type(error).__name__}: {error}")
        if time.process_time() - started > 3:
            found.append(f"{name}={label}: {time.process_time() - started:.1f} s")
    return found


def test_there_are_many() -> None:
    assert len(PAIRS) > 5248


def test_some_odd_values() -> None:
    assert raw_errors(list(islice(PAIRS, 0, None, 13))) == []


@pytest.mark.grid
@pytest.mark.parametrize("start", range(13))
def test_all_odd_values(start: int) -> None:
    assert raw_errors(list(islice(PAIRS, start, None, 13))) == []


@pytest.mark.parametrize("text", ["x" * 200_000, "?" * 200_000, "a://" * 50_000, "&a" * 100_000])
def test_masking_takes_time_in_proportion_to_the_text(text: str) -> None:
    started = time.process_time()
    masked_text(text)
    assert time.process_time() - started < 3


def test_betas_are_floats() -> None:
    made = Seq2SeqTrainingArguments("run", adam_beta1=0, adam_beta2=0)
    assert (made.adam_beta1, made.adam_beta2) == (0, 0) and type(made.adam_beta1) is type(made.adam_beta2) is float
