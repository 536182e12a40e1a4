"""Speech to text with a CTC model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..args.field import Group, arg, positive
from ..errors import DataError
from .declaration import Materials, Task
from .fields import DataFields
from .readers import Rows, need_text, read_splits
from .request import Request


@dataclass
class SpeechColumns(Group):
    """Columns of recordings."""

    title = "data"

    audio_column: str = arg("audio", "The column with the path of a sound file, relative to the data file.")
    text_column: str = arg("text", "The column with the words.")
    max_seconds: float = arg(20.0, "Recordings that are longer are left out.", check=positive)


@dataclass
class SpeechData(SpeechColumns, DataFields):
    """The block `data` of speech to text."""


def build(request: Request) -> Materials:
    """Model and data of speech to text."""
    from .models import load_model, load_processor, load_tokenizer

    tokenizer, extractor = load_tokenizer(request), load_processor(request, "AutoFeatureExtractor")
    train, held = read_splits(request)
    notes: list[str] = []
    samples = _encoded(train, tokenizer, extractor, request, notes)
    model = load_model(
        request,
        "AutoModelForCTC",
        vocab_size=lambda config: max(len(tokenizer), config.vocab_size),
        pad_token_id=tokenizer.pad_token_id,
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
    )
    return Materials(
        model=model,
        train_dataset=samples,
        eval_dataset=None if held is None else _encoded(held, tokenizer, extractor, request, notes),
        processing_class=SpeechProcessor(extractor, tokenizer),
        data_collator=SpeechCollator(extractor, extractor.model_input_names[0]),
        compute_metrics=_metrics(tokenizer, request.metrics) if request.metrics else None,
        preprocess_logits_for_metrics=lambda logits, labels: (
            logits[0] if isinstance(logits, tuple) else logits
        ).argmax(-1),
        notes=notes,
    )


def _encoded(rows: Rows, tokenizer: Any, extractor: Any, request: Request, notes: list[str]) -> list[dict[str, Any]]:
    from .audio import read_audio

    data: SpeechData = request.data
    need_text(rows, data.audio_column, "data.audio_column", request)
    need_text(rows, data.text_column, "data.text_column", request)
    samples, long = [], 0
    for index, row in enumerate(rows):
        values, rate = read_audio(Path(rows.name).parent / row[data.audio_column])
        if rate != extractor.sampling_rate:
            raise DataError(
                f"{rows.row(index)}: {row[data.audio_column]} has {rate} samples per second and the model "
                f"needs {extractor.sampling_rate}; convert it"
            )
        if len(values) > data.max_seconds * rate:
            long += 1
            continue
        name = extractor.model_input_names[0]
        features = extractor(values, sampling_rate=rate)[name][0]
        samples.append({name: features, "labels": tokenizer(row[data.text_column])["input_ids"]})
    if not samples:
        raise DataError(f"{rows.name}: all {len(rows)} recordings are longer than max_seconds={data.max_seconds:g}")
    if long:
        notes.append(
            f"{rows.name}: {long} of {len(rows)} recordings are longer than max_seconds={data.max_seconds:g} and are "
            "left out"
        )
    return samples


class SpeechProcessor:
    """The feature extractor and the tokenizer, saved together with the model."""

    def __init__(self, extractor: Any, tokenizer: Any) -> None:
        self.feature_extractor, self.tokenizer = extractor, tokenizer

    def save_pretrained(self, folder: str, **kwargs: Any) -> None:
        self.feature_extractor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class SpeechCollator:
    """Pads the sounds, and the labels with -100."""

    extractor: Any
    input_name: str

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        sounds = [{self.input_name: sample[self.input_name]} for sample in samples]
        batch = dict(self.extractor.pad(sounds, padding=True, return_attention_mask=True, return_tensors="pt"))
        longest = max(len(sample["labels"]) for sample in samples)
        rows = [[*sample["labels"], *[-100] * (longest - len(sample["labels"]))] for sample in samples]
        return {**batch, "labels": torch.tensor(rows)}


def _metrics(tokenizer: Any, metrics: list[str]) -> Any:
    def compute(prediction: Any) -> dict[str, float]:
        import numpy as np

        from .metrics import chosen, edit_rate

        def texts(ids: Any, **options: Any) -> list[str]:
            ids = np.where(np.asarray(ids) < 0, tokenizer.pad_token_id, ids)
            return list(tokenizer.batch_decode(ids, **options))

        guessed, wanted = texts(prediction.predictions), texts(prediction.label_ids, group_tokens=False)
        return chosen(
            metrics,
            lambda: {
                "wer": edit_rate([text.split() for text in guessed], [text.split() for text in wanted]),
                "cer": edit_rate(guessed, wanted),
            },
        )

    return compute


TASK = Task(
    name="speech-to-text",
    help="transcribe speech with a CTC model",
    data=SpeechData,
    metrics={"wer": "word error rate", "cer": "character error rate"},
    default_metrics=("wer", "cer"),
    build=build,
    example={
        "model": "facebook/wav2vec2-base-960h",
        "data": {
            "train": "train.jsonl",
            "validation": "validation.jsonl",
            "audio_column": "audio",
            "text_column": "text",
        },
    },
)
