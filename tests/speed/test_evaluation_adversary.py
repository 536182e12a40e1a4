"""Evaluation and prediction of models, loaders and callbacks that are not ordinary: the numbers of `speed="off"`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from loopwright import Trainer, TrainerCallback
from tests.speed.architectures import WIDTH, build, collate, samples
from tests.speed.test_evaluation import assert_alike, chosen, numbers, reason, trainer_of

pytest.importorskip("transformers")


class Model(nn.Module):
    """Classifies tokens by their embeddings; `change` and `more` alter its outputs."""

    change: Callable[..., Any] = staticmethod(lambda model, logits, ids: logits)
    more: Callable[..., Any] = staticmethod(lambda model, logits, ids: {})
    loss: Callable[..., Any] = staticmethod(functional.cross_entropy)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(64, 16), nn.Linear(16, 3)
        self.wide, self.drop = nn.Linear(3, 200), nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(3))
        self.seen: list[Any] = []
        self.counts = {"calls": 0}
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> dict[str, Any]:
        mask = attention_mask[..., None].double()
        pooled = (self.words(input_ids) * mask).sum(1) / mask.sum(1)
        logits = self.change(self, self.head(pooled), input_ids)
        loss = {} if labels is None else {"loss": self.loss(logits[:, :3], labels)}
        return {**loss, "logits": logits, **self.more(self, logits, input_ids)}


class Counted(Model):
    calls = 0


def on_class(model: Any, logits: Tensor, ids: Tensor) -> Tensor:
    type(model).calls += 1
    return logits + 1e-3 * type(model).calls


def put(output: Tensor, column: int, value: float) -> Tensor:
    output = output.clone()
    output[:, column] = value
    return output


def dropout_module(model: Any, logits: Tensor, ids: Tensor) -> Tensor:
    model.drop.train()
    return model.drop(logits)


def attention(model: Any, logits: Tensor, ids: Tensor) -> Tensor:
    query = logits[:, None, :, None]
    return logits + functional.scaled_dot_product_attention(query, query, query, dropout_p=0.3)[:, 0, :, 0]


def moved(model: Any, logits: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        model.mean.mul_(0.9).add_(logits.mean(0), alpha=0.1)
    return logits


def collected(model: Any, logits: Tensor, ids: Tensor) -> Tensor:
    model.seen.append(logits.detach())
    return logits


def counted(model: Any, logits: Tensor, ids: Tensor) -> Tensor:
    model.counts["calls"] += 1
    return logits


Change = Callable[[Any, Tensor, Tensor], Any]
CHANGES: dict[str, Change] = {
    "dropout function": lambda model, logits, ids: functional.dropout(logits, 0.3, training=True),
    "dropout module": dropout_module,
    "dropout of attention": attention,
    "one column by width": lambda model, logits, ids: put(model.wide(logits), 5, 0.01 * ids.shape[1]),
    "one column by rows": lambda model, logits, ids: put(model.wide(logits), 5, 0.01 * len(ids)),
    "a list of outputs": collected,
    "a dict of counts": counted,
    "a moving mean": moved,
    "by rows": lambda model, logits, ids: logits + (1e-3 if len(ids) > 4 else 0.0),  # batches have 4
    "by one width": lambda model, logits, ids: logits + (1e-3 if ids.shape[1] % 7 == 0 else 0.0),
    "last token": lambda model, logits, ids: logits + 1e-3 * ids[:, -1:],
    "mean over padding": lambda model, logits, ids: logits + 1e-3 * ids.double().mean(1, keepdim=True),
    "compared with the first": lambda model, logits, ids: logits - 1e-3 * logits[:1],
    "log of shares": lambda model, logits, ids: logits.log_softmax(0),
    "batch statistics": lambda model, logits, ids: functional.batch_norm(logits, None, None, training=True),
    "numpy's random numbers": lambda model, logits, ids: logits + 1e-3 * np.random.rand(),
}
OUTPUTS: dict[str, Change] = {
    "a small column": lambda model, logits, ids: {"more": put(1e12 * logits, 1, ids.shape[1])},
    "large whole numbers": lambda model, logits, ids: {"more": torch.full((len(ids), 2), 10**15 + ids.shape[1])},
    "a number": lambda model, logits, ids: {"more": logits.mean()},
    "nothing": lambda model, logits, ids: {"more": None},
    "a tuple": lambda model, logits, ids: {"more": (logits, logits + 1)},
    "a dict": lambda model, logits, ids: {"more": {"inner": logits}},
    "a text": lambda model, logits, ids: {"more": "text"},
    "ranks": lambda model, logits, ids: {"more": logits[:, 0].argsort().argsort()},
    "places": lambda model, logits, ids: {"more": torch.arange(len(ids))},
    "tokens": lambda model, logits, ids: {"more": 2 * ids},
    "tokens as channels": lambda model, logits, ids: {"more": ids[:, None].repeat(1, 2, 1)},
    "not numbers": lambda model, logits, ids: {"more": put(logits, 0, float("nan"))},
}
SERVED: dict[str, Change] = {
    "lengths": lambda model, logits, ids: {"more": (ids > 0).sum(1)},
    "half precision": lambda model, logits, ids: {"more": logits.half()},
    "truths": lambda model, logits, ids: {"more": logits > 0},
}
LOSSES: dict[str, Callable[..., Any]] = {
    "class weights": lambda logits, labels: functional.cross_entropy(
        logits, labels, weight=logits.new_tensor([1, 2, 5])
    ),
    "contrast": lambda logits, labels: functional.cross_entropy(
        10 * functional.normalize(logits) @ functional.normalize(logits).T, torch.arange(len(logits))
    ),
    "root": lambda logits, labels: functional.cross_entropy(logits, labels).sqrt(),
    "largest": lambda logits, labels: functional.cross_entropy(logits, labels, reduction="none").max(),
}


def kinds(change: str, table: dict[str, Any], *always: str) -> list[Any]:
    return [
        pytest.param({change: function}, id=name, marks=() if name in always else pytest.mark.grid)
        for name, function in table.items()
    ]


REFUSED = [
    *kinds("change", CHANGES, "dropout function", "dropout module", "dropout of attention", "one column by width",
           "one column by rows", "a list of outputs", "a dict of counts"),
    *kinds("more", OUTPUTS, "a small column", "large whole numbers", "a number"),
    *kinds("loss", LOSSES, "class weights"),
]  # fmt: skip


def made(ways: dict[str, Any], kind: type[Model] = Model) -> Model:
    model = kind()
    for name, function in ways.items():
        setattr(type(model) if kind is not Model else model, name, function)
    return model


def predict(model: Model, folder: Path, speed: str, **options: Any) -> tuple[Trainer, Any]:
    torch.manual_seed(7)
    np.random.seed(7)
    trainer = trainer_of(model, DATA, folder, speed, **options)
    return trainer, trainer.predict(DATA)


DATA = samples(22, "class")


def equal(a: Any, b: Any) -> bool:
    """Nested predictions: the same values, to the last bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f")) if hasattr(a, "shape") else a == b


