"""What a task makes of odd data, compared with a computation by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from loopwright.config import build_trainer, load_config
from loopwright.errors import DataError
from loopwright.tasks.data.images import ImageTransform
from loopwright.tasks.metrics import number_scores
from tests.tasks import tiny
from tests.tasks.cases import write_config

WHOLE = "data.validation_share=null"


# ---- images ----------------------------------------------------------------------------------------------------------

AS_THEY_ARE = ImageTransform(4, 4, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@pytest.mark.parametrize("channels", [3, 1])
def test_images_of_16_bits_keep_their_brightness(channels: int, tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.linspace(0, 65535, 16).reshape(4, 4).astype(np.uint16)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found = ImageTransform(4, 4, (0.0,) * channels, (1.0,) * channels)(tmp_path / "a.png")
    assert found.shape[0] == channels and np.abs(found - pixels / 65535).max() < 1 / 255


def test_images_are_rotated_as_their_camera_says(tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.zeros((4, 4, 3), np.uint8)
    pixels[0] = 255  # the first row; turned by 90 degrees it is the last column
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(AS_THEY_ARE(tmp_path / "a.png")[0], np.rot90(pixels[..., 0], -1) / 255)


def test_images_of_any_kind_have_three_channels(tmp_path: Path) -> None:
    from PIL import Image

    colours = np.zeros((4, 4, 3), np.uint8)
    colours[:2] = (255, 0, 0)
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK"):
        path = tmp_path / f"{mode}.tif"
        Image.fromarray(colours).convert(mode).save(path)
        found = AS_THEY_ARE(path)
        assert found.shape == (3, 4, 4) and found[0, :2].mean() > found[0, 2:].mean(), mode


def test_an_image_of_unknown_range_is_refused(tmp_path: Path) -> None:
    from PIL import Image

    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match="pixels are floating-point numbers, whose range is unknown"):
        AS_THEY_ARE(tmp_path / "a.tif")


def test_a_few_images_are_of_all_classes(tmp_path: Path) -> None:
    images = tiny.images(tmp_path / "few", count=6)
    words = [f"data.train={images}", f"data.validation={images}", WHOLE]
    limits = ["data.max_train_samples=5", "data.max_validation_samples=2"]
    trainer = build_trainer(load_config(write_config(tmp_path, "image-classification"), [*words, *limits]))
    assert list(trainer.train_dataset.labels) == [0, 0, 0, 1, 1] and list(trainer.eval_dataset.labels) == [0, 1]


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_columns_far_from_zero_and_constant_ones_are_standardized(tmp_path: Path) -> None:
    source = np.random.default_rng(0)
    values = np.stack([2e7 + 1000 * source.random(20_000), np.full(20_000, 0.1)], axis=1)
    lines = [f"{far!r},{constant!r},1" for far, constant in values.tolist()]
    (tmp_path / "t.csv").write_text("\n".join(["far,constant,target", *lines]))
    path = write_config(tmp_path, "table-regression")
    model = build_trainer(load_config(path, [f"data.train={tmp_path / 't.csv'}", WHOLE])).model
    assert model.mean.tolist() == pytest.approx(values.mean(axis=0), rel=1e-7)
    assert model.deviation.tolist() == pytest.approx([values[:, 0].std(), 1.0], rel=1e-3)


def test_a_column_that_32_bits_cannot_hold_is_told(tmp_path: Path) -> None:
    lines = [f"{1_700_000_000 + 10 * index},{index},0.1,{index}" for index in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["when,small,constant,target", *lines]))
    config = load_config(write_config(tmp_path, "table-regression"), [f"data.train={tmp_path / 't.csv'}", WHOLE])
    (note,) = config.task.build(config.request()).notes
    assert "the values of 'when' differ by about 173, and 32-bit numbers of their size by at least 128" in note
    assert "subtract 1.7e+09 from the column" in note


def test_r2_of_targets_far_from_zero() -> None:
    expected = np.array([1e8, 1e8 + 8], np.float32)  # their mean is no number of 32 bits
    assert number_scores(expected + 8, expected)["r2"] == 1 - (64 + 64) / (16 + 16)


# ---- texts -----------------------------------------------------------------------------------------------------------


def test_the_end_of_a_text_is_trained_if_the_tokenizer_pads_with_it(tmp_path: Path) -> None:
    """GPT-2's tokenizer has no padding token."""
    path = write_config(tmp_path, "causal-lm")
    file = tmp_path / "models" / "gpt2" / "tokenizer_config.json"
    file.write_text(
        json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "pad_token"})
    )
    trainer = build_trainer(load_config(path))
    end = trainer.processing_class.eos_token_id
    short = {key: value[:-3] for key, value in trainer.train_dataset[0].items()}
    batch = trainer.data_collator([trainer.train_dataset[1], short])
    assert trainer.processing_class.pad_token_id == end and end in trainer.train_dataset[1]["input_ids"]
    assert batch["labels"][0].tolist() == batch["input_ids"][0].tolist()
    assert batch["labels"][1].tolist() == [*short["input_ids"], -100, -100, -100]


