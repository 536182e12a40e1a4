"""A run that is broken off anywhere and started again ends with the same bits as one that was left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from loopwright.core.shutdown.signals import STOPPED_AFTER_SAVING
from tests.spreads import some

from .numpy_child import OPTIONS as SLOW
from .numpy_runs import Interfering, Recorder, outcome, rows, samples, steps_in, trainer_of
from .numpy_trainer import NumpyTrainer

ROOT = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "eval_data": samples(7, seed=2),
    "logging_steps": 3,
}
WHOLE: dict[str, Any] = {}
"""What an unbroken run with some options comes to, computed once."""


def unbroken(**options: Any) -> dict[str, Any]:
    name = repr(sorted(options.items()))
    if name not in WHOLE:
        with TemporaryDirectory() as folder:
            trainer = trainer_of(folder, **{**OPTIONS, **options})
            trainer.train()
            WHOLE[name] = outcome(trainer)
    return dict(WHOLE[name])


def assert_rows_come_once(folder: str | Path) -> None:
    found = [(row["step"], "loss" in row, "eval_loss" in row) for row in rows(folder)]
    assert len(found) == len(set(found))


class PowerCut(Exception):
    """What breaks a run off."""


def cut(*given: Any, **context: Any) -> None:
    raise PowerCut


# ---- crashes ---------------------------------------------------------------------------------------------------------

EVENTS = ["on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end", "on_pre_optimizer_step",
          "on_optimizer_step", "on_step_end", "on_log", "on_prediction_step", "on_evaluate", "on_save",
          "on_epoch_end"]  # fmt: skip


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(1, 9)), min_size=1, max_size=4), st.booleans())
def test_a_run_that_crashes_anywhere_ends_with_the_same_bits(crashes: list[tuple[str, int]], later: bool) -> None:
    with TemporaryDirectory() as folder:
        for event, at in crashes:
            try:
                trainer_of(folder, Interfering(event, at, cut), async_save=later, **OPTIONS).train("auto")
            except PowerCut:
                continue
            return  # the event did not come that often
        trainer = trainer_of(folder, async_save=later, **OPTIONS)
        trainer.train("auto")
        assert outcome(trainer) == unbroken()
        assert_rows_come_once(folder)


@pytest.mark.parametrize("step", some([1, 2, 3, 4, 6, 8, 9, 12, 10, 5, 7, 11], step=3))
def test_every_checkpoint_leads_to_the_same_end(step: int, output_dir: str) -> None:
    trainer_of(output_dir, **{**OPTIONS, "save_steps": 1}).train()
    again = trainer_of(output_dir, **{**OPTIONS, "save_steps": 1})
    again.train(f"{output_dir}/checkpoint-{step}")
    assert outcome(again) == unbroken(save_steps=1)
    assert_rows_come_once(output_dir)


def test_a_checkpoint_that_is_damaged_is_left_out(output_dir: str) -> None:
    with pytest.raises(PowerCut):
        trainer_of(output_dir, Interfering("on_step_begin", 8, cut), **OPTIONS).train()
    weights = Path(output_dir) / "checkpoint-6" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    recorder = Recorder()
    trainer = trainer_of(output_dir, recorder, **OPTIONS)
    trainer.train(True)
    assert recorder.seen[1] == ("on_train_begin", 4)
    assert outcome(trainer) == unbroken()
    assert (Path(output_dir) / "damaged-checkpoint-6").is_dir()


# ---- signals in this process -----------------------------------------------------------------------------------------


class Signalled(NumpyTrainer):
    """Gets a signal in the n-th forward pass of its training."""

    at, number = 0, signal.SIGTERM

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        if model.is_training:
            self.at -= 1
            if self.at == 0:
                os.kill(os.getpid(), self.number)
        return super().compute_loss(model, inputs, num_items_in_batch)


def signalled(folder: str, at: int, number: int = signal.SIGTERM, **options: Any) -> NumpyTrainer:
    cls = type("Mine", (Signalled,), {"at": at, "number": number})
    return trainer_of(folder, cls=cls, **{**OPTIONS, **options})


@pytest.mark.parametrize("at", range(1, 22))
def test_a_signal_in_any_micro_batch_saves_and_leaves(at: int, output_dir: str) -> None:
    """Three epochs of 2, 2, 2 and 1 micro-batches; save_steps is far away, so only the signal saves."""
    far = {"save_steps": 100}
    with pytest.raises(SystemExit) as left:
        signalled(output_dir, at, **far).train()
    assert left.value.code == STOPPED_AFTER_SAVING
    epoch, inside = divmod(at - 1, 7)
    is_undone = inside in (0, 2, 4)  # a signal in the first of two parts: the update is undone, not finished
    assert steps_in(output_dir) == [epoch * 4 + inside // 2 + (not is_undone)]
    again = trainer_of(output_dir, **{**OPTIONS, **far})
    again.train(True)
    assert outcome(again) == unbroken(**far)
    assert_rows_come_once(output_dir)


@pytest.mark.parametrize("at", range(1, 5))
def test_a_signal_in_an_evaluation_puts_it_off(at: int, output_dir: str) -> None:
    def stop(*given: Any, **context: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(SystemExit):
        trainer_of(output_dir, Interfering("on_prediction_step", at, stop), **OPTIONS).train()
    recorder = Recorder()
    again = trainer_of(output_dir, recorder, **OPTIONS)
    again.train(True)
    assert recorder.events[:5] == ["on_init_end", "on_train_begin", "on_prediction_step", "on_log", "on_evaluate"]
    assert outcome(again) == unbroken()
    assert_rows_come_once(output_dir)


@pytest.mark.parametrize("at", [1, 2, 3, 7, 15])
def test_ctrl_c_finishes_the_update_and_saves_nothing(at: int, output_dir: str) -> None:
    before = signal.getsignal(signal.SIGINT)
    trainer = signalled(output_dir, at, signal.SIGINT, save_strategy="no")
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    epoch, inside = divmod(at - 1, 7)
    assert trainer.state.global_step == epoch * 4 + inside // 2 + 1
    assert steps_in(output_dir) == []
    assert signal.getsignal(signal.SIGINT) is before


def test_signals_are_left_alone_where_nobody_asked(output_dir: str) -> None:
    heard: list[int] = []
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        signalled(output_dir, 3, enable_jit_checkpoint=False).train()
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert heard == [signal.SIGTERM]


# ---- signals from outside --------------------------------------------------------------------------------------------


def child(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.core.numpy_child", str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder.parent)


def finished(process: subprocess.Popen[str], *, after: int | None = None, wait: float = 0.0, number: int = 0) -> Any:
    """The last line of a process that gets a signal after so many updates, and its exit code."""
    assert process.stdout is not None
    last = ""
    for count, line in enumerate(process.stdout, start=1):
        last = line
        if count == after:
            time.sleep(wait)
            process.send_signal(number)
    return last, process.wait(60)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_process_that_is_stopped_at_any_moment_goes_on_exactly(seed: int, tmp_path: Path) -> None:
    drawn, folder = random.Random(seed), tmp_path / "run"
    for _ in range(2):
        _, code = finished(
            child(folder), after=drawn.randint(1, 15), wait=drawn.random() / 50, number=signal.SIGTERM
        )
        assert code == STOPPED_AFTER_SAVING
    last, code = finished(child(folder))
    assert code == 0
    unbroken = trainer_of(tmp_path / "unbroken", **SLOW)
    unbroken.train()
    assert json.loads(last) == json.loads(json.dumps(outcome(unbroken)))
    assert_rows_come_once(folder)


def test_ctrl_c_ends_a_process_as_usual(tmp_path: Path) -> None:
    _, code = finished(child(tmp_path / "run"), after=3, number=signal.SIGINT)
    assert code == -signal.SIGINT, "what a shell shows as 130"
    assert steps_in(tmp_path / "run") == []


def test_a_second_signal_ends_a_process_at_once(tmp_path: Path) -> None:
    _, code = finished(child(tmp_path / "run", "--twice"), after=None)
    assert code == -signal.SIGTERM
    assert steps_in(tmp_path / "run") == []