@pytest.mark.parametrize("ways", REFUSED)
def test_what_depends_on_batches_is_evaluated_as_collated(ways: dict[str, Any], tmp_path: Path) -> None:
    plain, fast = made(ways), made(ways)
    _, expected = predict(plain, tmp_path, "off")
    trainer, found = predict(fast, tmp_path, "max")
    assert not any(chosen(trainer).values()), reason(trainer)
    assert equal(found.predictions, expected.predictions) and numbers(found.metrics) == numbers(expected.metrics)
    assert len(plain.seen) == len(fast.seen) and plain.counts == fast.counts and torch.equal(plain.mean, fast.mean)


@pytest.mark.parametrize("ways", kinds("more", SERVED, *SERVED))
def test_other_outputs_of_samples_are_served(ways: dict[str, Any], tmp_path: Path) -> None:
    _, expected = predict(made(ways), tmp_path, "off")
    trainer, found = predict(made(ways), tmp_path, "max")
    assert any(chosen(trainer).values()), reason(trainer)
    for mine, other in zip(found.predictions, expected.predictions, strict=True):
        assert_alike(mine, other, 1e-3 if mine.dtype == np.float16 else 1e-12)


def test_a_count_on_the_class_of_a_model_is_that_of_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(Counted, "change", staticmethod(on_class))
    for speed in ("off", "max"):
        monkeypatch.setattr(Counted, "calls", 0)
        found.append(predict(Counted(), tmp_path, speed)[1].predictions)
        assert Counted.calls == -(-len(DATA) // 4), "trials leave no trace"
    assert equal(*found)


def test_a_hook_on_all_modules_sees_the_collators_batches(tmp_path: Path) -> None:
    found: list[list[Any]] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(module, Model):
            found[-1].append(output["logits"])

    handle = nn.modules.module.register_module_forward_hook(keep)
    try:
        for speed in ("off", "max"):
            found.append([])
            trainer, _ = predict(Model(), tmp_path, speed)
    finally:
        handle.remove()
    assert "hook on all modules" in reason(trainer)
    assert equal(*found)


# ---- loaders and callbacks ------------------------------------------------------------------------------------------


class Reusing:
    """A loader that fills the same dict, or the same tensors, for every batch."""

    def __init__(self, rows: list[Any], what: str) -> None:
        self.dataset, self._what = rows, what

    def __len__(self) -> int:
        return -(-len(self.dataset) // 4)

    def __iter__(self) -> Iterator[Any]:
        same: dict[str, Any] = {}
        buffers = {name: torch.zeros(4, 48, dtype=torch.long) for name in ("input_ids", "attention_mask")}
        for start in range(0, len(self.dataset), 4):
            batch = collate(self.dataset[start : start + 4])
            if self._what == "dict":
                same.update(batch)
                yield same
                continue
            rows, width = batch["input_ids"].shape
            for name, buffer in buffers.items():
                buffer.zero_()
                buffer[:rows, :width] = batch[name]
            yield {**batch, **{name: buffer[:rows] for name, buffer in buffers.items()}}


class OfDict(Trainer):
    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return Reusing(test_dataset, "dict")


class OfTensors(Trainer):
    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return Reusing(test_dataset, "tensors")


@pytest.mark.parametrize("kind", [OfDict, OfTensors])
@pytest.mark.parametrize("speed", ["off", "max"])
def test_a_loader_may_use_its_memory_again(kind: type[Trainer], speed: str, tmp_path: Path) -> None:
    _, expected = predict(Model(), tmp_path, "off")
    trainer, found = predict(Model(), tmp_path, speed, kind=kind)
    assert_alike(found.predictions, expected.predictions, 1e-12)
    assert_alike(found.label_ids, expected.label_ids, 0)
    assert speed == "off" or any(chosen(trainer).values()), reason(trainer)


class Moving(TrainerCallback):
    def on_prediction_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            model.head.bias.add_(0.1)


def test_a_callback_between_batches_sees_each_of_them(tmp_path: Path) -> None:
    _, expected = predict(Model(), tmp_path, "off", callbacks=[Moving()])
    trainer, found = predict(Model(), tmp_path, "max", callbacks=[Moving()])
    assert "on_prediction_step" in reason(trainer) and equal(found.predictions, expected.predictions)


# ---- changes between evaluations ------------------------------------------------------------------------------------


def weights(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)


def layer(model: Any) -> None:
    torch.manual_seed(3)
    model.classifier = nn.Linear(32, 3).double()


def epsilon(model: Any) -> None:
    model.bert.embeddings.LayerNorm.eps = 0.5


def method(model: Any) -> None:
    plain = model.forward

    def forward(**inputs: Any) -> Any:
        outputs = plain(**inputs)
        outputs["logits"] = outputs["logits"] + 0.01 * inputs["input_ids"].shape[1]
        return outputs

    model.forward = forward


@pytest.mark.parametrize(
    "change", [weights, method, *(pytest.param(each, marks=pytest.mark.grid) for each in (layer, epsilon))]
)
def test_changes_between_predictions_are_followed(change: Any, doubles_stay: None, tmp_path: Path) -> None:
    found = []
    for speed in ("off", "max"):
        trainer = trainer_of(build("bert", "class"), DATA, tmp_path, speed)
        first = trainer.predict(DATA).predictions
        change(trainer.model)
        found.append((first, trainer.predict(DATA).predictions))
    assert_alike(found[1], found[0], 1e-9)
    assert any(chosen(trainer).values()) is (change is not method), reason(trainer)


@pytest.mark.parametrize("is_shown", [True, False])
def test_outputs_that_cannot_be_compared_later_are_those_of_the_batches(is_shown: bool, tmp_path: Path) -> None:
    """Samples of one length, which a layout cuts to it: an output per token has the width of the collator's batches."""
    found: list[Any] = []
    shown: list[int] = []

    def more(model: Any, logits: Tensor, ids: Tensor) -> dict[str, Any]:
        return {"more": 2 * ids} if shown else {}

    one_length = [next(each for each in DATA if len(each["input_ids"]) < WIDTH // 2)] * 6
    for speed in ("off", "max"):
        shown.clear()
        model = made({"more": more})
        trainer = trainer_of(model, DATA, tmp_path, speed)
        trainer.predict(DATA)
        assert any(chosen(trainer).values()) is (speed == "max"), reason(trainer)
        shown += [1] * is_shown
        found.append(trainer.predict(one_length).predictions)
    assert_alike(found[1], found[0], 1e-12)
    assert any(chosen(trainer).values()) is not is_shown, reason(trainer)
