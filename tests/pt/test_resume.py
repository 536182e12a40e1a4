"""A run that is interrupted and resumed ends with the bits of one that was not."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import loopwright
from loopwright import CheckpointError, EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from loopwright.core.state import ExportableState
from tests.models import Regression, StopAt, kept, regression_data

TIMES = ("runtime", "per_second", "preparation_time")


class Noisy(torch.utils.data.Dataset):
    """Draws from Python's, numpy's and torch's streams for every sample."""

    def __init__(self, n: int) -> None:
        self.rows = regression_data(n)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = random.random() + float(np.random.rand()) + torch.rand(()).item()
        return {"x": self.rows[index]["x"] + noise, "labels": self.rows[index]["labels"]}


class NoisyStream(IterableDataset):
    def __init__(self, n: int) -> None:
        self.rows = Noisy(n)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return (self.rows[(i + self.epoch) % len(self.rows)] for i in range(len(self.rows)))


def arguments(folder: Any, **options: Any) -> TrainingArguments:
    options = {"per_device_train_batch_size": 4, "max_steps": 10, "logging_steps": 1, "save_steps": 3, "use_cpu": True,
               "disable_tqdm": True, "learning_rate": 1e-2, "warmup_steps": 2, "weight_decay": 0.1,
               **options}  # fmt: skip
    return TrainingArguments(str(folder), **options)


def make(
    folder: Any, *, data: Any = None, dropout: float = 0.3, callbacks: Any = None, cls: Any = Trainer, **options: Any
) -> Any:
    torch.manual_seed(0)
    data = regression_data(14) if data is None else data
    return cls(
        Regression(dropout), arguments(folder, **options), train_dataset=data, eval_dataset=regression_data(6),
        callbacks=callbacks,
    )  # fmt: skip


