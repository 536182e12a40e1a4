"""Snippets of public documents run unchanged apart from the import; three of them fail with transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import loopwright
from tests.models import small_bert, token_data

transformers = pytest.importorskip("transformers")


# ---- the overrides, as the documents write them ---------------------------------------------------------------------


def weighted(Trainer: Any) -> type:
    class CustomTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            labels = inputs.get("labels")
            # forward pass
            outputs = model(**inputs)
            logits = outputs.get("logits")
            # compute custom loss (suppose one has 3 labels with different weights)
            loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
            loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
            return (loss, outputs) if return_outputs else loss

    return CustomTrainer


def weighted_on_the_models_device(Trainer: Any) -> type:
    class CustomTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            labels = inputs.pop("labels")
            # forward pass
            outputs = model(**inputs)
            logits = outputs.get("logits")
            # compute custom loss (suppose one has 3 labels with different weights)
            loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], device=model.device))
            loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
            return (loss, outputs) if return_outputs else loss

    return CustomTrainer


class LabelSmoothedLoss(nn.Module):
    def __init__(self, smoothing: float = 0.1) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits, target):
        log_probs = nn.functional.log_softmax(logits, dim=-1)
        nll_loss = -log_probs.gather(dim=-1, index=target.unsqueeze(-1)).squeeze(-1)
        smooth_loss = -log_probs.mean(dim=-1)
        return ((1.0 - self.smoothing) * nll_loss + self.smoothing * smooth_loss).mean()


def label_smoothed(Trainer: Any) -> type:
    class LabelSmoothingTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = LabelSmoothedLoss()(outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss

    return LabelSmoothingTrainer


def my_custom_loss(logits, labels):
    return nn.functional.cross_entropy(logits.view(-1, 3), labels.view(-1))


def two_arguments(Trainer: Any) -> type:
    class MyTrainer(Trainer):
        def compute_loss(self, model, inputs):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            return my_custom_loss(outputs[0], labels)

    return MyTrainer


SNIPPETS = {
    "weighted": weighted,
    "weighted on the model's device": weighted_on_the_models_device,
    "label smoothed": label_smoothed,
    "two arguments": two_arguments,
}

WEIGHTS = torch.tensor([1.0, 2.0, 3.0])
EXPECTED = {
    "weighted": lambda logits, labels: nn.functional.cross_entropy(logits, labels, weight=WEIGHTS),
    "weighted on the model's device": lambda logits, labels: nn.functional.cross_entropy(logits, labels, WEIGHTS),
    "label smoothed": lambda logits, labels: nn.functional.cross_entropy(logits, labels, label_smoothing=0.1),
    "two arguments": nn.functional.cross_entropy,
}


def make(library: Any, snippet: Any, folder: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    data = token_data(20, labels="class")
    options = {"per_device_train_batch_size": 4, "max_steps": 6, "logging_steps": 1, "learning_rate": 1e-2,
               "per_device_eval_batch_size": 10, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
               **options}  # fmt: skip
    args = library.TrainingArguments(output_dir=str(folder), **options)
    return snippet(library.Trainer)(model=small_bert(0.0), args=args, train_dataset=data, eval_dataset=data[:10])


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_snippet_trains_and_its_loss_is_the_one_logged(name: str, output_dir: str) -> None:
    trainer = make(loopwright, SNIPPETS[name], output_dir)
    first = [trainer.train_dataset[i] for i in torch.randperm(20, generator=torch.Generator().manual_seed(42))[:4]]
    batch = {key: torch.stack([each[key] for each in first]) for key in first[0]}
    labels = batch.pop("labels")
    with torch.no_grad():
        expected = EXPECTED[name](trainer.model(**batch).logits, labels)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 6
    assert losses[0] == pytest.approx(expected.item(), rel=1e-5)
    assert any(not torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_snippet_evaluates_with_logits(name: str, output_dir: str) -> None:
    trainer = make(loopwright, SNIPPETS[name], output_dir)
    trainer.compute_metrics = lambda p: {"classes": float(p.predictions.shape[1]), "labels": float(len(p.label_ids))}
    metrics = trainer.evaluate()
    prediction = trainer.predict(trainer.eval_dataset)
    batch = {key: torch.stack([each[key] for each in trainer.eval_dataset]) for key in trainer.eval_dataset[0]}
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = trainer.model.eval()(**batch).logits
    np.testing.assert_allclose(prediction.predictions, logits.numpy(), rtol=1e-5, atol=1e-6)
    assert prediction.label_ids.tolist() == labels.tolist()
    assert metrics["eval_classes"] == 3.0 and metrics["eval_labels"] == 10.0
    assert metrics["eval_loss"] == pytest.approx(EXPECTED[name](logits, labels).item(), rel=1e-5)


@pytest.mark.parametrize("name", SNIPPETS)
def test_accumulation_does_not_change_what_an_update_learns(name: str, output_dir: str) -> None:
    """The silent trap: transformers would make these gradients as many times too large as it accumulates."""
    logs = []
    for options in ({}, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}):
        trainer = make(loopwright, SNIPPETS[name], output_dir, max_steps=1, **options)
        trainer.train()
        logs.append(trainer.state.log_history[0])
    if name.startswith("weighted"):  # a weighted mean is no mean over targets: only about the same when cut in two
        assert logs[1]["grad_norm"] == pytest.approx(logs[0]["grad_norm"], rel=0.5)
    else:
        assert logs[1]["loss"] == pytest.approx(logs[0]["loss"], rel=1e-5)
        assert logs[1]["grad_norm"] == pytest.approx(logs[0]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_snippet_fails_with_transformers(name: str, output_dir: str) -> None:
    with pytest.raises(TypeError, match="num_items_in_batch"):
        make(transformers, SNIPPETS[name], output_dir).train()


# ---- linear regression with a module of one's own -------------------------------------------------------------------


class LinearRegressionModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.loss = nn.MSELoss()

    def forward(self, x, labels):
        y = self.linear(x)
        return {"loss": self.loss(y, labels), "logits": y}


class SyntheticData(torch.utils.data.Dataset):
    def __init__(self, w, b, num_examples):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.normal(0, 1, (num_examples, len(w)), generator=generator)
        self.y = (self.x @ w + b + torch.normal(0, 0.01, (num_examples,), generator=generator)).reshape(-1, 1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


def test_linear_regression_finds_the_true_weights(output_dir: str) -> None:
    true_w, true_b = torch.tensor([2, -3.4]), 4.2
    train_dataset = SyntheticData(true_w, true_b, 1000)
    model = LinearRegressionModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    training_args = loopwright.TrainingArguments(
        output_dir,
        per_device_train_batch_size=512,
        num_train_epochs=100,
        logging_strategy="epoch",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = loopwright.Trainer(
        model,
        training_args,
        train_dataset=train_dataset,
        eval_dataset=SyntheticData(true_w, true_b, 100),
        optimizers=(optimizer, None),
    )
    result = trainer.train()

    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in logged] == list(range(2, 201, 2))
    assert result.global_step == 200
    assert trainer.optimizer is optimizer
    assert (model.linear.weight.detach()[0] - true_w).abs().max() < 1e-3
    assert abs(model.linear.bias.item() - true_b) < 1e-3
    assert trainer.evaluate()["eval_loss"] < 1e-3
    prediction = trainer.predict(trainer.eval_dataset)
    np.testing.assert_allclose(prediction.predictions, prediction.label_ids, atol=0.1)


def test_linear_regression_without_labels_in_the_output_predicts(output_dir: str) -> None:
    """The same model, whose forward needs labels, is given them in prediction too."""
    data = SyntheticData(torch.tensor([2, -3.4]), 4.2, 30)
    args = loopwright.TrainingArguments(output_dir, use_cpu=True, disable_tqdm=True, per_device_eval_batch_size=8)
    prediction = loopwright.Trainer(LinearRegressionModel(), args).predict(data)
    assert prediction.predictions.shape == prediction.label_ids.shape == (30, 1)
