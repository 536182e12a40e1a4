"""An error of a forward pass or a loss is explained in one sentence: the column, the value and what to do."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from loopwright import ArgumentsError, DataError, ModelError, Trainer, TrainingArguments
from loopwright.pt.loss.input_errors import explain

F = nn.functional
POSITIONS, WORDS = 16, 50


def bert(**options: Any) -> nn.Module:
    sizes = {"vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=8, max_position_embeddings=POSITIONS, num_labels=3, **options)
    return BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=POSITIONS, n_embd=8, n_layer=1, n_head=2, **ends))


class Linear(nn.Module):
    """A linear layer and a loss."""

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 3), loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": self.loss(self.layer(x), labels)}


class Tokens(nn.Module):
    """A model that is not transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": F.cross_entropy(self.head(self.words(tokens)).flatten(0, 1), labels.flatten())}


def text(ids: Any, labels: Any = 1) -> dict[str, Any]:
    return {"input_ids": torch.tensor(ids), "labels": labels}


def row(x: Any = (1.0, 2.0, 3.0, 4.0), labels: Any = 1, dtype: Any = torch.float32) -> dict[str, Any]:
    return {"x": torch.tensor(x, dtype=dtype), "labels": labels}


LONG = [3, 1, 4] * 7
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "a token": (bert, text([1, 60]), "input_ids has the id 60, but the embedding .* has 50 rows .*resize_token_embed"),
    "a negative token": (bert, text([1, -1]), "input_ids has the id -1, .*pad_token_id"),
    "a token of a decoder": (gpt2, text([1, 60], torch.tensor([1, 2])), "input_ids has the id 60, .*'transformer.wte'"),
    "a token of one's own model": (
        Tokens,
        {"tokens": torch.tensor([1, 99]), "labels": torch.tensor([1, 2])},
        "tokens has the id 99, but the embedding 'words' has 50 rows",
    ),
    "a label": (bert, text([1, 2], 7), r"labels has the value 7, but the model has 3 classes \(0 to 2\).*num_labels=8"),
    "a negative label": (bert, text([1, 2], -1), "labels has the value -1, but the model has 3 classes.*-100"),
    "a label that is a token": (gpt2, text([1, 2], torch.tensor([1, 77])), "labels has the token id 77, .* 50"),
    "a label of one's own loss": (lambda: Linear(F.cross_entropy), row(labels=3), "labels has the value 3.* 3 classes"),
    "a long text": (bert, text(LONG), "a sequence of 21 tokens is longer than the 16 positions .*max_length=16"),
    "a long text of a decoder": (
        gpt2,
        text(LONG, torch.tensor(LONG)),
        "a sequence of 21 tokens is longer than the 16 positions of the model .*'transformer.wpe'",
    ),
    "tokens that are floats": (bert, text([1.0, 2.0]), "input_ids is float32, but an embedding needs integers"),
    "classes that are floats": (lambda: Linear(F.cross_entropy), row(labels=1.0), "labels is float32, but"),
    "many labels that are integers": (
        lambda: bert(problem_type="multi_label_classification"),
        text([1, 2], torch.tensor([1, 0, 1])),
        "labels is int64, but this loss needs floats; convert it to float32",
    ),
    "inputs that are doubles": (
        lambda: Linear(F.cross_entropy),
        row(dtype=torch.float64),
        "x is float64, but the layer 'layer' has weights of float32; convert the column to float32",
    ),
    "inputs that are integers": (lambda: Linear(F.cross_entropy), row(dtype=torch.int64), "x is int64, .* of float32"),
    "memory": (
        lambda: Linear(lambda y, labels: torch.empty(10**15)),
        row(),
        "out of memory: lower per_device_train_batch_size=4 and raise gradient_accumulation_steps=1 by .*auto_find",
    ),
}