def numbers(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The logged numbers, without those a clock made."""
    return [{k: v for k, v in row.items() if not k.endswith(TIMES)} for row in log_history]


def assert_same_end(resumed: Any, whole: Any) -> None:
    """Weights, optimizer, schedule and logs are equal to the bit."""
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    ours, theirs = resumed.optimizer.state_dict(), whole.optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for index, slots in theirs["state"].items():
        for slot, value in slots.items():
            assert torch.equal(torch.as_tensor(ours["state"][index][slot]), torch.as_tensor(value)), (index, slot)
    assert resumed.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()
    assert numbers(resumed.state.log_history) == numbers(whole.state.log_history)
    for name in ("global_step", "epoch", "max_steps", "best_metric", "best_global_step", "total_flos"):
        assert getattr(resumed.state, name) == getattr(whole.state, name), name


CASES: dict[str, dict[str, Any]] = {
    "plain": {"dropout": 0.0},
    "dropout": {},
    "accumulation": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2},
    "logging seldom": {"logging_steps": 4},
    "logging by epoch": {"logging_strategy": "epoch"},
    "saving at the end of an epoch": {"save_strategy": "epoch"},
    "saving on the last step of an epoch": {"save_steps": 4},
    "saving on the last step of an epoch that is logged": {"save_steps": 4, "logging_strategy": "epoch"},
    "evaluating": {"eval_strategy": "steps", "eval_steps": 2},
    "evaluating and saving by epoch": {"eval_strategy": "epoch", "save_strategy": "epoch"},
    "drop last": {"dataloader_drop_last": True},
    "grouped": {"train_sampling_strategy": "sequential"},
    "cosine": {"lr_scheduler_type": "cosine"},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1},
    "sgd": {"optim": "sgd"},
    "adafactor": {"optim": "adafactor"},
    "data seed": {"data_seed": 9},
}
NOISY: dict[str, dict[str, Any]] = {
    "noise in the data": {},
    "noise, epochs": {"save_strategy": "epoch"},
    "noise, accumulation": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2},
    "noise, two workers": {"dataloader_num_workers": 2},
    "noise, two workers, epochs": {"dataloader_num_workers": 2, "save_strategy": "epoch"},
    "noise, persistent workers": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "max_steps": 6},
    "noise, evaluating": {"eval_strategy": "steps", "eval_steps": 2},
}


def resume_from_each(folder: Path, make_again: Any) -> list[int]:
    """Train once, then from each of its checkpoints; all must end alike. Returns the steps resumed from."""
    whole = make_again(folder / "whole")
    result = whole.train()
    checkpoints = sorted((folder / "whole").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    steps = []
    for path in checkpoints:
        step = int(path.name.split("-")[1])
        if step == whole.state.global_step:
            continue
        resumed = make_again(folder / f"from-{step}")
        again = resumed.train(resume_from_checkpoint=str(path))
        assert_same_end(resumed, whole)
        assert again.training_loss == result.training_loss
        steps.append(step)
    return steps


@pytest.mark.parametrize("name", CASES)
def test_resume_from_every_checkpoint_is_exact(name: str, tmp_path: Path) -> None:
    steps = resume_from_each(tmp_path, lambda folder: make(folder, **CASES[name]))
    assert len(steps) >= 2


@pytest.mark.parametrize("name", NOISY)
def test_resume_is_exact_with_random_numbers_in_the_data(name: str, tmp_path: Path) -> None:
    steps = resume_from_each(tmp_path, lambda folder: make(folder, data=Noisy(14), **NOISY[name]))
    assert steps


@pytest.mark.parametrize(("workers", "stays"), [(0, False), (2, False), (1, True)])
def test_resume_of_a_stream_is_exact(workers: int, stays: bool, tmp_path: Path) -> None:
    options = {"dataloader_num_workers": workers, "dataloader_persistent_workers": stays}
    steps = resume_from_each(tmp_path, lambda folder: make(folder, data=NoisyStream(14), **options))
    assert steps == [3, 6, 9]


def test_resume_with_a_sampler_of_the_users_own_reads_again_and_says_so(tmp_path: Path, caplog: Any) -> None:
    class Theirs(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    steps = resume_from_each(tmp_path, lambda folder: make(folder, cls=Theirs))
    assert steps == [3, 6, 9]
    assert "cannot seek: re-reading and skipping the 3 batches" in caplog.text


def test_resume_in_the_folder_of_the_run_finds_the_newest_checkpoint(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole")
    whole.train()
    first = make(tmp_path / "parts", callbacks=[StopAt(5)])
    first.train()
    assert first.state.global_step == 5
    second = make(tmp_path / "parts")
    second.train(resume_from_checkpoint=True)
    assert_same_end(second, whole)


def test_resume_from_checkpoint_may_be_an_argument(tmp_path: Path) -> None:
    make(tmp_path / "run").train()
    again = make(tmp_path / "run", resume_from_checkpoint=str(tmp_path / "run/checkpoint-6"))
    seen: list[int] = []
    again.add_callback(Steps(seen))
    again.train()
    assert seen == [7, 8, 9, 10]


class Steps(TrainerCallback):
    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(state.global_step)


@pytest.mark.parametrize("step", range(1, 10))
def test_resume_from_a_stop_at_any_step_is_exact(step: int, tmp_path: Path) -> None:
    """Four updates make an epoch: this meets the first, the last and the middle of one."""
    whole = make(tmp_path / "whole", logging_steps=3, save_strategy="no")
    result = whole.train()
    make(tmp_path / "parts", logging_steps=3, save_strategy="no", callbacks=[StopAt(step)]).train()
    second = make(tmp_path / "parts", logging_steps=3, save_strategy="no")
    again = second.train(resume_from_checkpoint=True)
    last = [row for row in second.state.log_history if "train_loss" not in row]
    assert numbers(last) == numbers([row for row in whole.state.log_history if "train_loss" not in row])
    assert again.training_loss == result.training_loss
    for name, value in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value), name


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    """With a schedule that does not depend on the length, longer is the same as having planned it so."""
    options = {"lr_scheduler_type": "constant"}
    whole = make(tmp_path / "whole", **options)
    whole.train()
    make(tmp_path / "parts", max_steps=6, **options).train()
    second = make(tmp_path / "parts", **options)
    second.train(resume_from_checkpoint=True)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value), name


def test_ignore_data_skip_starts_the_epoch_anew(tmp_path: Path) -> None:
    make(tmp_path / "run", save_steps=2).train()
    again = make(tmp_path / "run", ignore_data_skip=True)
    again.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    epochs = [row["epoch"] for row in again.state.log_history if "loss" in row]
    assert epochs[:6] == [0.25, 0.5, 0.25, 0.5, 0.75, 1.0]
    assert again.state.global_step == 10
    assert again._loopwright.run.progress.samples_seen == 8 + 14 + 14


def test_ignore_data_skip_repeats_no_complete_epoch(tmp_path: Path) -> None:
    """The checkpoint of the last step of an epoch is written before the epoch ends."""
    make(tmp_path / "run", save_steps=4).train()
    again = make(tmp_path / "run", ignore_data_skip=True)
    again.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-4"))
    assert [row["epoch"] for row in again.state.log_history if "loss" in row][3:6] == [1.0, 1.25, 1.5]


class OwnGenerator(Trainer):
    def get_train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=4, shuffle=True, generator=generator)


@pytest.mark.parametrize(("strategy", "step"), [("steps", 6), ("epoch", 8)])
def test_the_random_generator_of_a_loader_of_the_user_is_restored(strategy: str, step: int, tmp_path: Path) -> None:
    whole, part = (make(tmp_path / name, cls=OwnGenerator, save_strategy=strategy) for name in ("whole", "part"))
    whole.train()
    part.train(resume_from_checkpoint=str(tmp_path / f"whole/checkpoint-{step}"))
    assert_same_end(part, whole)


# ---- callbacks ------------------------------------------------------------------------------------------------------


class Counter(TrainerCallback, ExportableState):
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"count": self.count}, "attributes": {}}


class Modern(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(state.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def test_callbacks_get_their_state_back(tmp_path: Path) -> None:
    make(tmp_path / "run", callbacks=[Counter(), Modern()]).train()
    counter, modern = Counter(), Modern()
    make(tmp_path / "run", callbacks=[counter, modern]).train(str(tmp_path / "run/checkpoint-6"))
    assert counter.count == 10
    assert modern.seen == list(range(1, 11))


def test_callbacks_do_not_get_their_state_back_when_told_so(tmp_path: Path) -> None:
    make(tmp_path / "run", callbacks=[Counter()]).train()
    counter = Counter()
    make(tmp_path / "run", callbacks=[counter], restore_callback_states_from_checkpoint=False).train(
        str(tmp_path / "run/checkpoint-6")
    )
    assert counter.count == 4


class Worse(Trainer):
    """Every evaluation after the first is worse."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self._loopwright._count = self.state.global_step
        return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics["eval_score"] = 1.0 / (1 + self.state.global_step)
        return output


def test_early_stopping_stops_a_resumed_run_where_it_would_have_stopped(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "score", "save_steps": 2}
    whole = make(tmp_path / "whole", cls=Worse, callbacks=[EarlyStoppingCallback(4)], **options)
    whole.train()
    assert whole.state.global_step == 5
    resumed = make(tmp_path / "again", cls=Worse, callbacks=[EarlyStoppingCallback(4)], **options)
    resumed.train(str(tmp_path / "whole/checkpoint-4"))
    assert resumed.state.global_step == 5
    assert_same_end(resumed, whole)


# ---- keeping, removing, choosing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, [2, 4, 6, 8, 10]), (1, [10]), (2, [8, 10]), (9, [2, 4, 6, 8, 10])]
)
@pytest.mark.parametrize("async_save", [False, True])
def test_save_total_limit_keeps_the_newest(limit: Any, expected: list[int], async_save: bool, tmp_path: Path) -> None:
    make(tmp_path, save_steps=2, save_total_limit=limit, async_save=async_save).train()
    assert kept(tmp_path) == expected
    assert not list(tmp_path.glob(".checkpoint*")), "something half-written is left"


