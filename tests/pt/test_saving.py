"""Saves: pinned checkpoints, a host short of memory or disk, and optimizers whose state no file can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loopwright
from loopwright import Trainer, TrainingArguments
from tests.models import Regression, regression_data, regression_run as run


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


def with_options(folder: Path, layout: str = "native", **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=np.float32(0.1), momentum=0.9)
    optimizer.param_groups[0].update(options)
    args = TrainingArguments(str(folder), max_steps=4, save_steps=2, use_cpu=True, checkpoint_format=layout)
    return Trainer(model, args, train_dataset=regression_data(16), optimizers=(optimizer, None))


@pytest.mark.parametrize("layout", ["native", "transformers"])
def test_numbers_of_numpy_in_an_optimizer_come_back_as_they_were(layout: str, tmp_path: Path) -> None:
    whole = with_options(tmp_path, layout, count=np.int64(3), on=np.bool_(True))
    whole.train()
    again = with_options(tmp_path, layout, count=np.int64(0), on=np.bool_(False))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    options = again.optimizer.param_groups[0]
    assert (options["count"], options["on"]) == (3, True)
    assert type(options["count"]) is (np.int64 if layout == "native" else int)
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_option_of_an_optimizer_that_contains_itself_is_refused_before_step_1(tmp_path: Path) -> None:
    itself: list[Any] = []
    itself.append(itself)
    trainer = with_options(tmp_path, odd=itself)
    with pytest.raises(loopwright.CheckpointError, match="more than 100 levels, or contains itself"):
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
