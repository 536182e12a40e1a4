"""A configuration of each task with tiny models and generated data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tasks import tiny

CASES: dict[str, tuple[str, Callable[[Path], Path], dict[str, Any]]] = {
    "text-classification": ("bert", lambda folder: tiny.classified(folder / "classes.jsonl"), {}),
    "token-classification": ("bert", lambda folder: tiny.tagged(folder / "tags.jsonl"), {}),
    "causal-lm": ("gpt2", lambda folder: tiny.texts(folder / "causal.txt"), {"max_length": 32}),
    "masked-lm": ("bert", lambda folder: tiny.texts(folder / "masked.txt"), {"max_length": 32}),
    "chat": ("llama", lambda folder: tiny.conversations(folder / "chat.jsonl"), {"max_length": 100}),
    "seq2seq": ("t5", lambda folder: tiny.pairs(folder / "pairs.jsonl"), {}),
    "question-answering": (
        "bert", lambda folder: tiny.questions(folder / "questions.jsonl"), {"max_length": 40, "stride": 8}
    ),
    "image-classification": ("vit", lambda folder: tiny.images(folder / "images"), {}),
    "speech-to-text": ("wav2vec2", lambda folder: tiny.recordings(folder / "sounds"), {}),
    "table-regression": ("mlp", lambda folder: tiny.table(folder / "numbers.csv"), {}),
    "table-classification": ("mlp", lambda folder: tiny.table(folder / "classes.csv", classes=True), {}),
}  # fmt: skip
"""The kind of model, the data and further keys of the block `data`."""


def model_folder(folder: Path, kind: str) -> str:
    """The folder of a model with what it needs beside it; made once."""
    if kind == "mlp":
        return kind
    path = folder / "models" / kind
    if not path.exists():
        tiny.save_model(path, kind)
        if kind == "wav2vec2":
            tiny.save_speech_processor(path)
        elif kind != "vit":
            tiny.save_tokenizer(path, chat_template=tiny.CHATML)
    return str(path)


def write_config(folder: Path, task: str, **values: Any) -> Path:
    """The configuration of a task, three steps long."""
    kind, make, options = CASES[task]
    data = {"train": str(make(folder)), "validation_share": 0.25, **options}
    config = {
        "task": task,
        "model": model_folder(folder, kind),
        "data": data,
        "output_dir": f"runs/{task}",
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "disable_tqdm": True,
        **values,
    }
    path = folder / f"{task}.json"
    path.write_text(json.dumps(config, indent=1))
    return path
