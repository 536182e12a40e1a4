"""`trainer.accelerator`: states of the user's objects in checkpoints, states in folders, numbers in the logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import loopwright
from loopwright import Trainer, TrainerCallback, TrainingArguments
from tests.models import Regression, StopAt, regression_data


class Counter:
    """Has tensors, numbers, texts and containers of them as its state."""

    def __init__(self) -> None:
        self.seen, self.mean, self.marks = 0, torch.zeros(3), {"a": (1, None), 7: [True, "b"]}

    def count(self) -> None:
        self.seen += 1
        self.mean = self.mean * 0.5 + self.seen

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "mean": self.mean, "marks": self.marks, "same": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.mean, self.marks = state["seen"], state["mean"], state["marks"]


class Counts(TrainerCallback):
    """Counts steps."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.counter.count()


OPTIONS: dict[str, Any] = {
    "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 4, "logging_steps": 1, "use_cpu": True,
    "disable_tqdm": True, "learning_rate": 1e-2,
}  # fmt: skip


def run(folder: Path, *objects: Any, counter: Counter, callbacks: tuple[Any, ...] = (), **options: Any) -> Any:
    args = TrainingArguments(str(folder), **{**OPTIONS, **options})
    trainer = Trainer(Regression(), args, train_dataset=regression_data(16), callbacks=[Counts(counter), *callbacks])
    trainer.accelerator.register_for_checkpointing(*objects)
    return trainer


@pytest.mark.parametrize("format", ["native", "transformers"])
@pytest.mark.parametrize("is_async", [False, True])
def test_registered_objects_are_saved_and_restored(tmp_path: Path, format: str, is_async: bool) -> None:
    options = {"checkpoint_format": format, "async_save": is_async}
    whole = Counter()
    run(tmp_path / "a", whole, counter=whole, **options).train()
    first, second = Counter(), Counter()
    run(tmp_path / "b", first, counter=first, callbacks=(StopAt(2),), **options).train()
    resumed = run(tmp_path / "b", second, counter=second, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert second.seen == whole.seen == 4 and torch.equal(second.mean, whole.mean) and second.marks == whole.marks
    assert not [*(tmp_path / "b").rglob("*.pkl")]


def test_an_object_that_is_registered_after_resuming_is_restored_then(tmp_path: Path) -> None:
    first, second = Counter(), Counter()
    run(tmp_path, first, counter=first, callbacks=(StopAt(2),)).train()

    class Late(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            trainer.accelerator.register_for_checkpointing(second)

    trainer = run(tmp_path, counter=second, callbacks=(Late(),))
    trainer.train(resume_from_checkpoint=True)
    assert second.seen == 4


def test_objects_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    first = Counter()
    run(tmp_path, first, counter=first, callbacks=(StopAt(2),)).train()

    class Other(Counter):
        pass

    with pytest.raises(loopwright.CheckpointError, match=r"registered.json: object 0 is a .*Counter, but a .*Other"):
        run(tmp_path, Other(), counter=first).train(resume_from_checkpoint=True)
    with pytest.raises(loopwright.LoopwrightError, match=r"not registered"):
        run(tmp_path, counter=first, strict=True).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"a Late has no state_dict\(\)"):
        run(tmp_path, type("Late", (), {})(), counter=first)

    class Open(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"file": object()}

    with pytest.raises(loopwright.CheckpointError, match=r"registered Open: 0/file is a object.*pickle"):
        run(tmp_path, Open(), counter=first)


def test_an_older_checkpoint_without_the_state_is_reported(tmp_path: Path) -> None:
    first = Counter()
    run(tmp_path, counter=first, callbacks=(StopAt(2),)).train()
    with pytest.raises(loopwright.LoopwrightError, match="has no state of the objects registered.*Counter"):
        run(tmp_path, first, counter=first, strict=True).train(resume_from_checkpoint=True)


# ---- states in folders ----------------------------------------------------------------------------------------------


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in trainer.model.state_dict().items()}


