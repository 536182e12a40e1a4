"""The best model is the one the metric says, wherever it lies in the run and whenever checkpoints are written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright
from loopwright import MetricError, TrainerCallback
from tests import models
from tests.spreads import spread

STEPS = 12
SHAPES = {
    "first": lambda i, n: float(i),
    "last": lambda i, n: float(n - i),
    "middle": lambda i, n: abs(i - n // 2) + 0.25,
    "flat": lambda i, n: 1.0,
    "twice": lambda i, n: float(i % 3),
}
"""Losses of the i-th of n evaluations; lower is better, and of equal ones the first."""


class Line(nn.Module):
    """Learns something at every step, so that no two steps have the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.head(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(y, labels), "y": y}


def line(n: int = 24, name: float = 0.0) -> list[dict[str, Tensor]]:
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.sum() + name} for row in x]


class Snapshots(TrainerCallback):
    """The weights after every step, and the steps at which checkpoints were asked for."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.saved: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.weights[state.global_step] = models.weights(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.weights[state.global_step] = models.weights(model)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append(state.global_step)


class Scripted(loopwright.Trainer):
    """Its evaluation loss is what the script says about this step; a set's labels may choose among scripts."""

    script: Any = None

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        value = self.script(self.state.global_step, inputs) if self.script else float(loss)
        return torch.tensor(value, dtype=torch.float64), logits, labels


def make(folder: Any, script: Any = None, **options: Any) -> tuple[Any, Snapshots]:
    snapshots = Snapshots()
    options = {"max_steps": STEPS, "per_device_train_batch_size": 4, "eval_strategy": "steps", "eval_steps": 2,
               "save_strategy": "steps", "save_steps": 2, "eval_dataset": line(3), **options}  # fmt: skip
    callbacks = [snapshots, *options.pop("callbacks", [])]
    made = models.trainer_of(
        models.made(Line).float(), line(), folder, cls=Scripted, collator=None, callbacks=callbacks, **options
    )
    made.script = script
    return made, snapshots


def scripted(shape: str, every: int) -> tuple[Any, int, float]:
    """A script of the loss, the step at which it is best, and the best value."""
    steps = sorted({*range(every, STEPS + 1, every), STEPS})
    values = {step: SHAPES[shape](i, len(steps)) for i, step in enumerate(steps)}
    best = min(steps, key=lambda step: values[step])
    return lambda step, inputs: values.get(step, math.inf), best, values[best]


