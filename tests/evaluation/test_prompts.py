"""Samples of decoder-only models taken apart: what to generate from, and what to compare with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from loopwright import DataError, Seq2SeqTrainer, Seq2SeqTrainingArguments
from loopwright.pt.evaluation.prompts import answers_of, prompts_of

PAD = 0
tokens = st.integers(1, 9)
samples = st.tuples(st.lists(tokens, min_size=1, max_size=6), st.lists(tokens, max_size=5))


def padded(rows: list[list[int]], fill: int, *, left: list[bool]) -> Tensor:
    width = max(map(len, rows))
    fills = [[fill] * (width - len(row)) for row in rows]
    return torch.tensor([pad + row if side else row + pad for row, pad, side in zip(rows, fills, left, strict=True)])


@given(rows=st.lists(samples, min_size=1, max_size=6), left=st.lists(st.booleans(), min_size=6, max_size=6))
def test_prompts_are_what_stands_before_the_answer(rows: Any, left: list[bool]) -> None:
    """Whatever side a sample is padded on, its prompt ends at the right edge."""
    left = left[: len(rows)]
    ids = padded([prompt + answer for prompt, answer in rows], PAD, left=left)
    mask = padded([[1] * len(prompt + answer) for prompt, answer in rows], 0, left=left)
    labels = padded([[-100] * len(prompt) + answer for prompt, answer in rows], -100, left=left)
    before = [each.clone() for each in (ids, mask, labels)]
    prompts, prompt_mask = prompts_of({"input_ids": ids, "attention_mask": mask, "labels": labels}, pad=99)
    width = max(len(prompt) for prompt, _ in rows)
    assert prompts.tolist() == [[99] * (width - len(prompt)) + prompt for prompt, _ in rows]
    assert prompt_mask.tolist() == [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in rows]
    longest = max(len(answer) for _, answer in rows)
    assert answers_of(labels).tolist() == [answer + [-100] * (longest - len(answer)) for _, answer in rows]
    assert all(torch.equal(a, b) for a, b in zip(before, (ids, mask, labels), strict=True))


@given(
    prompts=st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=6),
    width=st.integers(7, 9),
    left=st.lists(st.booleans(), min_size=6, max_size=6),
    labelled=st.booleans(),
)
def test_inputs_without_labels_of_their_length_are_the_prompts(
    prompts: Any, width: int, left: list[bool], labelled: bool
) -> None:
    left = left[: len(prompts)]
    inputs: dict[str, Any] = {
        "input_ids": padded(prompts, PAD, left=left),
        "attention_mask": padded([[1] * len(prompt) for prompt in prompts], 0, left=left),
    }
    if labelled:
        inputs["labels"] = torch.ones(len(prompts), width, dtype=torch.long)
    found, mask = prompts_of(inputs, pad=PAD)
    longest = max(map(len, prompts))
    assert found.tolist() == [[PAD] * (longest - len(prompt)) + prompt for prompt in prompts]
    assert mask.sum(1).tolist() == list(map(len, prompts))


def test_answers_in_several_pieces_come_together() -> None:
    labels = torch.tensor([[-100, 4, -100, 5], [-100, -100, -100, -100], [1, 2, 3, -100]])
    assert answers_of(labels).tolist() == [[4, 5, -100], [-100] * 3, [1, 2, 3]]


def test_without_a_mask_every_token_counts() -> None:
    prompts, mask = prompts_of({"input_ids": torch.tensor([[3, 4], [5, 6]])}, pad=PAD)
    assert prompts.tolist() == [[3, 4], [5, 6]] and mask.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("labels", [[[5, 6, 7]], [[-100, 6, 7], [5, 6, 7]]])
def test_a_sample_without_a_prompt_is_told(labels: Any) -> None:
    labels = torch.tensor(labels)
    with pytest.raises(DataError, match="labels of the prompt to -100"):
        prompts_of({"input_ids": torch.full_like(labels, 3), "labels": labels}, pad=PAD)


# ---- generating ------------------------------------------------------------------------------------------------------

SAMPLES = [
    ([5, 6, 7], [8, 9]), ([4], [3, 2, 9]), ([11, 12, 13, 14, 15, 16], [2]), ([9, 9], [8]), ([7, 3, 21, 4], [6, 6])
]  # fmt: skip


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, pad_token_id=PAD, eos_token_id=31, bos_token_id=1, initializer_range=0.6,
    ))  # fmt: skip


def alone(model: Any, prompt: list[int], new: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options)
    return made[0, len(prompt) :].tolist()


def collate(side: str) -> Any:
    def joined(rows: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
        left = [side == "left"] * len(rows)
        return {
            "input_ids": padded([p + a for p, a in rows], PAD, left=left),
            "attention_mask": padded([[1] * len(p + a) for p, a in rows], 0, left=left),
            "labels": padded([[-100] * len(p) + a for p, a in rows], -100, left=left),
        }

    return joined


def apart(rows: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    """Prompts as inputs and answers as labels, of other lengths."""
    left = [False] * len(rows)
    return {
        "input_ids": padded([p for p, _ in rows], PAD, left=left),
        "attention_mask": padded([[1] * len(p) for p, _ in rows], 0, left=left),
        "labels": padded([a + [30] * 9 for _, a in rows], -100, left=left),
    }


def trainer_of(folder: Any, collator: Any, **options: Any) -> Seq2SeqTrainer:
    args = Seq2SeqTrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, report_to=[], save_strategy="no",
                                    predict_with_generate=True, **options)  # fmt: skip
    return Seq2SeqTrainer(llama(), args, collator)


@pytest.mark.parametrize("collator", [collate("left"), collate("right"), apart], ids=["left", "right", "apart"])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_generation_is_that_of_every_prompt_alone(collator: Any, batch: int, tmp_path: Any) -> None:
    trainer = trainer_of(tmp_path, collator, generation_max_length=6, per_device_eval_batch_size=batch)
    output = trainer.predict(SAMPLES)
    assert output.predictions.shape == (5, 6)
    found = zip(SAMPLES, output.predictions.tolist(), output.label_ids.tolist(), strict=True)
    for (prompt, answer), row, labels in found:
        expected = alone(trainer.model, prompt, 6)
        assert row == expected + [PAD] * (6 - len(expected))
        assert [label for label in labels if label not in (-100, 30)] == answer
    assert ("test_loss" in output.metrics) is (collator is not apart)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_the_loss_beside_generation_is_the_exact_one(batch: int, tmp_path: Any) -> None:
    trainer = trainer_of(tmp_path, collate("right"), generation_max_length=2, per_device_eval_batch_size=batch)
    generating = trainer.predict(SAMPLES).metrics["test_loss"]
    trainer.args.predict_with_generate = False
    assert generating == trainer.predict(SAMPLES).metrics["test_loss"]
    total = count = 0.0
    for prompt, answer in SAMPLES:
        ids = torch.tensor([prompt + answer])
        labels = torch.tensor([[-100] * len(prompt) + answer])
        total += float(trainer.model(input_ids=ids, labels=labels).loss.detach()) * len(answer)
        count += len(answer)
    assert generating == pytest.approx(total / count, rel=1e-5)


def test_the_longest_length_counts_new_tokens_and_a_call_can_change_it(tmp_path: Any) -> None:
    trainer = trainer_of(tmp_path, collate("right"), generation_max_length=3, per_device_eval_batch_size=5)
    assert trainer.predict(SAMPLES).predictions.shape == (5, 3)
    assert trainer.predict(SAMPLES, max_new_tokens=7).predictions.shape == (5, 7)
    seen: list[Any] = []
    trainer.compute_metrics = lambda p: seen.append(p.predictions.shape) or {}
    trainer.evaluate({"one": SAMPLES[:2], "two": SAMPLES}, max_new_tokens=4)
    trainer.evaluate(SAMPLES)
    assert seen == [(2, 4), (5, 4), (5, 3)]


def test_beams_of_arguments_and_call(tmp_path: Any) -> None:
    trainer = trainer_of(tmp_path, collate("right"), generation_max_length=5, generation_num_beams=3)
    for beams, options in ((3, {}), (2, {"num_beams": 2})):
        expected = [alone(trainer.model, prompt, 5, num_beams=beams) for prompt, _ in SAMPLES]
        for row, wanted in zip(trainer.predict(SAMPLES, **options).predictions.tolist(), expected, strict=True):
            assert row == wanted + [PAD] * (5 - len(wanted))


def test_without_a_length_the_models_own_holds(tmp_path: Any) -> None:
    """Widths may then differ between batches; what is missing is -100."""
    trainer = trainer_of(tmp_path, collate("right"), per_device_eval_batch_size=1)
    trainer.model.generation_config.max_new_tokens = 4
    assert trainer.predict(SAMPLES).predictions.shape == (5, 4)


def test_metric_objects_cannot_take_generated_ids(tmp_path: Any) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    args = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, report_to=[], save_strategy="no",
                                    predict_with_generate=True, generation_max_length=6)  # fmt: skip
    metric = torchmetrics.classification.MulticlassAccuracy(32)
    trainer = Seq2SeqTrainer(llama(), args, collate("right"), compute_metrics={"accuracy": metric})
    with pytest.raises(DataError, match="function"):
        trainer.evaluate(SAMPLES)


def test_predictions_can_be_compared_with_labels_row_by_row(tmp_path: Any) -> None:
    seen: list[Any] = []
    trainer = trainer_of(tmp_path, collate("left"), generation_max_length=3, per_device_eval_batch_size=2)
    trainer.compute_metrics = lambda p: seen.append((p.predictions, p.label_ids)) or {"rows": len(p.predictions)}
    assert trainer.evaluate(SAMPLES)["eval_rows"] == 5
    predictions, labels = seen[0]
    assert predictions.shape == labels.shape == (5, 3)
    assert np.array_equal(labels[2], [2, -100, -100])


def test_images_go_with_the_prompts(tmp_path: Any) -> None:
    """What belongs to the sample is passed on; what belongs to its tokens no longer stands where they do."""
    trainer = trainer_of(tmp_path, None)
    given: list[dict[str, Any]] = []
    plain = trainer.model.generate

    def generate(**inputs: Any) -> Any:
        given.append(inputs)
        return plain(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=1)

    trainer.model.generate = generate
    batch = {**collate("right")(SAMPLES), "pixel_values": torch.zeros(5, 3, 4, 4)}
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    request = trainer._loopwright.evaluation._request(trainer.model, {"max_new_tokens": 1})
    request.generate(request.inputs(batch))
    assert set(given[0]) == {"input_ids", "attention_mask", "pixel_values", "max_new_tokens"}
