"""Tiny models, tokenizers and data, made here and saved in a folder: nothing is downloaded."""

from __future__ import annotations

import json
import math
import random
import wave
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

WORDS = (
    "red green blue small large cat dog bird sees hears likes the a and not very yes no hello sum of is what".split()
)
TURNS = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<bos>", "<turn>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path, *, chat_template: str | None = None) -> Any:
    """A tokenizer of words and characters, with special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EOS]", *TURNS]
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=special,
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        eos_token="[EOS]",
        additional_special_tokens=TURNS,
    )
    fast.chat_template = chat_template
    fast.save_pretrained(str(folder))
    return fast


def save_model(folder: Path, kind: str, **options: Any) -> Path:
    """A model of transformers with random weights, without a tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = {
        "gpt2": lambda: transformers.GPT2Config(
            **{"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128, "vocab_size": 420, **options}
        ),
        "llama": lambda: transformers.LlamaConfig(
            **{
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "vocab_size": 420,
                "max_position_embeddings": 128,
                **options,
            }
        ),
        "bert": lambda: transformers.BertConfig(
            **{
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 32,
                "vocab_size": 420,
                "max_position_embeddings": 128,
                **options,
            }
        ),
        "t5": lambda: transformers.T5Config(
            **{
                "d_model": 16,
                "d_ff": 32,
                "d_kv": 8,
                "num_layers": 1,
                "num_heads": 2,
                "vocab_size": 420,
                "decoder_start_token_id": 0,
                "pad_token_id": 0,
                "eos_token_id": 5,
                **options,
            }
        ),
        "vit": lambda: transformers.ViTConfig(
            **{
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 32,
                "image_size": 16,
                "patch_size": 8,
                **options,
            }
        ),
        "wav2vec2": lambda: transformers.Wav2Vec2Config(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            vocab_size=12,
            conv_dim=(8, 8),
            conv_kernel=(10, 8),
            conv_stride=(5, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=2,
            feat_extract_norm="layer",
            mask_time_prob=0.0,
            **options,
        ),
    }[kind]()
    auto = {
        "gpt2": "GPT2LMHeadModel",
        "llama": "LlamaForCausalLM",
        "bert": "BertForMaskedLM",
        "t5": "T5ForConditionalGeneration",
        "vit": "ViTForImageClassification",
        "wav2vec2": "Wav2Vec2ForCTC",
    }[kind]
    getattr(transformers, auto)(config).save_pretrained(str(folder))
    return folder


def save_speech_processor(folder: Path) -> None:
    """A tokenizer of characters and a feature extractor, at 1,000 samples per second."""
    from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor

    characters = {"[PAD]": 0, "[UNK]": 1, "|": 2, **{each: index for index, each in enumerate("abcdefghi", start=3)}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(characters))
    tokenizer = Wav2Vec2CTCTokenizer(
        str(folder / "vocab.json"), unk_token="[UNK]", pad_token="[PAD]", word_delimiter_token="|"
    )
    tokenizer.save_pretrained(str(folder))
    Wav2Vec2FeatureExtractor(
        feature_size=1, sampling_rate=1000, padding_value=0.0, do_normalize=True, return_attention_mask=True
    ).save_pretrained(str(folder))


def sentence(source: random.Random, length: int = 6) -> str:
    return " ".join(source.choices(WORDS, k=length))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def classified(path: Path, count: int = 48) -> Path:
    """Texts with the class that their first word determines."""
    source = random.Random(0)
    texts = [sentence(source) for _ in range(count)]
    return write_rows(
        path, ({"text": text, "label": "colour" if text.split()[0] in WORDS[:3] else "other"} for text in texts)
    )


def tagged(path: Path, count: int = 32) -> Path:
    source = random.Random(1)
    rows = []
    for _ in range(count):
        words = sentence(source).split()
        rows.append({"tokens": words, "tags": ["B-COL" if word in WORDS[:3] else "O" for word in words]})
    return write_rows(path, rows)


def texts(path: Path, count: int = 60) -> Path:
    source = random.Random(2)
    path.write_text("".join(sentence(source, 12) + "\n" for _ in range(count)), encoding="utf-8")
    return path


def conversations(path: Path, count: int = 32) -> Path:
    source = random.Random(3)
    rows = []
    for _ in range(count):
        messages = [{"role": "system", "content": "very small"}]
        for _ in range(2):
            messages += [
                {"role": "user", "content": sentence(source, 4)},
                {"role": "assistant", "content": sentence(source, 3)},
            ]
        rows.append({"messages": messages})
    return write_rows(path, rows)


def pairs(path: Path, count: int = 24) -> Path:
    source = random.Random(4)
    rows = []
    for _ in range(count):
        text = sentence(source, 4)
        rows.append({"source": text, "target": text.split()[0]})
    return write_rows(path, rows)


def questions(path: Path, count: int = 16) -> Path:
    source = random.Random(5)
    rows = []
    for _ in range(count):
        context = sentence(source, 30)
        start = context.index(" ") + 1
        answer = context[start:].split()[0]
        answers = {"text": [answer], "answer_start": [start]}
        rows.append({"question": "what is it", "context": context, "answers": answers})
    return write_rows(path, rows)


def images(folder: Path, count: int = 12) -> Path:
    """Bright and dark images, in one folder each."""
    from PIL import Image

    source = np.random.default_rng(0)
    for name, low in (("bright", 180), ("dark", 0)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            pixels = source.integers(low, low + 70, size=(20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder


def recordings(folder: Path, count: int = 12) -> Path:
    """Sine waves of one of three pitches, whose words are letters."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(count):
        letter = "abc"[index % 3]
        samples = [int(12000 * math.sin(each * (0.1 + 0.2 * (index % 3)))) for each in range(800)]
        with wave.open(str(folder / f"{index}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(1000)
            file.writeframes(np.array(samples, dtype=np.int16).tobytes())
        rows.append({"audio": f"{index}.wav", "text": f"{letter}{letter} {letter}"})
    return write_rows(folder / "train.jsonl", rows)


def table(path: Path, count: int = 60, *, classes: bool = False) -> Path:
    source = random.Random(6)
    lines = ["a,b,target"]
    for _ in range(count):
        first, second = source.random(), source.random()
        target = ("high" if first + second > 1 else "low") if classes else f"{first + 2 * second:.6f}"
        lines.append(f"{first:.6f},{second:.6f},{target}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
