"""Runs that a signal or an interrupt ends: whose handler is called, and what the trainer does afterwards."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import loopwright
from loopwright import EarlyStoppingCallback, Trainer, TrainingArguments
from tests.models import Regression, regression_data, regression_run as run


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
