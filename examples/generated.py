"""Small generated datasets and a tokenizer for them, so that the examples need no download."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

GOOD, BAD = ("great", "lovely", "fine", "superb"), ("awful", "dull", "weak", "boring")
THINGS = ("film", "book", "meal", "song", "hotel", "play")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SHAPES = ("square", "circle", "stripes")
RATE = 4000


def reviews(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Sentences about things; label 1 if the word about the thing is a good one."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        label = draw.randrange(2)
        filler = " ".join(draw.choices(("really", "very", "quite", "so"), k=draw.randrange(6)))
        word = draw.choice((BAD, GOOD)[label])
        rows.append({"text": f"the {draw.choice(THINGS)} was {filler} {word}", "label": label})
    return rows


def numbers(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Numbers in words and in digits: `three one` and `3 1`."""
    draw = random.Random(seed)
    rows = [[draw.randrange(10) for _ in range(draw.randint(1, 3))] for _ in range(count)]
    return [{"source": " ".join(DIGITS[each] for each in row), "target": " ".join(map(str, row))} for row in rows]


def dialogues(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations in which the assistant names the number after the user's."""
    draw = random.Random(seed)
    numbers = [draw.randrange(9) for _ in range(count)]
    return [
        {
            "messages": [
                {"role": "user", "content": f"what comes after {DIGITS[each]}"},
                {"role": "assistant", "content": DIGITS[each + 1]},
            ]
        }
        for each in numbers
    ]


def images(count: int, seed: int = 0, size: int = 16) -> list[dict[str, Any]]:
    """Grey images with noise; the label is the index of the shape in SHAPES."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size]
    rows = []
    for label in draw.integers(len(SHAPES), size=count):
        a, b, r = *draw.uniform(5, size - 5, 2), draw.uniform(3, 5)
        inside = (np.maximum(abs(x - a), abs(y - b)) < r, np.hypot(x - a, y - b) < r, (x + int(a)) % 4 < 2)[label]
        pixels = inside.astype(np.float32) + draw.normal(0, 0.2, (size, size)).astype(np.float32)
        rows.append({"pixel_values": pixels[None], "labels": int(label)})
    return rows


def tones(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Beeps of 0.08 s with pauses between them; each of the letters a to d has its own pitch."""
    draw = random.Random(seed)
    time, pause = np.arange(RATE * 2 // 25) / RATE, np.zeros(RATE // 50)
    rows = []
    for _ in range(count):
        text = "".join(draw.choices("abcd", k=draw.randint(2, 5)))
        waves = [np.sin(2 * np.pi * (300 + 300 * "abcd".index(letter)) * time) for letter in text]
        audio = np.concatenate([part for wave in waves for part in (wave, pause)])
        rows.append({"audio": audio.astype(np.float32), "text": text})
    return rows


def word_tokenizer(texts: Iterable[str], *, chat: bool = False) -> Any:
    """A tokenizer of whole words, trained on these texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "</s>", "<mask>", "<user>", "<assistant>"]
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.train_from_iterator(_lines(texts), trainers.WordLevelTrainer(special_tokens=special))
    if not chat:
        words.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 2)]
        )
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>", "mask_token": "<mask>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **names)
    if chat:
        tokenizer.chat_template = (
            "{% for message in messages %}<{{ message.role }}> {{ message.content }} </s> {% endfor %}"
            "{% if add_generation_prompt %}<assistant> {% endif %}"
        )
    return tokenizer


def _lines(texts: Iterable[str]) -> Iterator[str]:
    yield from texts
