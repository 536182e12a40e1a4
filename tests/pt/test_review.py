"""What a second look found: small things that would surprise a user."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import loopwright
from loopwright import EarlyStoppingCallback, Trainer, TrainingArguments
from loopwright.errors import DataError
from tests.side_by_side.tasks import Regression, regression_data


def run(
    folder: Path, *, cls: Any = Trainer, model: Any = None, callbacks: Any = None, n: int = 40, **options: Any
) -> Any:
    defaults = {"per_device_train_batch_size": 4, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True,
                "learning_rate": 1e-2, "save_steps": 2}  # fmt: skip
    args = TrainingArguments(str(folder), **{**defaults, **options})
    data = regression_data(n)
    trainer = cls(model or Regression(), args, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks)
    trainer.train()
    return trainer


def test_a_finished_run_started_again_does_nothing(tmp_path: Path) -> None:
    first = run(tmp_path, max_steps=4, resume_from_checkpoint="auto")
    again = run(tmp_path, max_steps=4, resume_from_checkpoint="auto")
    assert again.state.global_step == 4
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 3)])
def test_another_batch_size_goes_on_at_the_right_sample_and_ends_with_the_epochs(
    before: int, after: int, tmp_path: Path
) -> None:
    run(tmp_path, num_train_epochs=3, per_device_train_batch_size=before, save_steps=15)
    resumed = str(tmp_path / "checkpoint-15")
    part = run(
        tmp_path / "b", num_train_epochs=3, per_device_train_batch_size=after, save_steps=1000,
        resume_from_checkpoint=resumed,
    )  # fmt: skip
    assert part._loopwright.run.progress.samples_seen == 120, "three epochs of forty samples"
    assert part.state.epoch == 3.0
    assert part.state.global_step == part.state.max_steps
    assert (tmp_path / "b" / f"checkpoint-{part.state.max_steps}").is_dir(), "the last step is saved"
    assert part.lr_scheduler.get_last_lr()[0] == 0.0, "the schedule ends with the run"


class Milestones(Trainer):
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        optimizer = optimizer or self.optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 7])
        return self.lr_scheduler


def test_a_users_scheduler_resumes(tmp_path: Path) -> None:
    rates = [
        [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
        for trainer in (
            run(tmp_path, cls=Milestones, max_steps=10),
            run(tmp_path / "b", cls=Milestones, max_steps=10, resume_from_checkpoint=str(tmp_path / "checkpoint-2")),
        )
    ]
    assert rates[0] == rates[1] and len(set(rates[0])) == 3


def test_a_new_run_in_an_old_folder_keeps_its_own_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, max_steps=10, save_steps=5)
    run(tmp_path, max_steps=4, save_steps=2, save_total_limit=1)
    assert (tmp_path / "checkpoint-4").is_dir()
    assert "checkpoints of an earlier run up to step 10" in caplog.text


def test_patience_given_on_resume_counts(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "max_steps": 8}
    run(tmp_path, callbacks=[EarlyStoppingCallback(1)], **options)
    again = EarlyStoppingCallback(50)
    run(tmp_path / "b", callbacks=[again], resume_from_checkpoint=str(tmp_path / "checkpoint-2"), **options)
    assert again.early_stopping_patience == 50


def test_a_run_of_nothing_but_nan_has_no_loss_of_zero(tmp_path: Path) -> None:
    class Nan(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            return model(**inputs)["loss"] * float("nan")

    trainer = run(tmp_path, cls=Nan, max_steps=3)
    final = trainer.state.log_history[-1]["train_loss"]
    assert final != final


def test_changed_arguments_are_named_on_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, max_steps=4)
    run(tmp_path / "b", max_steps=4, learning_rate=0.5, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "learning_rate (0.01 -> 0.5)" in caplog.text


def test_what_compute_loss_logs_is_logged_once_per_micro_batch(tmp_path: Path) -> None:
    class Logs(Trainer):
        def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = model(**inputs)["loss"]
            self.log({"part": float(loss)})
            return loss

    trainer = run(tmp_path, cls=Logs, max_steps=2, gradient_accumulation_steps=2)
    assert sum("part" in row for row in trainer.state.log_history) == 4


def test_tokens_do_not_reach_run_json(tmp_path: Path) -> None:
    code = f"from loopwright.core.run_record import write_record; write_record({str(tmp_path)!r})"
    words = ["--hub_token", "hf_SECRET", "--api-key=SECRET", "--steps", "3"]
    subprocess.run([sys.executable, "-c", code, *words], check=True, timeout=60)
    text = (tmp_path / "run.json").read_text()
    assert "SECRET" not in text and "--steps" in json.loads(text)["argv"]


def test_an_earlier_handler_that_leaves_is_called_after_saving(tmp_path: Path) -> None:
    class Signals(loopwright.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                signal.raise_signal(signal.SIGTERM)

    earlier = signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    try:
        with pytest.raises(SystemExit) as caught:
            run(tmp_path, max_steps=8, save_strategy="no", callbacks=[Signals()])
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert caught.value.code == 3
    assert (tmp_path / "checkpoint-4").is_dir()


@pytest.mark.parametrize("thing", [{"x": [1], "labels": [2]}, (each for each in range(3))], ids=["dict", "generator"])
def test_what_is_no_dataset_is_named(thing: Any, tmp_path: Path) -> None:
    trainer = Trainer(Regression(), TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True), train_dataset=thing)
    with pytest.raises(DataError, match="the training dataset is a"):
        trainer.train()


def test_tokenizer_is_still_a_name_for_the_processor(tmp_path: Path) -> None:
    processor = object()
    trainer = Trainer(Regression(), TrainingArguments(str(tmp_path), use_cpu=True), processing_class=processor)
    assert trainer.tokenizer is processor


def test_a_collator_of_the_users_own_that_chokes_on_extra_columns_is_spared_them(tmp_path: Path) -> None:
    def strict(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in samples[0]}

    data = [{**sample, "text": "words"} for sample in regression_data(8)]
    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, save_strategy="no", disable_tqdm=True)
    assert Trainer(Regression(), args, strict, train_dataset=data).train().global_step == 2


def test_after_an_interrupted_run_evaluation_is_evaluation_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stop(loopwright.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise KeyboardInterrupt

    stopping = EarlyStoppingCallback(1)
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, eval_strategy="steps", eval_steps=5, metric_for_best_model="loss", logging_steps=1
    )
    data = regression_data(40)
    trainer = Trainer(Regression(), args, train_dataset=data, eval_dataset=data[:4], callbacks=[Stop(), stopping])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    capsys.readouterr()
    for _ in range(3):
        trainer.evaluate()
    assert "step 2/" not in capsys.readouterr().out
    assert stopping.early_stopping_patience_counter == 0


def test_a_pinned_checkpoint_stays_and_does_not_count(tmp_path: Path) -> None:
    class Pin(loopwright.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                (tmp_path / "checkpoint-4" / "pinned").touch()

    trainer = run(tmp_path, max_steps=10, save_total_limit=2, async_save=False, callbacks=[Pin()])
    assert sorted(trainer._loopwright.run.checkpoints.complete()) == [4, 8, 10]
    assert trainer._loopwright.run.checkpoints.find(str(tmp_path / "checkpoint-4")) == str(tmp_path / "checkpoint-4")


@pytest.mark.parametrize(("free", "background"), [(10**12, True), (10, False), (None, True)])
def test_a_host_short_of_memory_saves_at_once(
    free: int | None, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    save = loopwright.core.checkpoint.manager.CheckpointManager.save

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["background"])
        return save(self, *args, **kwargs)

    monkeypatch.setattr("loopwright.core.checkpoint.manager.CheckpointManager.save", watched)
    monkeypatch.setattr("loopwright.pt.checkpoint.save.free_memory", lambda: free)
    run(tmp_path, max_steps=2)
    assert seen == [background]


class Odd(torch.optim.SGD):
    """An optimizer that keeps something no JSON or tensor file can hold."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["secret"] = object()
        return super().step(closure)


def test_optimizer_state_that_cannot_be_saved_is_refused_before_step_1(tmp_path: Path) -> None:
    model = Regression()
    args = TrainingArguments(str(tmp_path), max_steps=4, save_steps=2, use_cpu=True, disable_tqdm=True)
    trainer = Trainer(
        model, args, train_dataset=regression_data(16), optimizers=(Odd(model.parameters(), lr=0.1), None)
    )
    with pytest.raises(loopwright.CheckpointError, match="secret.*cannot be saved without pickle"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(("free", "raises"), [(10, True), (6000, False)])
def test_space_is_compared_before_step_1(
    free: int, raises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("loopwright.core.checkpoint.space.free_bytes", lambda folder: free)
    if raises:
        with pytest.raises(loopwright.OutputError, match="has only .* free. Free some space"):
            run(tmp_path, max_steps=20)
        assert not list(tmp_path.glob("checkpoint-*"))
    else:
        run(tmp_path, max_steps=20)
        assert "lower save_total_limit" in caplog.text
