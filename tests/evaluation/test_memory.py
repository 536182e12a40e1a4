"""What an evaluation keeps does not grow with the data, unless predictions are requested."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import loopwright
from loopwright.core.evaluation import predictions
from tests import models

CLASSES, BATCH = 4096, 8
ONE_BATCH = BATCH * CLASSES * 8
"""Bytes of one batch of logits."""


class Wide(nn.Module):
    """Makes large logits out of nothing, and knows which of them are still in memory."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.classes = classes
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.made: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = (x[:, None] + torch.arange(self.classes, dtype=torch.float64)).remainder(7.0) + self.bias
        self.made.append(weakref.ref(logits.untyped_storage()))
        outputs = {"logits": logits}
        return outputs if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **outputs}

    def alive(self) -> int:
        self.made = [made for made in self.made if made() is not None]
        return len(self.made)


class Rows(torch.utils.data.Dataset):
    def __init__(self, batches: int) -> None:
        self.n = batches * BATCH

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": float(index % 5), "labels": index % 7}


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {
        "x": torch.tensor([row["x"] for row in rows], dtype=torch.float64),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


class Watch(loopwright.TrainerCallback):
    """The largest number of logits in memory at the end of a prediction step."""

    def __init__(self) -> None:
        self.most = 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.most = max(self.most, model.alive())


class Running:
    """A metric object, or a function for batch_eval_metrics, with two numbers of state."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right = self.seen = 0

    def update(self, predictions: Any, labels: Any) -> None:
        self.right += int((predictions.argmax(-1) == labels).sum())
        self.seen += len(labels)

    def compute(self) -> float:
        return self.right / self.seen

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float] | None:
        self.update(prediction.predictions, prediction.label_ids)
        if not compute_result:
            return None
        result = {"accuracy": self.compute()}
        self.reset()
        return result


def small(logits: Any, labels: Any) -> Any:
    return logits.argmax(-1)


def share_right(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions == prediction.label_ids).mean())}


KINDS: dict[str, dict[str, Any]] = {
    "loss only, no metrics": {},
    "prediction_loss_only": {"compute_metrics": share_right, "prediction_loss_only": True},
    "batch_eval_metrics": {"compute_metrics": Running(), "batch_eval_metrics": True},
    "metric object": {"compute_metrics": {"accuracy": Running()}},
}


def trainer_of(folder: Any, classes: int = CLASSES, **options: Any) -> tuple[Any, Watch]:
    watch = Watch()
    made = models.trainer_of(
        Wide(classes), None, folder, collator=collate, callbacks=[watch], per_device_eval_batch_size=BATCH, **options
    )
    return made, watch


def traced_peak(trainer: Any, batches: int) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        trainer.evaluate(Rows(batches))
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


MANY = [
    (1000, "loss only, no metrics"),
    (1000, "metric object"),
    *((150, kind) for kind in ("prediction_loss_only", "batch_eval_metrics")),
    *(pytest.param(1000, kind, marks=pytest.mark.grid) for kind in ("prediction_loss_only", "batch_eval_metrics")),
]


@pytest.mark.parametrize(("batches", "kind"), MANY, ids=lambda value: str(value).replace(" ", "_"))
def test_the_peak_of_many_batches_is_that_of_ten(batches: int, kind: str, tmp_path: Any) -> None:
    trainer, watch = trainer_of(tmp_path, **KINDS[kind])
    trainer.evaluate(Rows(2))  # imports and caches
    watch.most = 0
    peak_of_ten = traced_peak(trainer, 10)
    few, watch.most = watch.most, 0
    peak_of_many = traced_peak(trainer, batches)
    assert abs(peak_of_many - peak_of_ten) < ONE_BATCH  # arrays and Python objects
    assert watch.most == few <= 2  # tensors: this batch and the one before it
    assert trainer.model.alive() == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "loss" in kind], ids=lambda name: name.replace(" ", "_"))
def test_the_loss_alone_never_keeps_logits(kind: str, tmp_path: Any) -> None:
    trainer, _ = trainer_of(tmp_path, **KINDS[kind])
    alive = []
    steps = trainer.prediction_step

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = steps(*args, **kwargs)
        alive.append(trainer.model.alive())
        assert result[1] is None and result[2] is None
        return result

    trainer.prediction_step = watched
    trainer.evaluate(Rows(5))
    assert alive == [0] * 5


@pytest.mark.parametrize("steps, most", [(None, 2), (1, 2), (4, 4), (100, 12)])
def test_outputs_wait_on_the_device_for_as_many_batches_as_asked(steps: int | None, most: int, tmp_path: Any) -> None:
    """Never fewer than two: the one being made and the one before it."""
    trainer, watch = trainer_of(tmp_path, eval_accumulation_steps=steps)
    output = trainer.predict(Rows(12))
    assert watch.most == most
    assert output.predictions.shape == (96, CLASSES)


def test_a_metric_of_small_predictions_keeps_small_predictions(tmp_path: Any) -> None:
    trainer, watch = trainer_of(tmp_path, compute_metrics=share_right, preprocess_logits_for_metrics=small)
    trainer.evaluate(Rows(2))
    assert traced_peak(trainer, 300) - traced_peak(trainer, 10) < ONE_BATCH
    assert watch.most <= 2


def test_predictions_are_kept_once(tmp_path: Any) -> None:
    """Rows are written where they stay: no list of batches that is joined in the end."""
    trainer, _ = trainer_of(tmp_path)
    trainer.predict(Rows(2))
    gc.collect()
    tracemalloc.start()
    try:
        output = trainer.predict(Rows(60))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert output.predictions.nbytes == 60 * ONE_BATCH
    assert peak < 62 * ONE_BATCH


def test_large_predictions_are_kept_in_a_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = trainer_of(tmp_path)
    plain = trainer.predict(Rows(9)).predictions
    monkeypatch.setattr(predictions, "MAP_ABOVE", ONE_BATCH)
    gc.collect()
    tracemalloc.start()
    try:
        mapped = trainer.predict(Rows(9)).predictions
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(mapped, np.memmap)
    np.testing.assert_array_equal(mapped, plain)
    assert peak < 2 * ONE_BATCH


def test_memory_of_the_process_stays_flat(tmp_path: Any) -> None:
    psutil = pytest.importorskip("psutil")
    process = psutil.Process()
    classes = 64 * CLASSES  # a batch of 16 MiB, so that a hundred of them could not be overlooked
    trainer, _ = trainer_of(tmp_path, classes, **KINDS["metric object"])

    class Resident(loopwright.TrainerCallback):
        peak = 0

        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            self.peak = max(self.peak, process.memory_info().rss)

    resident = Resident()
    trainer.add_callback(resident)
    trainer.evaluate(Rows(10))
    of_ten, resident.peak = resident.peak, 0
    trainer.evaluate(Rows(100))
    assert resident.peak - of_ten < 8 * 64 * ONE_BATCH  # the allocator keeps a few freed batches to itself