def test_the_best_checkpoint_is_never_removed_and_is_loaded_at_the_end(tmp_path: Path) -> None:
    class BestAtFour(Trainer):
        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            output = super().evaluation_loop(*args, **kwargs)
            output.metrics["eval_score"] = -abs(self.state.global_step - 4.0)
            return output

    options = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "metric_for_best_model": "score",
               "load_best_model_at_end": True, "save_total_limit": 2}  # fmt: skip
    trainer = make(tmp_path / "run", cls=BestAtFour, **options)
    trainer.train()
    assert kept(tmp_path / "run") == [4, 10]
    assert trainer.state.best_global_step == 4
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run/checkpoint-4")
    best = loopwright.load_model(Regression(0.3), tmp_path / "run/checkpoint-4")
    for name, value in best.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value)


def test_saving_only_the_best(tmp_path: Path) -> None:
    trainer = make(
        tmp_path, cls=Worse, eval_strategy="steps", eval_steps=2, save_strategy="best", metric_for_best_model="score"
    )
    trainer.train()
    assert kept(tmp_path) == [2]


# ---- reading back ---------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        self.count += 1
        logits = self.out(self.embed(ids))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_plain_module_loads_back_with_one_call(tmp_path: Path) -> None:
    data = [{"ids": i % 5, "labels": (i + 1) % 5} for i in range(12)]
    trainer = Trainer(Tied(), arguments(tmp_path, max_steps=3), train_dataset=data)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "checkpoint-3", tmp_path / "saved"):
        model = Tied()
        assert loopwright.load_model(model, folder) is model
        assert model.out.weight is model.embed.weight
        for name, value in trainer.model.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
    assert model.count == 3


