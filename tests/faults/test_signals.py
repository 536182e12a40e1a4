"""Signals in real processes: one more checkpoint, exit code 75, and the resumed run equals an uninterrupted one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from .checks import differences, leftovers, newest_intact, result, said, trace

pytestmark = pytest.mark.xdist_group("faults-grid")

SAVED = 75
EVERY = {"save_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
"""Where a signal may come: the place, the step, and what the run has to be like for it."""
PLACES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "training step": ("step", 3, {}),
    "last step of an epoch": ("step", 4, {}),
    "first step": ("step", 1, {}),
    "last step of all": ("step", 10, {}),
    "between micro-batches": ("micro-batch", 2, {"accumulation": 3}),
    "between micro-batches of an epoch's first update": ("micro-batch", 4, {"accumulation": 3}),
    "between micro-batches of the first update": ("micro-batch", 1, {"accumulation": 3}),
    "evaluation": ("evaluation", 2, {}),
    "evaluation before a save": ("evaluation", 4, {}),
    "last evaluation": ("evaluation", 10, {}),
    "evaluation, transformers' format": ("evaluation", 4, {"checkpoint_format": "transformers"}),
    "save": ("save", 0, {"async_save": False}),
    "save in the background": ("save", 0, {}),
    "loading": ("loading", 6, {}),
    "loading an epoch's first batch": ("loading", 5, {}),
    "loading, accumulation": ("loading", 5, {"accumulation": 3}),
    "between parts of a batch that was too large": ("part", 3, {"auto_find_batch_size": True, "largest": 2}),
}


def signalled(forks: Any, folder: Path, place: str, number: int, **more: Any) -> int:
    where, step, options = PLACES[place]
    return forks.run("signalled", folder, number=int(number), where=where, step=step, **EVERY, **options, **more)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_saves_once_exits_with_75_and_nothing_changes(
    number: int, place: str, forks: Any, reference: Any, tmp_path: Path
) -> None:
    if number != signal.SIGTERM and place not in ("training step", "between micro-batches", "evaluation", "save"):
        pytest.skip("these signals take the same way; four places are enough for the others")
    folder, options = tmp_path / "run", {**EVERY, **PLACES[place][2]}
    assert signalled(forks, folder, place, number) == SAVED, said(folder)
    assert f"stopped by {signal.Signals(number).name} after saving step" in said(folder)
    last = newest_intact(folder)
    finished = trace(folder, "step")
    assert last == (finished[-1] if finished else 0), "the last finished update was not saved"
    assert sorted(set(trace(folder, "saving"))) == sorted({*range(4, last + 1, 4), last})
    assert not leftovers(folder)
    assert forks.run("train", folder, **options) == 0, said(folder)
    assert trace(folder, "begin")[-1] == last
    assert differences(folder, reference(**options)) == []


STREAMS = ("map", "iterable", "stateful", "datasets", "datasets shuffled")


STEPS = {"map": (2, 4, 5), "iterable": (2,), "stateful": (4,), "datasets": (5,), "datasets shuffled": (2, 4)}
"""Of the steps 2, 4 and 5, those that always run."""


@pytest.mark.parametrize(
    ("data", "step"),
    [
        (data, step) if step in STEPS[data] else pytest.param(data, step, marks=pytest.mark.grid)
        for data in STREAMS
        for step in (2, 4, 5)
    ],
)
def test_a_signal_between_micro_batches_with_any_data(
    data: str, step: int, forks: Any, reference: Any, tmp_path: Path
) -> None:
    """The batches of the unfinished update were already read: the stream goes back to before them."""
    if data.startswith("datasets"):
        pytest.importorskip("datasets")
    folder, options = tmp_path / "run", {**EVERY, "data": data, "accumulation": 3}
    more = {**options, "number": int(signal.SIGTERM), "where": "micro-batch", "step": step}
    assert forks.run("signalled", folder, **more) == SAVED, said(folder)
    assert newest_intact(folder) == step - 1
    assert forks.run("train", folder, **options) == 0, said(folder)
    assert differences(folder, reference(**options)) == []


@pytest.mark.parametrize(
    ("data", "workers"),
    [
        *((data, 0) for data in STREAMS),
        ("map", 2),
        ("datasets shuffled", 2),
        *(pytest.param(data, 2, marks=pytest.mark.grid) for data in ("iterable", "stateful", "datasets")),
    ],
)
def test_a_save_that_had_to_wait_for_an_evaluation_is_as_good_as_any(
    data: str, workers: int, forks: Any, reference: Any, tmp_path: Path
) -> None:
    """Interrupted in an evaluation, resumed: evaluation and save come before any update. Killed, resumed from that."""
    if data.startswith("datasets"):
        pytest.importorskip("datasets")
    folder, options = tmp_path / "run", {**EVERY, "data": data, "workers": workers, "save_steps": 2}
    more = {**options, "number": int(signal.SIGTERM), "where": "evaluation", "step": 2}
    assert forks.run("signalled", folder, **more) == SAVED, said(folder)
    assert forks.run("killed", folder, forward=1, async_save=False, **options) == -9
    assert trace(folder, "saving") == [2, 2]
    assert forks.run("train", folder, **options) == 0, said(folder)
    assert trace(folder, "begin") == [0, 2, 2]
    assert differences(folder, reference(**options)) == []


def test_an_interrupted_evaluation_is_done_after_resuming(forks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert signalled(forks, folder, "evaluation before a save", signal.SIGTERM) == SAVED
    assert trace(folder, "evaluated") == [2]
    assert forks.run("train", folder, **EVERY) == 0
    assert trace(folder, "evaluated") == [2, 4, 6, 8, 10]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
def test_a_second_signal_stops_at_once(number: int, forks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    status = signalled(forks, folder, "training step", number, times=2)
    assert status == (130 if number == signal.SIGINT else -number)
    assert trace(folder, "step") == [1, 2]
    assert newest_intact(folder) == 0


def test_an_earlier_handler_is_called_too(forks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert signalled(forks, folder, "training step", signal.SIGTERM, earlier=True) == SAVED
    assert Path(f"{folder}.trace").read_text().count("earlier handler") == 1
    assert newest_intact(folder) == 3


def test_signals_are_left_alone_when_told_so(forks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    status = signalled(forks, folder, "training step", signal.SIGTERM, enable_jit_checkpoint=False)
    assert status == -signal.SIGTERM
    assert newest_intact(folder) == 0


@pytest.mark.parametrize("place", ["training step", "between micro-batches", "loading"])
def test_ctrl_c_finishes_the_step_saves_nothing_and_goes_on_to_the_caller(
    place: str, forks: Any, reference: Any, tmp_path: Path
) -> None:
    folder, (_, step, options) = tmp_path / "run", PLACES[place]
    assert signalled(forks, folder, place, signal.SIGINT) == 130
    assert trace(folder, "step") == list(range(1, step + 1))
    assert newest_intact(folder) == step // 4 * 4
    assert forks.run("train", folder, **EVERY, **options) == 0
    assert differences(folder, reference(**EVERY, **options)) == []


def test_ctrl_c_in_a_step_that_saves_lets_it_save(forks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert signalled(forks, folder, "last step of an epoch", signal.SIGINT) == 130
    assert newest_intact(folder) == 4


SCRIPT = """
    import os, signal, sys, torch
    torch.set_num_threads(1)
    from loopwright import TrainerCallback
    from tests.faults import runs

    class Hit(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), getattr(signal, sys.argv[2]))

    trainer = runs.make(sys.argv[1])
    trainer.add_callback(Hit())
    trainer.train()
