"""Events, rotation, the best model and overrides: the same promises for every framework."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from loopwright import TrainerCallback
from loopwright.core.events import EVENTS
from loopwright.core.measure.ledger_file import read_ledger

from .frameworks import rows


class Recorder(TrainerCallback):
    """Writes down every event and the step it came at."""

    def __init__(self) -> None:
        self.events: list[str] = []


def _recording(event: str) -> Any:
    def method(self: Recorder, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(f"{event.removeprefix('on_')} {state.global_step}")

    return method


for _event in EVENTS:
    setattr(Recorder, _event, _recording(_event))

UPDATE = ["step_begin {0}", "substep_end {0}", "pre_optimizer_step {0}", "optimizer_step {0}", "step_end {1}"]


def update(step: int) -> list[str]:
    return [line.format(step - 1, step) for line in UPDATE]


def test_events_come_in_one_order(framework: Any, tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = framework.trainer(
        tmp_path, framework.net(), rows(8), evaluation=rows(4), callbacks=[recorder], num_train_epochs=1,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2,
        save_strategy="epoch",
    )  # fmt: skip
    trainer.train()
    expected = [
        "init_end 0", "train_begin 0", "epoch_begin 0", *update(1), "log 1", *update(2), "log 2", "prediction_step 2",
        "log 2", "evaluate 2", "epoch_end 2", "save 2", "log 2", "train_end 2",
    ]  # fmt: skip
    assert recorder.events == expected


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


def test_rotation_keeps_the_newest_the_best_and_what_is_pinned(framework: Any, tmp_path: Path) -> None:
    scores = iter([0.1, 0.9, 0.5, 0.4, 0.3, 0.2])

    class Pin(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                trainer._loopwright.run.checkpoints.wait()
                (tmp_path / "checkpoint-1" / "pinned").touch()

    trainer = framework.trainer(
        tmp_path, framework.net(), rows(8), evaluation=rows(4), max_steps=5, save_steps=1, eval_strategy="steps",
        eval_steps=1, save_total_limit=2, load_best_model_at_end=True, metric_for_best_model="score",
        compute_metrics=lambda prediction: {"score": next(scores)}, callbacks=[Pin()],
    )  # fmt: skip
    next(scores)  # the look at the metric's name before step 1
    held: dict[int, Any] = {}

    class Hold(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            held[state.global_step] = framework.weights(trainer)[0].copy()

    trainer.add_callback(Hold())
    scores = iter([0.1, 0.1, 0.9, 0.5, 0.4, 0.3])
    trainer.train()
    assert kept(tmp_path) == [1, 2, 5]
    assert trainer.state.best_global_step == 2 and trainer.state.best_metric == 0.9
    assert (framework.weights(trainer)[0] == held[2]).all()


def test_a_share_of_an_epoch_is_trained_and_the_numbers_add_up(framework: Any, tmp_path: Path) -> None:
    trainer = framework.trainer(tmp_path, framework.net(), rows(10), num_train_epochs=1.5, save_strategy="no")
    output = trainer.train()
    assert (output.global_step, trainer.state.epoch) == (5, pytest.approx(5 / 3))
    assert trainer._loopwright.run.progress.samples_seen == 4 + 4 + 2 + 4 + 4
    first = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
    assert first == pytest.approx([1e-2 * (5 - step) / 5 for step in range(5)])


OVERRIDES = {
    "torch": ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "create_optimizer_and_scheduler",
              "training_step", "compute_loss", "prediction_step", "evaluate", "predict", "log", "save_model",
              "_save_checkpoint", "evaluation_loop"),
    "tensorflow": ("get_train_tfdataset", "get_eval_tfdataset", "get_test_tfdataset", "create_optimizer_and_scheduler",
                   "training_step", "compute_loss", "run_model", "prediction_step", "evaluate", "predict", "log",
                   "save_model", "_save_checkpoint", "prediction_loop", "apply_gradients", "setup_wandb",
                   "setup_comet"),
}  # fmt: skip


def test_every_override_is_reached(framework: Any, tmp_path: Path) -> None:
    reached: set[str] = set()

    def overridden(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            reached.add(name)
            return getattr(super(Mine, self), name)(*args, **kwargs)

        return method

    names = OVERRIDES[framework.name]
    Mine = type("Mine", (framework.trainer_class(),), {name: overridden(name) for name in names})
    trainer = framework.trainer(
        tmp_path, framework.net(), rows(8), evaluation=rows(4), cls=Mine, max_steps=2, eval_strategy="steps",
        eval_steps=1, save_steps=2, async_save=False,
    )  # fmt: skip
    trainer.train()
    trainer.predict(rows(4))
    assert set(names) - reached == set()
    assert len([row for row in trainer.state.log_history if "eval_loss" in row]) == 2


def test_the_time_ledger_adds_up_and_the_report_is_written(framework: Any, tmp_path: Path) -> None:
    options = {"max_steps": 4, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "report_to": "none"}
    trainer = framework.trainer(tmp_path, framework.net(), rows(8), evaluation=rows(4), **options)
    started = time.time()
    trainer.train()
    found = read_ledger(tmp_path)
    assert found is not None and found.status == "finished"
    assert found.account.total == pytest.approx(found.updated - started, rel=0.01, abs=0.5)
    used = {part for part, seconds in found.account.seconds.items() if seconds > 0}
    assert {"updates", "evaluation", "saving", "preparing"} <= used
    assert ("compiling" in used) == (framework.name == "tensorflow")
    assert (tmp_path / "report.html").is_file()