def test_tied_weights_resume_exactly(tmp_path: Path) -> None:
    data = [{"ids": i % 5, "labels": (i + 1) % 5} for i in range(12)]

    def fresh(folder: Path) -> Any:
        torch.manual_seed(0)
        return Trainer(Tied(), arguments(folder, weight_decay=0.0), train_dataset=data)

    assert resume_from_each(tmp_path, fresh) == [3, 6, 9]


def test_a_checkpoint_that_does_not_fit_says_what_is_wrong(tmp_path: Path) -> None:
    make(tmp_path, max_steps=3).train()
    message = "do not fit the model. missing: count; unexpected: hidden.*a different shape: out.weight"
    with pytest.raises(CheckpointError, match=message):
        loopwright.load_model(Tied(), tmp_path / "checkpoint-3")
    with pytest.raises(CheckpointError, match="no model.safetensors"):
        loopwright.load_model(Tied(), tmp_path)


@pytest.mark.parametrize(
    "victim", ["model.safetensors", "optimizer.safetensors", "progress.json", "rng.json", "manifest.json"]
)
def test_a_damaged_checkpoint_is_set_aside_and_the_older_one_used(victim: str, tmp_path: Path, caplog: Any) -> None:
    whole = make(tmp_path / "whole")
    whole.train()
    make(tmp_path / "run", max_steps=10, callbacks=[StopAt(7)]).train()
    assert kept(tmp_path / "run") == [3, 6, 7]
    path = tmp_path / "run/checkpoint-7" / victim
    path.write_bytes(path.read_bytes()[:-20])
    resumed = make(tmp_path / "run")
    seen: list[int] = []
    resumed.add_callback(Steps(seen))
    resumed.train(resume_from_checkpoint=True)
    assert seen == [7, 8, 9, 10]
    assert_same_end(resumed, whole)
    if victim != "manifest.json":
        assert f"checkpoint-7: {victim} is" in caplog.text
        assert (tmp_path / "run/damaged-checkpoint-7").is_dir()