def arguments(**options: Any) -> TrainingArguments:
    settings = {"max_steps": 2, "per_device_train_batch_size": 4, "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments("run", save_strategy="no", report_to="none", **{**settings, **options})


def last_lines(error: BaseException) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()[-2:]


@pytest.mark.parametrize(("name", "accumulation"), [*((name, 1) for name in CASES), ("a label", 2), ("memory", 2)])
def test_training(name: str, accumulation: int) -> None:
    model, sample, pattern = CASES[name]
    args = arguments(per_device_train_batch_size=4, gradient_accumulation_steps=accumulation)
    expected = pattern.replace("steps=1 ", f"steps={accumulation} ")
    with pytest.raises((IndexError, RuntimeError)) as caught:
        Trainer(model(), args, train_dataset=[sample] * 8).train()
    sentence, place = last_lines(caught.value)
    assert re.match(expected, sentence), sentence
    assert place.startswith("raised in ") and "training step, at step 1" in place


@pytest.mark.parametrize("name", ["a token", "a label", "a long text", "memory"])
def test_evaluation(name: str) -> None:
    model, sample, pattern = CASES[name]
    args = arguments(per_device_eval_batch_size=2)
    trainer = Trainer(model(), args, eval_dataset=[sample] * 4)
    with pytest.raises((IndexError, RuntimeError)) as caught:
        trainer.evaluate()
    sentence, place = last_lines(caught.value)
    if name == "memory":
        pattern = "out of memory in an evaluation: lower per_device_eval_batch_size=2, or set eval_accumulation_steps"
    assert re.match(pattern, sentence), sentence
    assert "evaluation step" in place


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ({"input_ids": [[1], [2]], "labels": [0, 1]}, "input_ids is a list, not a tensor; convert it in the data coll"),
        ({"input_ids": np.ones((2, 1))}, "input_ids is a ndarray, not a tensor; convert it in the data collator"),
        (None, "the batch is None; let the data collator return a dict of the arguments of the forward"),
        ([torch.ones(2)], r"the batch is list of 1: float32 \(2,\); let the data collator return a dict"),
    ],
)
def test_a_collator_that_returns_no_dict_of_tensors(returned: Any, expected: str) -> None:
    args = arguments(remove_unused_columns=False)
    with pytest.raises((TypeError, AttributeError)) as caught:
        Trainer(bert(), args, train_dataset=[row()] * 8, data_collator=lambda samples: returned).train()
    sentence, place = last_lines(caught.value)
    assert re.match(expected, sentence), sentence
    assert "compare the columns" not in place


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (lambda outputs: None, "the loss is None: return it at the end of compute_loss"),
        (lambda outputs: outputs, "value named 'logits' .* and of a model's outputs only the loss"),
    ],
)
def test_a_compute_loss_that_returns_no_loss(returned: Any, expected: str) -> None:
    class Forgets(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            return returned(model(**inputs))

    with pytest.raises(ModelError, match=expected):
        Forgets(bert(), arguments(), train_dataset=[text([1, 2])] * 8).train()


def test_arguments_in_another_order() -> None:
    with pytest.raises(ArgumentsError, match="data_collator must be callable, .*; pass the datasets by name"):
        Trainer(bert(), arguments(), TensorDataset(torch.ones(1)))
    with pytest.raises(ArgumentsError, match="args must be .*TrainingArguments, not .*; pass arguments by name"):
        Trainer(arguments(), bert())


def test_what_is_set_already_is_not_advised() -> None:
    args = arguments(auto_find_batch_size=True, bf16=True, gradient_checkpointing=True, per_device_train_batch_size=1)
    found = explain(RuntimeError("CUDA out of memory"), {}, nn.Linear(1, 1), args)
    assert found == "out of memory: use shorter samples, a smaller model or more devices"


def test_the_error_of_a_gpu_is_explained_by_the_columns() -> None:
    """It comes later and names nothing, and the memory of the GPU cannot be read any more."""
    error = RuntimeError("CUDA error: device-side assert triggered")
    for model, batch, pattern in (
        (bert(), {"input_ids": torch.tensor([[1, 60]])}, "input_ids has the id 60"),
        (bert(), {"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([3])}, "labels has the value 3"),
        (gpt2(), {"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, 50]])}, "labels has the token"),
        (gpt2(), {"input_ids": torch.ones(1, 17, dtype=torch.int64)}, "a sequence of 17 tokens"),
        (gpt2(), {"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, -100]])}, "$"),
    ):
        assert re.match(pattern, explain(error, batch, model, arguments())), pattern


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("x"), RuntimeError("something else"), ValueError("bad"), KeyError("input_ids")]
)
def test_other_errors_are_left_as_they_are(error: Exception) -> None:
    batch = {"input_ids": torch.full((1, 40), 99), "labels": torch.tensor([9])}
    assert explain(error, batch, bert(), arguments()) == ""


class Broken:
    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


@pytest.mark.parametrize("batch", [None, [], "text", {"input_ids": Broken()}, {1: torch.tensor([1])}])
def test_odd_batches_do_not_hide_the_error(batch: Any) -> None:
    assert explain(IndexError("index out of range in self"), batch, nn.Linear(1, 1), arguments()) == ""


# ---- text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["label", "labels"])
@pytest.mark.parametrize("workers", [0, 1])
def test_labels_that_are_text(key: str, workers: int) -> None:
    data = [{"input_ids": [1, 2, 3], key: "positive"}] * 8
    with pytest.raises(DataError, match=f"The column '{key}' holds text, such as 'positive', but labels are numbers"):
        Trainer(bert(), arguments(dataloader_num_workers=workers), train_dataset=data).train()


@pytest.mark.parametrize("workers", [0, 1])
def test_text_in_a_collator_of_the_users_own(workers: int) -> None:
    def collate(samples: list[Any]) -> Any:
        return {name: torch.tensor([each[name] for each in samples]) for name in samples[0]}

    args, data = arguments(dataloader_num_workers=workers), [{"title": "x", "input_ids": [1], "labels": "no"}] * 8
    with pytest.raises((TypeError, ValueError)) as caught:
        Trainer(bert(), args, train_dataset=data, data_collator=collate).train()
    note = last_lines(caught.value)[1]
    assert "the column 'labels' holds text, which is not a number: map each text to an integer" in note
