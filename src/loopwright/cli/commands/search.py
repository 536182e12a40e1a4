"""`loopwright search CONFIG`: search for good values of a training command, with a `search:` block in a file.

    script: train.py                        started as `python train.py --max_steps 500 --learning_rate ...`
    args: {max_steps: 500, eval_strategy: steps}
    output_dir: runs/search
    search:
      space:
        learning_rate: {log_uniform: [1e-5, 1e-2]}
        per_device_train_batch_size: [8, 16, 32]
      trials: 20
      backend: optuna                       or random, grid, asha
      metric: eval_loss
      direction: minimize                   needed for other metrics of a script

A configuration of `loopwright train` may have the block instead of `script` and `args`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from ...args.field import nearest
from ...args.problems import short
from ...config.derived import is_error
from ...core.measure.named_values import OF_EVALUATIONS
from ...core.outputs import BestRun
from ...errors import ArgumentsError
from ...search.backends.own_backend import PLANS
from ...search.command_search import CommandSearch, MakeWords, script_words, text_of
from ...search.entry import BACKENDS, chosen_backend
from ...search.session import Request
from ...search.space import Space, read_space
from ...search.trials import RandomTrial
from ..json_output import add_json, show
from ..main import COMMANDS, main

KEYS = ("space", "trials", "backend", "direction", "metric", "jobs", "options")
OF_SCRIPTS = ("script", "args", "output_dir", "search")
TRAIN = "train"
"""The command that trains what a configuration with a `task:` describes."""
MEASURED = "measured"
"""The folder of a run that is started only to measure its speed."""
REFUSED = ("ray", "wandb", "population")
"""Backends that need the trainer itself."""


def run(words: list[str]) -> int:
    """Search; returns the exit code."""
    parser = argparse.ArgumentParser(
        "loopwright search", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="a YAML file with a `search:` block")
    parser.add_argument("--dry-run", action="store_true", help="print the space and its size, and start nothing")
    parser.add_argument("--no-measure", action="store_true", help="do not measure the first trial to predict the time")
    add_json(parser)
    given = parser.parse_args(words)
    with redirect_stdout(sys.stderr) if given.json else nullcontext():
        search = read_config(Path(given.config))
        print(summary(search))
        if given.dry_run:
            found: list[BestRun] = []
        else:
            found = _best(search, measures=not given.no_measure)
    show(given, {"best": [_described(each) for each in found]}, "\n".join(_text(each, search) for each in found))
    return 0


def _best(search: CommandSearch, *, measures: bool) -> list[BestRun]:
    with search.owned():
        if measures and not _has_begun(search):
            print(prediction(search), flush=True)
        best = BACKENDS[search.request.backend](search)
    return best if isinstance(best, list) else [best]


def _text(best: BestRun, search: CommandSearch) -> str:
    values = ", ".join(f"{name}={value}" for name, value in best.hyperparameters.items())
    return (
        f"best trial: run-{best.run_id}, {search.metric} {best.objective}, {values}\n"
        f"checkpoint: {best.checkpoint or 'none was saved'}"
    )


def _described(best: BestRun) -> dict[str, Any]:
    return {
        "run_id": best.run_id,
        "objective": best.objective,
        "hyperparameters": best.hyperparameters,
        "checkpoint": best.checkpoint,
    }


def read_config(path: Path) -> CommandSearch:
    """The search that a file describes."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ArgumentsError(f"{path} cannot be read: {error}") from None
    if not isinstance(document, Mapping) or not isinstance(document.get("search"), Mapping):
        raise ArgumentsError(f"{path} has no block `search:`; see `loopwright search --help` for its form")
    block = document["search"]
    problems = [f"search: unknown key {name!r}{nearest(str(name), KEYS)}" for name in block if name not in KEYS]
    if "space" not in block:
        problems.append("search: the key 'space' is missing; it lists arguments and their values")
    is_task = "task" in document
    problems += _problems_of_task() if is_task else _problems_of_script(document, path.parent)
    if problems:
        raise ArgumentsError([f"{path}: {each}" for each in problems])
    trained = {key: value for key, value in document.items() if key != "search"} if is_task else {}
    make_words = _task_command(trained, path) if is_task else _script_command(document, path.parent)
    folder = str(document.get("output_dir") or f"{path.stem}-search")
    metric = _metric(block, is_task=is_task)
    return CommandSearch(_request(block, metric, is_task=is_task), folder, make_words, metric, configuration=trained)


def _metric(block: Mapping[str, Any], *, is_task: bool) -> str:
    """The metric as it is logged; a task's may be named without the prefix of an evaluation."""
    metric = str(block.get("metric") or "eval_loss")
    return f"{OF_EVALUATIONS}{metric.removeprefix(OF_EVALUATIONS)}" if is_task else metric