def test_a_damaged_checkpoint_named_by_the_user_is_an_error(tmp_path: Path) -> None:
    make(tmp_path).train()
    path = tmp_path / "checkpoint-6/model.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"checkpoint-6: model.safetensors is [\d,]+ bytes, the manifest says"):
        make(tmp_path).train(str(tmp_path / "checkpoint-6"))


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    make(tmp_path).train()
    path = tmp_path / "checkpoint-6/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        make(tmp_path).train(str(tmp_path / "checkpoint-6"))


def test_auto_starts_fresh_and_true_does_not(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match='No valid checkpoint found.*"auto"'):
        make(tmp_path / "run").train(resume_from_checkpoint=True)
    seen: list[int] = []
    make(tmp_path / "run", callbacks=[Steps(seen)]).train(resume_from_checkpoint="auto")
    assert seen == list(range(1, 11))
    seen.clear()
    make(tmp_path / "run", max_steps=12, callbacks=[Steps(seen)]).train(resume_from_checkpoint="auto")
    assert seen == [11, 12]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        make(tmp_path).train(str(tmp_path / "nowhere"))


def test_a_checkpoint_of_weights_only_cannot_be_resumed_from(tmp_path: Path) -> None:
    make(tmp_path, save_only_model=True).train()
    files = {path.name for path in (tmp_path / "checkpoint-6").iterdir()}
    assert "model.safetensors" in files and not any(name.startswith(("optimizer", "rng", "progress")) for name in files)
    with pytest.raises(CheckpointError, match="save_only_model=True"):
        make(tmp_path).train(str(tmp_path / "checkpoint-6"))


def test_saving_in_the_background_writes_the_same_bytes(tmp_path: Path) -> None:
    for name, async_save in (("now", False), ("later", True)):
        make(tmp_path / name, async_save=async_save, save_steps=2).train()
    for step in (2, 4, 6, 8, 10):
        now, later = (tmp_path / name / f"checkpoint-{step}" for name in ("now", "later"))
        assert {path.name for path in now.iterdir()} == {path.name for path in later.iterdir()}
        for path in now.iterdir():
            if path.name in ("manifest.json", "arguments.json", "trainer_state.json"):
                continue  # they name the folder, or a time
            assert path.read_bytes() == (later / path.name).read_bytes(), f"{step}: {path.name}"


def test_a_failed_background_save_is_not_lost(tmp_path: Path, monkeypatch: Any) -> None:
    from loopwright.pt.checkpoint import save as saving

    monkeypatch.setattr(saving, "write_optimizer", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(CheckpointError, match="disk full"):
        make(tmp_path).train()
    assert kept(tmp_path) == []
    assert not list(tmp_path.glob(".checkpoint*"))


def test_a_failed_last_background_save_is_not_lost(tmp_path: Path, monkeypatch: Any) -> None:
    from loopwright.pt.checkpoint import save as saving

    monkeypatch.setattr(saving, "write_optimizer", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(CheckpointError, match="disk full"):
        make(tmp_path, save_steps=10).train()


def test_nothing_in_a_checkpoint_is_pickled_and_the_manifest_lists_all_of_it(tmp_path: Path) -> None:
    make(tmp_path).train()
    folder = tmp_path / "checkpoint-6"
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {Path(name).suffix for name in names} <= {".safetensors", ".json"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == names - {"manifest.json"}
    assert manifest["step"] == 6


def test_the_second_train_of_a_trainer_starts_from_step_zero(tmp_path: Path) -> None:
    trainer = make(tmp_path, save_strategy="no")
    trainer.train()
    first = trainer.state.log_history[-1]["train_loss"]
    trainer.train()
    assert trainer.state.global_step == 10
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 10 and math.isfinite(first)