def test_words_of_a_list_are_encoded_as_in_a_text(tmp_path: Path) -> None:
    """The tokenizer encodes a word without a space before it in another way, like RoBERTa's."""
    trainer = build_trainer(load_config(write_config(tmp_path, "token-classification"), [WHOLE]))
    rows = [json.loads(line) for line in (tmp_path / "tags.jsonl").read_text().splitlines()]
    for row, sample in zip(rows, trainer.train_dataset, strict=True):
        assert sample["input_ids"] == trainer.processing_class(" ".join(row["tokens"]))["input_ids"]
        tagged = [label for label in sample["labels"] if label != -100]
        assert [trainer.model.config.id2label[label] for label in tagged] == row["tags"]


def test_answers_are_where_they_were_if_a_tokenizer_pads_before_the_text(tmp_path: Path) -> None:
    path = write_config(tmp_path, "question-answering")
    file = tmp_path / "models" / "bert" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "padding_side": "left"}))
    rows = [("the red cat", " red", 3), ("the red cat sees the blue dog", "blue", 21)]
    answers: list[dict[str, Any]] = [
        {"question": "what", "context": context, "answers": {"text": [text], "answer_start": [start]}}
        for context, text, start in rows
    ]
    data = tiny.write_rows(tmp_path / "two.jsonl", answers)
    trainer = build_trainer(load_config(path, [f"data.train={data}", WHOLE]))
    batch = trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[1]])
    for index, (_, text, _) in enumerate(rows):
        ids = batch["input_ids"][index][batch["start_positions"][index] : batch["end_positions"][index] + 1]
        assert trainer.processing_class.decode(ids).strip() == text.strip()


def test_answers_that_no_window_holds_are_counted(tmp_path: Path) -> None:
    context = " ".join(["cat"] * 60)
    rows = [{"text": [], "answer_start": []}, {"text": [context[:-4]], "answer_start": [0]}]
    rows = [*rows, {"text": ["cat"], "answer_start": [4]}]
    data = tiny.write_rows(
        tmp_path / "long.jsonl", ({"question": "what", "context": context, "answers": each} for each in rows)
    )
    config = load_config(write_config(tmp_path, "question-answering"), [f"data.train={data}", WHOLE])
    (note,) = config.task.build(config.request()).notes
    assert "1 of 2 answers are in no window as a whole" in note and "first that of row 2" in note


# ---- sound -----------------------------------------------------------------------------------------------------------


def test_outputs_for_padding_are_no_part_of_what_was_recognized(tmp_path: Path) -> None:
    trainer = build_trainer(load_config(write_config(tmp_path, "speech-to-text")))
    ids = [[*sample["labels"]] for sample in trainer.eval_dataset]
    ids = [[token for each in row for token in (each, 0)] for row in ids]  # a blank between two equal letters
    frames = trainer.model._get_feat_extract_output_lengths(len(trainer.eval_dataset[0]["input_values"]))
    outputs = np.array([[*row, *[0] * (int(frames) - len(row)), 3, 0, 4] for row in ids])
    longest = max(len(sample["labels"]) for sample in trainer.eval_dataset)
    labels = [[*sample["labels"], *[-100] * (longest - len(sample["labels"]))] for sample in trainer.eval_dataset]
    found = trainer.compute_metrics(SimpleNamespace(predictions=outputs, label_ids=np.array(labels)))
    assert found == {"wer": 0.0, "cer": 0.0}


def test_the_loss_of_speech_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    source = tiny.recordings(tmp_path / "sounds", count=6)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    rows = [{**row, "text": "ab" if index < 4 else "abc abc"} for index, row in enumerate(rows)]
    data = tiny.write_rows(source.parent / "changed.jsonl", rows)
    path = write_config(tmp_path, "speech-to-text")
    losses = []
    for size in (1, 2, 6):
        words = [f"data.train={data}", f"data.validation={data}", WHOLE, f"per_device_eval_batch_size={size}"]
        losses.append(build_trainer(load_config(path, words)).evaluate()["eval_loss"])
    assert losses == pytest.approx([losses[-1]] * 3, rel=1e-5)
