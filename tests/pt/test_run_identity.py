"""Runs of the PyTorch trainer in one folder after the other: both formats of checkpoints, folders and URLs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright import Trainer, TrainerCallback, TrainingArguments, get_last_checkpoint
from loopwright.core.checkpoint.manager import CheckpointManager
from loopwright.notices import Notices
from tests.models import Regression, regression_data


class Crash(TrainerCallback):
    """Ends the run as an error would, in the update after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("the node is gone")


@pytest.fixture(params=["local", "url"])
def place(request: Any, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else request.getfixturevalue("url")


def trainer_in(place: Any, crash: int | None = None, **options: Any) -> Trainer:
    args = TrainingArguments(
        str(place),
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        speed="off",
        **{"max_steps": 6, "save_steps": 2, **options},
    )
    callbacks = [] if crash is None else [Crash(crash)]
    torch.manual_seed(0)
    return Trainer(Regression(), args, train_dataset=regression_data(32), callbacks=callbacks)


@pytest.mark.parametrize("format", ["native", "transformers"])
@pytest.mark.parametrize(("crash", "begins"), [(1, 0), (3, 2)])
def test_a_restart_uses_the_checkpoints_of_its_own_run(
    format: str, crash: int, begins: int, place: str, tmp_path: Path
) -> None:
    options = {"checkpoint_format": format, "learning_rate": 1e-3}
    trainer_in(place, **{**options, "learning_rate": 0.1, "max_steps": 9}).train()
    with pytest.raises(RuntimeError, match="the node is gone"):
        trainer_in(place, crash, **options).train()
    newest = get_last_checkpoint(place)
    assert newest == (f"{place}/checkpoint-2" if begins else None)
    again = trainer_in(place, **options, save_total_limit=1)
    again.train(resume_from_checkpoint="auto")
    assert again._loopwright.run.first_step == begins
    alone = trainer_in(tmp_path / "alone", **options)
    alone.train()
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, alone.model.state_dict()[name])
    storage = CheckpointManager(place, notices=Notices(quiet=True)).storage
    runs = {found.step: found.run for name in storage.names() if (found := storage.manifest(name))}
    assert runs[6] == again.checkpoints.current.run and runs[8] == runs[9] != runs[6]
