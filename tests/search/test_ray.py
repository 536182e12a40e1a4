"""Searching with Ray Tune, on a real Ray of this machine with two workers."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loopwright.core.events import TrainerCallback
from loopwright.errors import ArgumentsError
from tests.search.toy import Counting, toy, updates

ray = pytest.importorskip("ray", reason="ray is not installed")
pytest.importorskip("ray.tune", reason="ray.tune is not installed")


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray with two CPUs, whose workers import the tests; the paths of its sockets must be short."""
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root / "src"), str(root)]))
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


class Meets(TrainerCallback):
    """Waits until two trials train at the same time; then the first to arrive dies once, after its second update."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        name = Path(args.output_dir).name
        (self.folder / f"here-{name}").touch()
        end = time.monotonic() + 240
        while len(list(self.folder.glob("here-*"))) < 2:
            assert time.monotonic() < end, "there is only one worker"
            time.sleep(0.02)
        if state.global_step == 3 and name.endswith("00000") and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os._exit(1)


def test_two_workers_train_at_the_same_time_and_one_that_dies_is_resumed(two_workers: None, tmp_path: Path) -> None:
    trainer = toy(tmp_path / "run", [Counting(tmp_path), Meets(tmp_path)])
    best = trainer.search(
        {"learning_rate": {"uniform": [0.1, 0.4]}}, "ray", n_trials=2, max_failures=1, verbose=0,
        compute_objective=lambda metrics: metrics["eval_loss"],
    )  # fmt: skip
    done = updates(tmp_path)
    names = sorted({name for name, _ in done})
    assert len(names) == 2 and f"run-{best.run_id}" in names
    counts = {name: [step for each, step in done if each == name] for name in names}
    assert counts[names[1]] == [1, 2, 3, 4, 5, 6]
    assert counts[names[0]] == [1, 2, 3, 3, 4, 5, 6]  # resumed after step 2, whose checkpoint Ray has
    assert best.objective == min(each.last_result["objective"] for each in best.run_summary.trials)
    assert best.checkpoint == str(tmp_path / "run" / f"run-{best.run_id}" / "checkpoint-6")
    assert (Path(best.checkpoint) / "manifest.json").is_file()


def test_options_that_ray_does_not_have_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentsError, match="max_failurs is not an option of ray.tune.run.*max_failures"):
        toy(tmp_path).search(backend="ray", max_failurs=1)
    with pytest.raises(ArgumentsError, match="returns a dict of arguments and distributions"):
        toy(tmp_path).search(lambda trial: [], "ray")
    with pytest.raises(ArgumentsError, match="one objective"):
        toy(tmp_path).search(backend="ray", direction=["minimize", "maximize"])
