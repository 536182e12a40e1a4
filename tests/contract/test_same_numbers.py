"""Numbers that must not depend on how a batch is split, nor on the framework that computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .frameworks import FRAMEWORKS, IGNORED, needs_tensorflow, rows, sentences

PLAIN = {"save_strategy": "no", "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"}


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def norms(trainer: Any) -> list[float]:
    return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]


SPLITS = [(12, 1), (6, 2), (4, 3), (3, 4), (2, 6), (1, 12), (5, 3)]
"""Micro-batch and accumulation: always twelve sentences per update, of whose labels another number counts in each."""


def test_losses_and_weights_do_not_depend_on_how_an_update_is_cut_up(framework: Any, tmp_path: Any) -> None:
    found = {}
    splits = SPLITS if framework.name == "torch" else [(12, 1), (3, 4), (5, 3)]  # each costs a compilation
    for size, accumulation in splits:
        trainer = framework.trainer(
            tmp_path, framework.tokens(), sentences(12), max_steps=3, per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation, max_grad_norm=0.1, **PLAIN,
        )  # fmt: skip
        trainer.train()
        found[size, accumulation] = (losses(trainer), norms(trainer), framework.weights(trainer))
    whole = found[12, 1]
    for split, (loss, norm, weights) in found.items():
        assert loss == pytest.approx(whole[0], rel=2e-6), split
        assert norm == pytest.approx(whole[1], rel=2e-5), split
        for mine, theirs in zip(weights, whole[2], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-6, err_msg=str(split))
    assert min(whole[1]) > 0.1, "nothing was clipped"


def test_the_first_loss_is_the_mean_over_all_targets(framework: Any, tmp_path: Any) -> None:
    trainer = framework.trainer(
        tmp_path, framework.tokens(), sentences(12), max_steps=1, per_device_train_batch_size=5,
        gradient_accumulation_steps=3, **PLAIN,
    )  # fmt: skip
    embed, kernel, bias = framework.weights(trainer)
    trainer.train()
    total = count = 0.0
    for row in sentences(12):
        logits = np.tanh(embed[row["input_ids"]]) @ kernel + bias
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for position, label in enumerate(row["labels"]):
            if label != IGNORED:
                total -= logs[position, label]
                count += 1
    assert losses(trainer)[0] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize(("size", "n"), [(4, 7), (3, 7)])
def test_evaluation_is_exact(size: int, n: int, framework: Any, tmp_path: Any) -> None:
    seen: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append((prediction.predictions, prediction.label_ids))
        return {"mean": float(np.mean(prediction.predictions))}

    trainer = framework.trainer(
        tmp_path, framework.net(), rows(4), evaluation=rows(n), compute_metrics=metrics,
        per_device_eval_batch_size=size,
    )  # fmt: skip
    first, bias, last, end = framework.weights(trainer)
    x = np.stack([row["x"] for row in rows(n)])
    labels = np.stack([row["labels"] for row in rows(n)])
    expected = np.tanh(x @ first + bias) @ last + end
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(np.mean((expected - labels) ** 2), rel=1e-5)
    assert found["eval_mean"] == pytest.approx(expected.mean(), rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(seen[0][0], expected, atol=1e-5)
    np.testing.assert_array_equal(seen[0][1], labels)
    predicted = trainer.predict(rows(n))
    assert predicted.predictions.shape == (n, 1) and "test_loss" in predicted.metrics


@pytest.mark.xdist_group("tensorflow")
@needs_tensorflow[1]
@pytest.mark.parametrize("task", ["net", "tokens"])
def test_both_frameworks_take_the_same_steps(task: str, tmp_path: Any) -> None:
    """The same initial weights, the same order: the same losses, norms and weights."""
    results = []
    for framework in FRAMEWORKS.values():
        data = rows(14) if task == "net" else sentences(14)
        trainer = framework.trainer(
            tmp_path / framework.name, getattr(framework, task)(), data, num_train_epochs=2, weight_decay=0.1,
            save_strategy="no", warmup_steps=2, gradient_accumulation_steps=2, per_device_train_batch_size=3,
        )  # fmt: skip
        trainer.train()
        results.append((losses(trainer), norms(trainer), framework.weights(trainer), trainer.state.log_history))
    (loss, norm, weights, log), (other_loss, other_norm, other_weights, other_log) = results
    assert len(loss) == 6
    assert loss == pytest.approx(other_loss, rel=1e-4)
    assert norm == pytest.approx(other_norm, rel=1e-3)
    for mine, theirs in zip(weights, other_weights, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-4)
    keys = [sorted(row) for row in log]
    assert keys == [sorted(row) for row in other_log], "the logs have other keys"
    assert [row.get("learning_rate") for row in log] == [row.get("learning_rate") for row in other_log]
