"""`loopwright search CONFIG`: the size and the time first, trials as commands, and a search that continues."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from loopwright.cli.commands.search import read_config, summary
from loopwright.cli.main import main
from loopwright.errors import ArgumentsError
from loopwright.search.command_search import evaluations
from tests.search.toy import BEST, updates
from tests.tasks.cases import write_config

SCRIPT = Path(__file__).resolve().parents[1] / "search" / "training.py"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(str(SCRIPT.parents[2] / each) for each in ("src", ".")))


def written(folder: Path, **changes: Any) -> Path:
    script = folder / "train.py"
    script.write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    block = {"space": {"learning_rate": [0.1, BEST]}, "backend": "grid", **changes.pop("search", {})}
    document = {"script": "train.py", "output_dir": str(folder / "found"), "search": block, **changes}
    path = folder / "search.yaml"
    path.write_text(yaml.safe_dump({key: each for key, each in document.items() if each is not None}), encoding="utf-8")
    return path


def test_metrics_of_a_command_may_be_lists(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "eval_loss": "NaN", "eval_of_classes": [0.5, "Infinity"]}\n{"step": 2, "eval_l')
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        ((step, found),) = evaluations(process, path, "eval_loss")
    assert step == 1 and math.isnan(found["eval_loss"]) and found["eval_of_classes"] == [0.5, math.inf]


def test_a_grid_is_searched_and_a_finished_search_is_not_repeated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, args={"max_steps": 8})
    assert main(["search", str(path)]) == 0
    text = capfd.readouterr().out
    assert text.startswith("2 trials of 2 combinations by grid, minimize eval_loss")
    assert text.index("predicted: ") < text.index("best trial: run-1") and f"learning_rate={BEST}" in text
    assert f"checkpoint: {tmp_path / 'found' / 'run-1' / 'checkpoint-8'}" in text
    done = updates(tmp_path / "found")
    assert sorted(done) == [(f"run-{trial}", step) for trial in range(2) for step in range(1, 9)]  # measured once
    assert main(["search", str(path)]) == 0
    assert updates(tmp_path / "found") == done and "best trial: run-1" in capfd.readouterr().out


def test_a_dry_run_prints_the_size_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(
        tmp_path, search={"space": {"learning_rate": {"log_uniform": [1e-5, "1e-2"]}, "seed": [1, 2]},
                          "backend": "random", "trials": 7},
    )  # fmt: skip
    assert main(["search", str(path), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "7 trials by random" in text and "learning_rate: 1e-05 to 0.01, log scale" in text
    assert not (tmp_path / "found").exists()


@pytest.mark.grid
def test_halving_pauses_commands_and_resumes_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    space = {"learning_rate": [0.01, 0.02, 0.03, BEST]}
    path = written(
        tmp_path, args={"max_steps": 60}, search={"space": space, "backend": "asha", "trials": 3,
                                                  "options": {"reduction_factor": 2, "min_steps": 2}},
    )  # fmt: skip
    assert main(["search", str(path)]) == 0
    done = updates(tmp_path / "found")
    assert len(done) == len({*done})  # no update twice
    assert "best trial" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"search": {"spaec": {}}}, "search: unknown key 'spaec'.*'space'"),
        ({"search": {"backend": "ray"}}, "is for trainer.hyperparameter_search"),
        ({"search": {"backend": "grid", "trials": 0}}, "n_trials=0"),
        ({"search": {"direction": ["minimize", "maximize"], "backend": "random"}}, "has one metric"),
        ({"search": {"space": {"learning_rate": {"uniform": [1, 0]}}}}, "learning_rate: uniform"),
        ({"script": "other.py"}, "script: 'other.py' is not a file in"),
        ({"arsg": {}}, "unknown key 'arsg'.*'args'"),
        ({"args": [1]}, "is not a block of options"),
        ({"search": {"space": None}}, "a search space is a dict"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentsError, match=problem):
        summary(read_config(written(tmp_path, **changes)))


def test_a_file_without_the_block_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("script: train.py\n", encoding="utf-8")
    assert main(["search", str(path)]) == 2
    assert "has no block `search:`" in capsys.readouterr().err
    assert main(["search", str(tmp_path / "none.yaml")]) == 2


def test_a_command_that_fails_or_logs_no_metric_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, search={"metric": "eval_f1", "direction": "maximize", "space": {"learning_rate": [0.1]}})
    assert main(["search", str(path), "--no-measure"]) == 1
    assert "trial 0 logged no 'eval_f1'" in capsys.readouterr().err
    path = written(tmp_path, output_dir=str(tmp_path / "b"), search={"space": {"unknown": [1]}})
    assert main(["search", str(path), "--no-measure"]) == 1
    assert "the command of trial 0 ended with exit code 2" in capsys.readouterr().err


def task_written(folder: Path, metric: str | None, **values: Any) -> Path:
    config = yaml.safe_load(write_config(folder, "table-regression", output_dir=str(folder / "found"), **values)
                            .read_text(encoding="utf-8"))  # fmt: skip
    block = {"space": {"learning_rate": [1e-9, 0.1]}, "backend": "grid", **({"metric": metric} if metric else {})}
    path = folder / "task.yaml"
    path.write_text(yaml.safe_dump({**config, "search": block}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("metric", "logged", "direction"),
    [
        (None, "eval_loss", "minimize"),
        ("rmse", "eval_rmse", "minimize"),
        ("eval_mae", "eval_mae", "minimize"),
        ("r2", "eval_r2", "maximize"),
        ("eval_accuracy", "eval_accuracy", "maximize"),
    ],
)
def test_the_direction_of_a_task_is_that_of_its_metric(
    tmp_path: Path, metric: str | None, logged: str, direction: str
) -> None:
    search = read_config(task_written(tmp_path, metric))
    assert (search.metric, search.request.directions) == (logged, [direction])


def test_the_direction_of_a_metric_of_a_script_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ArgumentsError, match="the direction of 'eval_f1' is not known; add `direction: minimize`"):
        read_config(written(tmp_path, search={"metric": "eval_f1"}))


def last_value(path: Path) -> float:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row["eval_r2"] for row in rows if "eval_r2" in row][-1]


def test_a_search_with_another_configuration_or_metric_is_not_continued(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", str(task_written(tmp_path, "r2")), "--no-measure"]) == 0
    found = [last_value(tmp_path / "found" / f"run-{trial}" / "metrics.jsonl") for trial in range(2)]
    best = max(range(2), key=found.__getitem__)
    assert f"best trial: run-{best}, eval_r2 {found[best]}" in capfd.readouterr().out
    for path in (task_written(tmp_path, "r2", max_steps=4), task_written(tmp_path, "eval_accuracy")):
        assert main(["search", str(path), "--no-measure"]) == 2
        assert "belongs to a search that differs in arguments" in capfd.readouterr().err