class At(TrainerCallback):
    """Calls a function after a step."""

    def __init__(self, step: int, function: Any) -> None:
        self.step, self.function = step, function

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.function()


def test_a_state_in_a_folder_is_resumed_bitwise(tmp_path: Path) -> None:
    counter, place = Counter(), tmp_path / "mine" / "step_3"
    save = At(3, lambda: saved.append(trainer.accelerator.save_state(place)))
    saved: list[str] = []
    trainer = run(tmp_path / "a", counter, counter=counter, callbacks=(save,), save_strategy="no", max_steps=5)
    trainer.train()
    assert saved == [str(place)] and not [*place.parent.glob(".*")]
    again = Counter()
    resumed = run(tmp_path / "b", again, counter=again, save_strategy="no", max_steps=5)
    resumed.train(resume_from_checkpoint=str(place))
    assert again.seen == 5 and resumed.state.global_step == 5
    assert all(torch.equal(each, weights(trainer)[name]) for name, each in weights(resumed).items())


def test_a_state_without_a_folder_is_a_checkpoint_and_a_folder_is_replaced_or_refused(tmp_path: Path) -> None:
    place, saved = tmp_path / "mine", []
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text").write_text("kept")

    def save() -> None:
        it = trainer.accelerator
        saved.extend([it.save_state(), it.save_state(place), it.save_state(str(place))])
        with pytest.raises(loopwright.CheckpointError, match="has other files"):
            it.save_state(tmp_path / "notes")

    trainer = run(tmp_path / "run", counter=Counter(), callbacks=(At(1, save),), max_steps=2, save_strategy="no")
    with pytest.raises(loopwright.NotAvailable, match=r"save_state: training has not begun.*save_model"):
        trainer.accelerator.save_state(place)
    trainer.train()
    assert [Path(each).name for each in saved] == ["checkpoint-1", "mine", "mine"]
    assert (tmp_path / "notes" / "text").read_text() == "kept"
    trainer.accelerator.save_state(tmp_path / "end")
    assert (tmp_path / "end" / "manifest.json").is_file()


def test_loading_a_state_while_training_restores_all_but_the_position(tmp_path: Path) -> None:
    kept: list[Any] = []

    def save() -> None:
        trainer.accelerator.save_state(tmp_path / "mine")
        kept.append((weights(trainer), counter.seen, trainer.optimizer.state_dict()["state"][0]["step"].clone()))

    def load() -> None:
        trainer.accelerator.load_state(tmp_path / "mine")
        kept.append((weights(trainer), counter.seen, trainer.optimizer.state_dict()["state"][0]["step"].clone()))

    counter = Counter()
    calls = (At(1, save), At(3, load))
    trainer = run(tmp_path / "run", counter, counter=counter, callbacks=calls, save_strategy="no", optim="adamw_torch")
    with pytest.raises(loopwright.NotAvailable, match=r"load_state.*resume_from_checkpoint=True"):
        trainer.accelerator.load_state()
    trainer.train()
    before, after = kept
    assert all(torch.equal(after[0][name], each) for name, each in before[0].items())
    assert after[1:] == before[1:] and trainer.state.global_step == 4


# ---- logs -----------------------------------------------------------------------------------------------------------


def test_numbers_are_logged_at_the_current_step(tmp_path: Path) -> None:
    log = At(2, lambda: trainer.accelerator.log({"mine": 0.5}, step=2))
    trainer = run(tmp_path, counter=Counter(), callbacks=(log,))
    trainer.train()
    rows = [row for row in trainer.state.log_history if "mine" in row]
    assert [(row["mine"], row["step"]) for row in rows] == [(0.5, 2)]
    with pytest.raises(ValueError, match=r"step=9, but .*current step, 4"):
        trainer.accelerator.log({"mine": 1.0}, step=9)
    with pytest.raises(loopwright.NotAvailable, match="log_kwargs"):
        trainer.accelerator.log({"mine": 1.0}, log_kwargs={"wandb": {}})