"""


@pytest.mark.parametrize(("name", "codes"), [("SIGINT", (130, -signal.SIGINT)), ("SIGTERM", (SAVED,))])
def test_the_exit_code_of_a_script(name: str, codes: tuple[int, ...], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join([str(Path(root) / "src"), root])
    ended = subprocess.run(
        [sys.executable, script, tmp_path / "run", name],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode in codes, ended.stderr.decode()[-2000:]
    assert newest_intact(tmp_path / "run") == 3


# ---- output that nobody reads ---------------------------------------------------------------------------------------

LOST: dict[str, tuple[dict[str, Any], int]] = {
    "closed terminal": ({"output": "terminal"}, SAVED),
    "closed terminal, plain lines": ({"output": "terminal", "disable_tqdm": True}, SAVED),
    "SIGHUP to loader workers too": ({"output": "pipe", "workers": 2, "number": int(signal.SIGHUP)}, SAVED),
    "closed terminal, ignored by nohup": ({"output": "terminal", "ignored": True}, 0),
    "pipe, SIGTERM": ({"output": "pipe", "number": int(signal.SIGTERM)}, SAVED),
    "pipe, Ctrl-C": ({"output": "pipe", "number": int(signal.SIGINT), "save_on_interrupt": True}, 130),
    "pipe": ({"output": "pipe"}, 0),
    "pipe, plain lines": ({"output": "pipe", "disable_tqdm": True}, 0),
}


@pytest.mark.parametrize("case", LOST)
def test_output_that_nobody_reads_any_more_costs_nothing(case: str, forks: Any, reference: Any, tmp_path: Path) -> None:
    """`python train.py | tee log`: Ctrl-C ends tee first, and each line printed after that is an error."""
    folder, (options, status) = tmp_path / "run", LOST[case]
    assert forks.run("unread", folder, **{"disable_tqdm": False, **options}) == status, said(folder)
    assert newest_intact(folder) == (3 if status else 10)
    assert forks.run("train", folder, workers=options.get("workers", 0)) == 0 if status else True
    assert differences(folder, reference(workers=options.get("workers", 0))) == []


# ---- other reasons to save or stop ----------------------------------------------------------------------------------


def test_max_runtime_stops_early_with_a_checkpoint_and_goes_on(forks: Any, reference: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = {"save_strategy": "no", "pause": 0.15}
    assert forks.run("train", folder, max_runtime=0.8, **options) == 0, said(folder)
    last = newest_intact(folder)
    assert 1 <= last < 10 and trace(folder, "step")[-1] == last
    assert "max_runtime: stopping" in said(folder)
    assert forks.run("train", folder, **options) == 0
    assert trace(folder, "begin") == [0, last]
    whole, again = result(reference(save_strategy="no"))["same"], result(folder)["same"]
    assert again["weights"] == whole["weights"] and again["train_loss"] == whole["train_loss"]


def test_saving_by_minutes(forks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert forks.run("train", folder, save_strategy="no", save_minutes=0.15 / 60, pause=0.1) == 0
    assert 3 <= len(trace(folder, "saving")) <= 6


def test_saving_by_samples(forks: Any, reference: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = {"save_strategy": "no", "save_samples": 10}
    assert forks.run("train", folder, **options) == 0
    # Updates of 4, 4, 4 and 2 samples: 10 are full in the third, 20 in the sixth, 30 in the ninth.
    assert trace(folder, "saving") == [3, 6, 9]
    assert forks.run("killed", tmp_path / "again", forward=8, async_save=False, **options) == -9
    assert forks.run("train", tmp_path / "again", **options) == 0
    assert trace(tmp_path / "again", "saving") == [3, 6, 9]
    assert differences(tmp_path / "again", reference(**options)) == []


def test_saving_when_a_file_appears(forks: Any, tmp_path: Path) -> None:
    folder, trigger = tmp_path / "run", tmp_path / "save-now"
    assert forks.run("triggered", folder, trigger=str(trigger), step=5, save_strategy="no") == 0, said(folder)
    assert trace(folder, "saving") == [5]
    assert not trigger.exists()