def assert_same_weights(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, value in models.weights(model).items():
        assert torch.equal(value, expected[name]), name


def assert_best(trainer: Any, snapshots: Snapshots, folder: Path, step: int, value: float) -> None:
    assert trainer.state.best_global_step == step
    assert trainer.state.best_metric == value
    assert trainer.state.best_model_checkpoint == str(folder / f"checkpoint-{step}")
    assert_same_weights(trainer.model, snapshots.weights[step])


@pytest.mark.parametrize(
    ("steps", "shape"), spread([(2, 2), (3, 4), (5, 2), (2, 5), (1, 12), (3, 100)], SHAPES), ids=str
)
def test_the_best_weights_are_loaded(steps: tuple[int, int], shape: str, tmp_path: Path) -> None:
    eval_steps, save_steps = steps
    script, best, value = scripted(shape, eval_steps)
    trainer, snapshots = make(
        tmp_path, script, eval_steps=eval_steps, save_steps=save_steps, load_best_model_at_end=True
    )
    trainer.train()
    assert_best(trainer, snapshots, tmp_path, best, value)
    assert {*range(save_steps, STEPS + 1, save_steps), STEPS} <= set(snapshots.saved)  # resume checkpoints as ever


@pytest.mark.parametrize(
    ("limit", "save_strategy", "shape"), spread([1, 2], ["steps", "best", "epoch", "no"], SHAPES)
)
def test_a_limit_keeps_the_best_and_the_newest(shape: str, save_strategy: str, limit: int, tmp_path: Path) -> None:
    script, best, value = scripted(shape, 2)
    trainer, snapshots = make(
        tmp_path, script, save_strategy=save_strategy, save_total_limit=limit, save_steps=3, load_best_model_at_end=True
    )
    trainer.train()
    assert_best(trainer, snapshots, tmp_path, best, value)
    left = {int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*")}
    newest = max(snapshots.saved)
    assert {best, newest} <= left and len(left) <= max(limit, len({best, newest}))


@pytest.mark.parametrize("shape", SHAPES)
def test_saving_the_best_saves_at_every_improvement_only(shape: str, tmp_path: Path) -> None:
    script, best, _ = scripted(shape, 2)
    trainer, snapshots = make(tmp_path, script, save_strategy="best", metric_for_best_model="loss")
    trainer.train()
    lowest, improved = math.inf, []
    for step in range(2, STEPS + 1, 2):
        if script(step, None) < lowest:
            lowest = script(step, None)
            improved.append(step)
    assert snapshots.saved == improved and improved[-1] == best
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert_same_weights(trainer.model, snapshots.weights[STEPS])  # nobody asked for the best to be loaded


@pytest.mark.parametrize("wanted", ["b_loss", "eval_b_loss"])
def test_a_named_set_can_decide(wanted: str, tmp_path: Path) -> None:
    """Set a is best at the first evaluation, set b in the middle."""
    falls, best, value = scripted("middle", 2)

    def script(step: int, inputs: Any) -> float:
        return falls(step, inputs) if inputs["labels"].min() > 50 else float(step)

    sets = {"b": line(3, 100.0), "a": line(3)}
    trainer, snapshots = make(
        tmp_path, script, eval_dataset=sets, metric_for_best_model=wanted, load_best_model_at_end=True
    )
    assert trainer.args.greater_is_better is False
    trainer.train()
    assert_best(trainer, snapshots, tmp_path, best, value)


DIRECTIONS = [
    ("score", None, True), ("eval_score", None, True), ("score", False, False), ("score", True, True),
    ("loss", None, False), ("eval_loss", None, False), ("token_loss", None, False), ("loss", True, True),
]  # fmt: skip


@pytest.mark.parametrize("metric, given, greater", DIRECTIONS)
def test_which_direction_is_better(metric: str, given: bool | None, greater: bool, tmp_path: Path) -> None:
    script, *_ = scripted("middle", 2)
    trainer, snapshots = make(
        tmp_path, script, metric_for_best_model=metric, greater_is_better=given, load_best_model_at_end=True
    )
    script_now = lambda p: dict.fromkeys(("score", "token_loss"), script(trainer.state.global_step, None))  # noqa: E731
    trainer.compute_metrics = script_now
    trainer.train()
    values = {step: script(step, None) for step in range(2, STEPS + 1, 2)}
    best = (max if greater else min)(values, key=lambda step: values[step])
    assert_best(trainer, snapshots, tmp_path, best, values[best])


@pytest.mark.parametrize("at", [0, 1, 3, 5])
def test_nan_is_never_the_best(at: int, tmp_path: Path) -> None:
    values = {2 * (i + 1): 10.0 - i for i in range(6)}
    values[2 * (at + 1)] = math.nan
    best = max(step for step, value in values.items() if not math.isnan(value))
    trainer, snapshots = make(tmp_path, lambda step, inputs: values.get(step, 99.0), load_best_model_at_end=True)
    trainer.train()
    assert_best(trainer, snapshots, tmp_path, best, values[best])


def test_the_start_can_be_the_best(tmp_path: Path) -> None:
    trainer, snapshots = make(
        tmp_path, lambda step, inputs: float(step), eval_on_start=True, load_best_model_at_end=True, save_total_limit=1
    )
    trainer.train()
    assert_best(trainer, snapshots, tmp_path, 0, 0.0)


@pytest.mark.parametrize(("saving", "shape"), spread([("steps", None), ("steps", 1), ("best", None)], SHAPES), ids=str)
def test_the_best_is_remembered_after_a_resume(saving: tuple[str, Any], shape: str, tmp_path: Path) -> None:
    save_strategy, limit = saving
    script, best, value = scripted(shape, 2)
    options = {"save_strategy": save_strategy, "save_steps": 3, "save_total_limit": limit}
    options["load_best_model_at_end"] = True

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 7

    first, snapshots = make(tmp_path, script, callbacks=[Stop()], **options)
    first.train()
    second, later = make(tmp_path, script, **options)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == STEPS
    snapshots.weights.update(later.weights)
    assert_best(second, snapshots, tmp_path, best, value)


@pytest.mark.parametrize("limit", [None, 1])
def test_a_best_evaluation_that_was_not_saved_leaves_the_best_checkpoint(limit: int | None, tmp_path: Path) -> None:
    """Steps 4 and 8 are saved; of the evaluations at 2, 4, 6 and 8, those at 4 and then 6 are the best so far."""
    values = {2: 3.0, 4: 2.0, 6: 1.0}
    options = {"save_steps": 4, "metric_for_best_model": "loss", "max_steps": 8, "save_total_limit": limit}
    script = lambda step, inputs: values.get(step, 4.0)  # noqa: E731
    for resumed in (None, str(tmp_path / "checkpoint-8")):
        trainer, _ = make(tmp_path, script, **options)
        trainer.train(resume_from_checkpoint=resumed)
        assert trainer.state.best_global_step == 6 and trainer.state.best_metric == 1.0
        assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
        assert models.kept(tmp_path) == [4, 8]


def test_a_checkpoint_written_before_its_evaluation_is_the_best(tmp_path: Path) -> None:
    trainer, _ = make(tmp_path, lambda step, inputs: float(step), eval_strategy="epoch", metric_for_best_model="loss")
    trainer.train()
    assert trainer.state.best_global_step == 6
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-6")


# ---- the metric's name -----------------------------------------------------------------------------------------------


def scores(prediction: Any) -> dict[str, float]:
    return {"accuracy": 0.5, "f1": 0.5}


def assert_fails_at_once(trainer: Any, snapshots: Snapshots, *names: str) -> None:
    before = models.weights(trainer.model)
    with pytest.raises(MetricError) as error:
        trainer.train()
    assert trainer.state.global_step == 0 and snapshots.weights == {}
    assert_same_weights(trainer.model, before)
    listed = str(error.value).split(": ")[-1].split(", ")
    assert listed == sorted(names)


@pytest.mark.parametrize("wanted", ["acuracy", "eval_acuracy", "train_loss", "eval_a_loss"])
@pytest.mark.parametrize("how", [{"load_best_model_at_end": True}, {"save_strategy": "best"}, {}])
def test_a_wrong_name_fails_before_the_first_step(wanted: str, how: dict[str, Any], tmp_path: Path) -> None:
    trainer, snapshots = make(tmp_path, metric_for_best_model=wanted, compute_metrics=scores, **how)
    assert_fails_at_once(trainer, snapshots, "eval_accuracy", "eval_f1", "eval_loss")


@pytest.mark.parametrize("wanted", ["loss", "c_loss", "eval_a_acuracy"])
def test_a_wrong_name_lists_those_of_every_set(wanted: str, tmp_path: Path) -> None:
    trainer, snapshots = make(tmp_path, metric_for_best_model=wanted, compute_metrics=scores,
                              eval_dataset={"a": line(3), "b": line(3)})  # fmt: skip
    names = [f"eval_{name}_{metric}" for name in "ab" for metric in ("accuracy", "f1", "loss")]
    assert_fails_at_once(trainer, snapshots, *names)


def test_a_metric_that_the_loss_alone_does_not_give_fails_before_the_first_step(tmp_path: Path) -> None:
    trainer, snapshots = make(
        tmp_path, metric_for_best_model="accuracy", compute_metrics=scores, prediction_loss_only=True
    )
    assert_fails_at_once(trainer, snapshots, "eval_loss")


def test_the_look_before_the_first_step_reads_one_batch(tmp_path: Path) -> None:
    class Counted(torch.utils.data.Dataset):
        rows, read = line(1000), 0

        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> Any:
            self.read += 1
            return self.rows[index]

    data = Counted()
    trainer, _ = make(
        tmp_path, metric_for_best_model="nothing", eval_dataset=data, per_device_eval_batch_size=5, save_strategy="no"
    )
    with pytest.raises(MetricError):
        trainer.train()
    assert data.read == 5


class Shared(torch.utils.data.IterableDataset):
    """Continues where reading stopped."""

    def __init__(self, rows: Any) -> None:
        self.rows = iter(rows)

    def __iter__(self) -> Any:
        return self.rows


def test_the_look_before_the_first_step_takes_nothing_from_a_stream(tmp_path: Path) -> None:
    sizes: list[int] = []

    def size(prediction: Any) -> dict[str, float]:
        sizes.append(len(prediction.label_ids))
        return {"size": sizes[-1]}

    trainer, _ = make(tmp_path, metric_for_best_model="size", compute_metrics=size, eval_dataset=Shared(line(10)),
                      per_device_eval_batch_size=4, max_steps=2, eval_steps=2, save_strategy="no")  # fmt: skip
    trainer.train()
    assert sizes == [10]


def test_the_look_before_the_first_step_changes_no_number(tmp_path: Path) -> None:
    def history(folder: str, **options: Any) -> list[Any]:
        trainer, _ = make(tmp_path / folder, save_strategy="no", compute_metrics=scores, **options)
        trainer.train()
        timeless = [{k: v for k, v in row.items() if "time" not in k and "per_second" not in k}
                    for row in trainer.state.log_history]  # fmt: skip
        return timeless

    assert history("with", metric_for_best_model="f1") == history("without")


@pytest.mark.parametrize("error", [ValueError, ZeroDivisionError, KeyError, RuntimeError])
def test_a_metric_that_needs_more_than_one_batch_does_not_stop_training(error: type, tmp_path: Path) -> None:
    def correlation(prediction: Any) -> dict[str, float]:
        if len(prediction.label_ids) < 6:
            raise error("too few samples")
        return {"correlation": 0.5}

    trainer, _ = make(tmp_path, metric_for_best_model="correlation", compute_metrics=correlation,
                      eval_dataset=line(6), per_device_eval_batch_size=2)  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == STEPS and trainer.state.best_metric == 0.5


class AddsInLog(Scripted):
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "eval_loss" in logs:
            logs["eval_perplexity"] = math.exp(logs["eval_loss"])
        super().log(logs, *args, **kwargs)


class Adds(TrainerCallback):
    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        metrics["eval_perplexity"] = math.exp(metrics["eval_loss"])


class Evaluates(Scripted):
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        metrics = super().evaluate(*args, **kwargs)
        return {**metrics, "eval_perplexity": math.exp(metrics["eval_loss"])}


@pytest.mark.parametrize("cls, callbacks", [(AddsInLog, []), (Scripted, [Adds()]), (Evaluates, [])])
def test_a_metric_added_by_code_of_the_users_can_decide(cls: Any, callbacks: Any, tmp_path: Path) -> None:
    trainer = models.trainer_of(
        models.made(Line).float(), line(), tmp_path, cls=cls, collator=None, callbacks=callbacks, eval_dataset=line(3),
        max_steps=4, eval_strategy="steps", eval_steps=2, metric_for_best_model="perplexity", greater_is_better=False,
        save_strategy="best", load_best_model_at_end=True,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric > 1 and trainer.state.best_global_step in (2, 4)


def test_a_metric_that_goes_missing_later_says_which_there_are(tmp_path: Path) -> None:
    names = iter([{"f1": 1.0}, {"f2": 1.0}])
    trainer, _ = make(tmp_path, metric_for_best_model="f1", compute_metrics=lambda p: next(names))
    with pytest.raises(MetricError, match="eval_f2"):
        trainer.train()