def _problems_of_script(document: Mapping[str, Any], folder: Path) -> list[str]:
    problems = [f"unknown key {name!r}{nearest(str(name), OF_SCRIPTS)}" for name in document if name not in OF_SCRIPTS]
    script, constant = document.get("script"), document.get("args") or {}
    if not isinstance(script, str) or not (folder / script).is_file():
        problems.append(f"script: {short(script)} is not a file in {folder.resolve()}")
    if not isinstance(constant, Mapping):
        problems.append(f"args: {short(constant)} is not a block of options and their values")
    return problems


def _problems_of_task() -> list[str]:
    if TRAIN in COMMANDS:
        return []
    return [f"task: this version has no `loopwright {TRAIN}`; name a script that trains instead"]


def _script_command(document: Mapping[str, Any], folder: Path) -> MakeWords:
    script, constant = os.path.abspath(folder / str(document["script"])), dict(document.get("args") or {})
    return lambda values, place: script_words(script, values, constant, place)


def _task_command(document: Mapping[str, Any], path: Path) -> MakeWords:
    """`loopwright train` on a configuration without `search`; its file lies beside it, because of relative paths."""
    import yaml

    rest = path.with_name(f".{path.stem}.trial.yaml").absolute()
    text = yaml.safe_dump(dict(document), sort_keys=False)
    if not rest.exists() or rest.read_text(encoding="utf-8") != text:
        rest.write_text(text, encoding="utf-8")

    def words(values: dict[str, Any], place: str) -> list[str]:
        given = {**values, "output_dir": os.path.abspath(place)}
        overrides = [f"{key}={text_of(each)}" for key, each in given.items()]
        return ["-m", main.__module__, TRAIN, str(rest), *overrides]

    return words


def _direction(block: Mapping[str, Any], metric: str, *, is_task: bool) -> Any:
    """The direction of the search; that of a task's metric is known."""
    if block.get("direction") is not None:
        return block["direction"]
    if is_task:
        return "minimize" if is_error(metric) else "maximize"
    if metric.endswith("loss"):
        return "minimize"
    raise ArgumentsError(
        f"search: the direction of {metric!r} is not known; add `direction: minimize` or `direction: maximize`"
    )


def _request(block: Mapping[str, Any], metric: str, *, is_task: bool) -> Request:
    space = read_space(block["space"])
    backend = chosen_backend(block.get("backend"), otherwise="random")
    if backend in REFUSED:
        raise ArgumentsError(
            f"search: backend={backend!r} is for trainer.hyperparameter_search; use optuna, random, grid or asha"
        )
    options = dict(block.get("options") or {})
    if block.get("jobs") is not None:
        options["n_jobs"] = block["jobs"]
    size = space.size if backend == "grid" else None
    direction = _direction(block, metric, is_task=is_task)
    trials = block.get("trials", size or 20)
    request = Request(dict(block["space"]), None, trials, direction, backend, None, options)
    request.check()
    return request


def trials_of(search: CommandSearch) -> int:
    """The number of trials: of a grid, at most its combinations."""
    assert isinstance(search.space, Space)
    size = search.space.size if search.request.backend == "grid" else None
    return min(search.request.n_trials, size or search.request.n_trials)


def summary(search: CommandSearch) -> str:
    """The space and its size."""
    assert isinstance(search.space, Space)
    size, trials = search.space.size, trials_of(search)
    combinations = "" if size is None else f" of {size:,} combinations"
    how = f"{trials:,} trials{combinations} by {search.request.backend}"
    return f"{how}, {search.request.directions[0]} {search.metric}, in {search.folder}\n{search.space}"


def prediction(search: CommandSearch) -> str:
    """The predicted hours of the search, measured at the beginning of its first trial, which is resumed later."""
    first = RandomTrial(0, search.seed, _first_point(search))
    is_first = search.request.backend in PLANS  # Optuna chooses other values for its first trial
    job = search.job(0, first) if is_first else search.job(-1, first, name=MEASURED)
    measured = search.measure(job)
    if not is_first:
        shutil.rmtree(job.folder, ignore_errors=True)
    if measured is None:
        return "the first trial ended before its speed was known, so no time is predicted"
    jobs, trials = int(search.request.options.get("n_jobs", 1)), trials_of(search)
    hours = measured.seconds_of_trial * trials / jobs / 3600
    shorter = "at most " if search.request.backend == "asha" else ""
    return (
        f"predicted: {shorter}{hours:.2g} hours without evaluations ({trials} trials of {measured.steps or '?'} steps, "
        f"{measured.seconds_per_step:.3g} s each{f', {jobs} at a time' if jobs > 1 else ''})"
    )


def _first_point(search: CommandSearch) -> dict[str, Any]:
    assert isinstance(search.space, Space)
    return search.space.grid()[0] if search.request.backend == "grid" else {}


def _has_begun(search: CommandSearch) -> bool:
    return os.path.isdir(os.path.join(search.folder, "run-0"))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
