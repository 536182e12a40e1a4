"""Speech to text with a CTC model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..args.field import Group, arg, positive
from ..errors import DataError
from .data.readers import Rows, each_source, need_text, read_splits
from .declaration import Materials, Task
from .fields import DataFields
from .request import Request

MOST_CHARACTERS = 60
"""Characters of a tokenizer that a note shows."""


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
    from .model.models import load_feature_extractor, load_model, load_tokenizer

    tokenizer, extractor = load_tokenizer(request), load_feature_extractor(request)
    train, held = read_splits(request)
    notes: list[str] = []

    def encoded(rows: Rows) -> list[dict[str, Any]]:
        return _encoded(rows, tokenizer, extractor, request, notes)

    samples = each_source(train, encoded)
    model = load_model(
        request,
        "AutoModelForCTC",
        vocab_size=lambda config: max(len(tokenizer), config.vocab_size),
        pad_token_id=tokenizer.pad_token_id,
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
    )
    held_samples = None if held is None else encoded(held)
    frames = None if held_samples is None else _frames(held_samples, model, extractor.model_input_names[0])
    for part in samples.values() if isinstance(samples, dict) else [samples]:
        _note_short_recordings(train.name, part, model, extractor.model_input_names[0], notes)
    return Materials(
        model=model,
        train_dataset=samples,
        eval_dataset=held_samples,
        processing_class=SpeechProcessor(extractor, tokenizer),
        data_collator=SpeechCollator(extractor, extractor.model_input_names[0]),
        compute_metrics=_metrics(tokenizer, request.metrics, frames) if request.metrics else None,
        preprocess_logits_for_metrics=lambda logits, labels: (
            logits[0] if isinstance(logits, tuple) else logits
        ).argmax(-1),
        notes=notes,
    )


def _encoded(rows: Rows, tokenizer: Any, extractor: Any, request: Request, notes: list[str]) -> list[dict[str, Any]]:
    from .data.audio import read_audio

    data: SpeechData = request.data
    need_text(rows, data.audio_column, "data.audio_column", request)
    need_text(rows, data.text_column, "data.text_column", request)
    samples, long = [], 0
    for index, row in enumerate(rows):
        values, rate = read_audio(Path(rows.file(index)).parent / row[data.audio_column])
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
        labels = tokenizer(row[data.text_column])["input_ids"]
        if not labels:
            raise DataError(f"{rows.row(index)}: {data.text_column}={row[data.text_column]!r} has no token; remove it")
        samples.append({name: features, "labels": labels})
    if not samples:
        raise DataError(f"{rows.name}: all {len(rows)} recordings are longer than max_seconds={data.max_seconds:g}")
    _note_unknown(rows, samples, tokenizer, notes)
    if long:
        notes.append(
            f"{rows.name}: {long} of {len(rows)} recordings are longer than max_seconds={data.max_seconds:g} and are "
            "left out"
        )
    return samples


def _note_unknown(rows: Rows, samples: list[dict[str, Any]], tokenizer: Any, notes: list[str]) -> None:
    """Texts in another case or alphabet than the tokenizer's train the model to write its unknown token."""
    unknown = sum(tokenizer.unk_token_id in sample["labels"] for sample in samples)
    if unknown and tokenizer.unk_token_id is not None:
        known = "".join(sorted(token for token in tokenizer.get_vocab() if len(token) == 1))
        notes.append(
            f"{rows.name}: {unknown} of {len(samples)} texts have characters that are not in the tokenizer's "
            f"vocabulary and are trained as {tokenizer.unk_token}; it has {known[:MOST_CHARACTERS]}"
        )


def _note_short_recordings(source: str, samples: list[dict[str, Any]], model: Any, name: str, notes: list[str]) -> None:
    """A recording needs a frame for each token, and one between two equal ones: the loss of others is set to 0."""
    frames = _frames(samples, model, name)
    if frames is None:
        return
    needed = [_frames_needed(sample["labels"]) for sample in samples]
    short = sum(one < other for one, other in zip(frames, needed, strict=True))
    if short == len(samples):
        raise DataError(f"{source}: all {short} recordings are too short for their texts; check the texts")
    if short:
        notes.append(
            f"{source}: {short} of {len(samples)} recordings are too short for their texts, and are not learned from; "
            "check the texts"
        )


def _frames(samples: list[dict[str, Any]], model: Any, name: str) -> list[int] | None:
    """The number of the model's outputs for each recording; None if it is not known."""
    import torch

    frames_of = getattr(model, "_get_feat_extract_output_lengths", None)
    if frames_of is None:
        return None
    found: list[int] = frames_of(torch.tensor([len(sample[name]) for sample in samples])).tolist()
    return found


def _frames_needed(labels: list[int]) -> int:
    return len(labels) + sum(one == other for one, other in pairwise(labels))


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


def _metrics(tokenizer: Any, metrics: list[str], frames: list[int] | None) -> Any:
    """The metrics; `frames` are the outputs of each recording, without those of its padding."""

    def compute(prediction: Any) -> dict[str, float]:
        import numpy as np

        from .metrics import chosen, edit_rate

        def texts(ids: Any, **options: Any) -> list[str]:
            ids = np.where(np.asarray(ids) < 0, tokenizer.pad_token_id, ids)
            return list(tokenizer.batch_decode(ids, **options))

        outputs = np.asarray(prediction.predictions)
        if frames is not None and len(frames) == len(outputs):
            is_padding = np.arange(outputs.shape[1]) >= np.asarray(frames)[:, None]
            outputs = np.where(is_padding, tokenizer.pad_token_id, outputs)
        guessed, wanted = texts(outputs), texts(prediction.label_ids, group_tokens=False)
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
