"""An interrupted run is resumed by the same command; one that ended or failed is not. Real processes and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopwright.core.checkpoint.ownership.run_id import FILE
from loopwright.core.resuming import continuation

from .numpy_runs import Interfering, outcome, trainer_of
from .test_owner import FORK

SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "max_steps": 12}
ROOT = Path(__file__).resolve().parents[2]


def send(number: int) -> Callable[..., None]:
    return lambda *given, **context: os.kill(os.getpid(), number)


def fail(*given: Any, **context: Any) -> None:
    raise ValueError("the callback failed")


def nothing(*given: Any, **context: Any) -> None:
    pass


def _life(folder: Path, act: Any, resume: Any, words: list[str] | None, options: dict[str, Any], results: Any) -> None:
    if words is not None:
        sys.argv = words
    says: list[str] = []
    continuation.logger.handlers = []
    continuation.logger.warning = lambda text, *more, **kwargs: says.append(text)  # type: ignore[method-assign]
    trainer = trainer_of(folder, Interfering("on_step_begin", 8, act), **{**SAVED, **options})
    try:
        trainer.train(resume)
    finally:
        result = outcome(trainer) if trainer.state.global_step == 12 else None
        results.put((trainer._loopwright.run.first_step, "\n".join(says), result))
        results.close()
        results.join_thread()


def life(
    folder: Path, act: Any = nothing, resume: Any = None, words: list[str] | None = None, **options: Any
) -> tuple[int, tuple[int, str, Any] | None]:
    """A run in a process of its own: its exit code, and the step it began at, what it said, and its outcome."""
    results = FORK.Queue()
    process = FORK.Process(target=_life, args=(folder, act, resume, words, options, results))
    process.start()
    said = None
    if act is not KILL:
        said = results.get(timeout=120)
    process.join(120)
    return process.exitcode, said


KILL = send(signal.SIGKILL)


def began(folder: Path, act: Any = nothing, resume: Any = None, **more: Any) -> tuple[int, str]:
    """Where a run in a process of its own began, and what it said."""
    _, said = life(folder, act, resume, **more)
    assert said is not None
    return said[0], said[1]


def status(folder: Path) -> str:
    return str(json.loads((folder / FILE).read_text())["status"])


STOPS = {
    "SIGTERM": (send(signal.SIGTERM), 75, "interrupted", 8),
    "SIGUSR1": (send(signal.SIGUSR1), 75, "interrupted", 8),
    "SIGINT": (send(signal.SIGINT), 1, "interrupted", 6),
    "SIGKILL": (KILL, -9, "running", 6),
}


@pytest.mark.parametrize("name", STOPS)
def test_an_interrupted_run_goes_on_by_the_same_command(name: str, tmp_path: Path) -> None:
    act, code, recorded, step = STOPS[name]
    exit_code, said = life(tmp_path / "run", act, async_save=False)
    assert exit_code == code and status(tmp_path / "run") == recorded
    if said is not None:
        assert f"the same command resumes from checkpoint-{step}" in said[1]
    _, again = life(tmp_path / "run", async_save=False)
    assert again is not None and again[0] == step
    line = f"resuming the interrupted run from checkpoint-{step} (of 12 steps); set resume_from_checkpoint=False"
    assert again[1].count(f"{line} to start over") == 1
    _, whole = life(tmp_path / "whole", async_save=False)
    assert whole is not None and again[2] == whole[2]
    assert status(tmp_path / "run") == "finished"


def test_an_ended_run_does_not_go_on(tmp_path: Path) -> None:
    began(tmp_path)
    step, text = began(tmp_path)
    assert step == 0 and "interrupted" not in text and "of a finished run" in "".join(text)


def test_a_failed_run_does_not_go_on_and_the_start_says_how(tmp_path: Path) -> None:
    life(tmp_path, fail)
    assert status(tmp_path) == "failed"
    step, text = began(tmp_path, fail)
    assert step == 0 and "the last run failed and is not resumed: this run starts over" in text
    assert 'resume_from_checkpoint="auto"' in text and f'pass "{tmp_path}/checkpoint-6"' in text
    assert began(tmp_path, resume="auto")[0] == 6


@pytest.mark.parametrize("how", ["train", "argument", "old argument"])
def test_it_starts_over_when_told_so(how: str, tmp_path: Path) -> None:
    life(tmp_path, KILL)
    options = {"argument": {"resume_from_checkpoint": False}, "old argument": {"overwrite_output_dir": True}}
    step, text = began(tmp_path, resume=False if how == "train" else None, **options.get(how, {}))
    assert step == 0 and "resuming" not in text


def test_another_command_starts_over_and_says_how_to_go_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("# the first version")
    words = [str(script), "--size", "3", "--hub_token", "hf_first"]
    folder = tmp_path / "run"

    def killed_then(reason: str | None, words_then: list[str], **options: Any) -> None:
        life(folder, KILL, False, words)
        step, text = began(folder, words=words_then, **options)
        if reason is None:
            assert step in (3, 6) and "resuming the interrupted run" in text
        else:
            assert step == 0 and f"was interrupted and is not resumed ({reason})" in text
            assert f'pass "{folder}/checkpoint-' in text

    killed_then(None, words)
    killed_then(None, [*words[:4], "hf_second"])
    killed_then("its command line differs: '3' -> '4'", [words[0], "--size", "4", *words[3:]])
    killed_then("its command line differs: nothing -> '--fast'", [*words, "--fast"])
    killed_then("learning_rate: 0.02 -> 0.05", words, learning_rate=0.05)
    killed_then("it was started by train.py", [str(tmp_path / "other.py"), *words[1:]])
    life(folder, KILL, False, words)
    script.write_text("# the second version")
    step, text = began(folder, words=words)
    assert step == 0 and "(train.py has changed)" in text


def test_what_may_differ_does_not_keep_it_from_going_on(tmp_path: Path) -> None:
    life(tmp_path, KILL, take_over=True, logging_dir="monday")
    assert began(tmp_path, logging_dir="tuesday")[0] in (3, 6)


@pytest.mark.parametrize("act", [send(signal.SIGINT), send(signal.SIGTERM)])
def test_a_second_call_in_the_same_process_starts_over(act: Any, tmp_path: Path) -> None:
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer_of(tmp_path, Interfering("on_step_begin", 8, act), **SAVED).train()
    assert status(tmp_path) == "interrupted"
    again = trainer_of(tmp_path, Interfering("on_step_begin", 8, act), **SAVED)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        again.train()
    assert again._loopwright.run.first_step == 0
    last = trainer_of(tmp_path, **SAVED)
    last.train("auto")
    assert last._loopwright.run.first_step in (6, 8)


def _folds(folder: Path, killed_in: int | None, results: Any) -> None:
    """A script that trains three models in one folder."""
    for fold in range(1, 4):
        act = KILL if fold == killed_in else nothing
        trainer = trainer_of(folder, Interfering("on_step_begin", 8, act), **SAVED)
        trainer.train()
        results.put(trainer._loopwright.run.first_step)


def test_folders_of_one_relative_name_are_counted_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation, "_calls", {})
    counted = []
    for name in ("a", "b", "a"):
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)
        counted.append([continuation.count_call(place) for place in ("run", "s3://bucket/run")])
    assert counted == [[1, 1], [1, 2], [2, 3]] and continuation.count_call(tmp_path / "a" / "run") == 3


def test_several_runs_of_a_script_are_not_mixed_up(tmp_path: Path) -> None:
    """Killed in its third run and started again, the first one is not that third one."""
    for killed_in in (3, None):
        results = FORK.SimpleQueue()
        process = FORK.Process(target=_folds, args=(tmp_path, killed_in, results))
        process.start()
        process.join(120)
        assert [results.get() for _ in range(2 if killed_in else 3)] == [0] * (2 if killed_in else 3)


def test_a_failure_before_the_first_update_leaves_it_interrupted(tmp_path: Path) -> None:
    """The disk of the data was away for a moment: the progress of the run is not given up."""
    life(tmp_path, KILL, async_save=False)

    def never(*given: Any, **context: Any) -> None:
        raise OSError("the data cannot be read")

    def failing() -> None:
        trainer = trainer_of(tmp_path, **SAVED, async_save=False)
        trainer._loopwright.prepare_training = never  # type: ignore[method-assign]
        trainer.train()

    process = FORK.Process(target=failing)
    process.start()
    process.join(120)
    assert process.exitcode == 1 and status(tmp_path) == "interrupted"
    assert began(tmp_path, async_save=False)[0] == 6


@pytest.mark.parametrize("last", ["interrupted", "finished"])
def test_a_command_that_fails_before_its_first_update_leaves_the_folder_to_the_last_run(
    last: str, tmp_path: Path
) -> None:
    """A command with other arguments was refused: that is no reason to give up the checkpoints."""
    life(tmp_path, KILL if last == "interrupted" else nothing, async_save=False)
    before = json.loads((tmp_path / FILE).read_text())

    def failing() -> None:
        sys.argv = [*sys.argv, "--optim", "misspelt"]
        trainer = trainer_of(tmp_path, **SAVED, async_save=False)
        trainer._loopwright.prepare_training = fail  # type: ignore[method-assign]
        trainer.train()

    process = FORK.Process(target=failing)
    process.start()
    process.join(120)
    assert process.exitcode == 1 and json.loads((tmp_path / FILE).read_text()) == {**before, "status": last}
    assert began(tmp_path, async_save=False)[0] == (6 if last == "interrupted" else 0)


def test_an_interrupted_run_without_a_checkpoint_starts_over(tmp_path: Path) -> None:
    life(tmp_path, KILL, save_strategy="no")
    step, text = began(tmp_path, save_strategy="no")
    assert step == 0 and "was interrupted before it saved a checkpoint; this run starts over" in text


def test_weights_alone_cannot_go_on(tmp_path: Path) -> None:
    life(tmp_path, send(signal.SIGTERM))
    (tmp_path / "checkpoint-8" / "progress.json").unlink()
    manifest = tmp_path / "checkpoint-8" / "manifest.json"
    values = json.loads(manifest.read_text())
    del values["files"]["progress.json"], values["check"]
    manifest.write_text(json.dumps({**values, "check": None}))
    step, text = began(tmp_path)
    assert step == 0 and "checkpoint-8 holds the weights only" in text


def test_a_folder_of_a_living_run_that_is_taken_over_is_not_resumed(tmp_path: Path) -> None:
    process = FORK.Process(
        target=_life, args=(tmp_path, lambda *given, **context: time.sleep(30), None, None, {}, FORK.Queue())
    )
    process.start()
    end = time.monotonic() + 20
    while not (tmp_path / "checkpoint-6" / "manifest.json").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert began(tmp_path, take_over=True)[0] == 0
    process.kill()
    process.join(120)


@pytest.mark.parametrize("change", [{"status": None}, {"call": "x"}, {"status": 3}, {"command": [1]}])
def test_a_record_without_a_known_status_starts_over(change: dict[str, Any], tmp_path: Path) -> None:
    life(tmp_path, KILL)
    values = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**values, **change}))
    assert began(tmp_path)[0] == 0


def test_in_a_session_the_message_says_what_train_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, Interfering("on_step_begin", 8, send(signal.SIGINT)), **SAVED).train()
    assert 'train(resume_from_checkpoint="auto") resumes from checkpoint-6, train() starts over' in caplog.text
    assert json.loads((tmp_path / FILE).read_text())["command"] == []
    assert began(tmp_path)[0] == 6  # a session that was started again, with the same arguments
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, Interfering("on_step_begin", 8, send(signal.SIGINT)), **SAVED).train(False)
    assert began(tmp_path, learning_rate=0.5)[0] == 0


# ---- scripts --------------------------------------------------------------------------------------------------------

SCRIPT = """
    import os, signal, sys
    from tests.core.numpy_runs import Interfering, trainer_of

    number = int(sys.argv[2])
    hit = Interfering("on_step_begin", 8, lambda *given, **context: number and os.kill(os.getpid(), number))
    options = {"save_on_interrupt": True} if "--save" in sys.argv else {}
    trainer = trainer_of(sys.argv[1], hit, save_strategy="steps", save_steps=3, max_steps=12, **options)
    try:
        trainer.train()
    finally:
        print("began at", trainer._loopwright.run.first_step, "ended at", trainer.state.global_step)
"""


def script(tmp_path: Path, *words: Any, module: bool = False) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "user_script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(tmp_path)])
    command = [sys.executable, *(["-m", "user_script"] if module else [str(path)]), str(tmp_path / "run")]
    return subprocess.run(
        [*command, *map(str, words)],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_a_script_goes_on_and_ctrl_c_shows_no_traceback(tmp_path: Path) -> None:
    number = int(signal.SIGINT)
    first = script(tmp_path, number, "--save")
    assert first.returncode == -signal.SIGINT  # a shell shows 130
    assert "Traceback" not in first.stderr
    assert "interrupted after step 8; the same command resumes from checkpoint-8" in first.stderr
    second = script(tmp_path, number, "--save")
    assert "began at 8 ended at 12" in second.stdout and second.returncode == 0
    assert "resuming the interrupted run from checkpoint-8 (of 12 steps)" in second.stderr
    without = script(tmp_path, number, module=True)
    assert without.returncode in (130, -signal.SIGINT) and "Traceback" not in without.stderr
    assert "began at 0 ended at 8" in without.stdout and "resumes from checkpoint-6" in without.stderr
