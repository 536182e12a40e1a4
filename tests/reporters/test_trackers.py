"""Real trackers, offline: a run that is killed with SIGKILL and resumed leaves every value once.

The packages are in an environment of their own, which `make trackers` builds; the runs are processes of its Python.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from loopwright.callbacks.metrics_file import read_metrics
from loopwright.reporters.callback import reported_names
from tests.reporters.tracked_run import STEPS, environment

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-trackers" / "bin" / "python"
CHILD = Path(__file__).with_name("tracked_run.py")
READER = Path(__file__).with_name("read_back.py")

pytestmark = [
    pytest.mark.xdist_group("trackers"),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make trackers` installs the trackers in .venv-trackers"),
]

READ_BACK = ("trackio", "mlflow", "wandb", "swanlab", "comet_ml", "clearml", "dvclive")
ALL = (*READ_BACK, "codecarbon", "tensorboard")
SHARED = {"train/epoch", "train/global_step"}
"""Values of every row: a step with several rows has them several times."""
CLOCKED = ("runtime", "per_second")
"""Values that differ when a step is done again."""


def run(folder: Path, trackers: tuple[str, ...], *, die_after: int | None = None) -> str:
    """One life of a run; returns what it printed."""
    command = [str(PYTHON), str(CHILD), str(folder / "run"), ",".join(trackers)]
    given = command if die_after is None else [*command, str(die_after)]
    done = subprocess.run(
        given, cwd=folder, env=_environment(folder), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == (0 if die_after is None else -signal.SIGKILL), done.stdout + done.stderr
    return done.stdout + done.stderr


def _environment(folder: Path) -> dict[str, str]:
    return {**environment(folder), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


def read_back(folder: Path, trackers: tuple[str, ...]) -> dict[str, list[Any]]:
    command = [str(PYTHON), str(READER), str(folder), ",".join(trackers)]
    done = subprocess.run(
        command, cwd=folder, env=_environment(folder), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def logged(folder: Path) -> dict[tuple[str, int], Any]:
    """The values of metrics.jsonl by reported name and step."""
    rows = read_metrics(folder / "run")
    assert {row["step"] for row in rows} == set(range(1, STEPS + 1))
    return {
        (name, row["step"]): value
        for row in rows
        for name, value in reported_names({k: v for k, v in row.items() if k not in ("step", "time", "pace")}).items()
        if name not in SHARED
    }


def check_every_value_once(folder: Path, tracker: str, found: list[Any]) -> None:
    if tracker == "mlflow":
        found = [[*reported_names({name: value}), step, value] for name, step, value in found]
    expected = logged(folder)
    counts = Counter((name, step) for name, step, _ in found if name not in SHARED)
    assert counts == Counter(dict.fromkeys(expected, 1))
    for name, step, value in found:
        if value is not None and name not in SHARED and not name.endswith(CLOCKED):
            assert value == pytest.approx(expected[name, step], rel=1e-6), (name, step)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that reported to all trackers at once, was killed after step 5 and resumed from step 3."""
    place = tmp_path_factory.mktemp("trackers")
    run(place, ALL, die_after=5)
    said = run(place, ALL)
    assert "not sent" not in said and "Training continues" not in said, said
    return place


@pytest.fixture(scope="module")
def stored(folder: Path) -> dict[str, list[Any]]:
    return read_back(folder, READ_BACK)


@pytest.mark.parametrize("tracker", READ_BACK)
def test_every_value_is_stored_once_through_kill_and_resume(folder, stored, tracker):
    check_every_value_once(folder, tracker, stored[tracker])


def test_tensorboard_has_every_value_once_through_kill_and_resume(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    found = [(tag, each.step, each.value) for tag in reader.Tags()["scalars"] for each in reader.Scalars(tag)]
    check_every_value_once(folder, "tensorboard", found)


def test_codecarbon_has_one_row_for_each_process(folder):
    lines = (folder / "run" / "emissions.csv").read_text().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("timestamp,project_name,run_id")


def test_the_resumed_run_continues_the_same_run_of_each_tracker(folder):
    ids = {each.name.rsplit("-", 1)[1] for each in folder.glob("wandb/offline-run-*")}
    assert len(ids) == 1
    database = sqlite3.connect(folder / "mlflow.db")
    assert database.execute("select name, status from runs").fetchall() == [("the-run", "FINISHED")]
    runs = sqlite3.connect(folder / "trackio" / "project.db").execute("select distinct run_name from metrics")
    assert runs.fetchall() == [("the-run",)]
    assert len({each.name.rsplit("-", 1)[1] for each in folder.glob("swanlab/run-*")}) == 1
    assert len({each.name.split("-")[0] for each in folder.glob("comet/*.zip")}) == 1


def test_arguments_configuration_and_size_are_sent_once(folder):
    database = sqlite3.connect(folder / "mlflow.db")
    params = dict(database.execute("select key, value from params"))
    assert (params["learning_rate"], params["layers"], params["model/num_parameters"]) == ("0.1", "1", "4")
    config = sqlite3.connect(folder / "trackio" / "project.db").execute("select config from configs").fetchall()
    (values,) = (json.loads(each[0]) for each in config)
    assert (values["learning_rate"], values["layers"], values["model/num_parameters"]) == (0.1, 1, 4)
    assert "learning_rate: 0.1" in (folder / "dvclive" / "params.yaml").read_text()


KILLS = [(4,), (6,), (7,), (4, 7), (5, 6), (8,)]


@pytest.mark.grid
@pytest.mark.parametrize("kills", KILLS, ids=str)
@pytest.mark.parametrize("tracker", READ_BACK)
def test_each_tracker_alone_through_kills(tmp_path, tracker, kills):
    for step in kills:
        run(tmp_path, (tracker,), die_after=step)
    run(tmp_path, (tracker,))
    check_every_value_once(tmp_path, tracker, read_back(tmp_path, (tracker,))[tracker])


@pytest.mark.grid
def test_mlflow_on_its_own_server(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(PYTHON), "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--artifacts-destination", str(tmp_path / "files"),
    ]
    server = subprocess.Popen(command, cwd=tmp_path, env=_environment(tmp_path), start_new_session=True)
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/health", server)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        run(tmp_path, ("mlflow",), die_after=5)
        run(tmp_path, ("mlflow",))
        check_every_value_once(tmp_path, "mlflow", read_back(tmp_path, ("mlflow",))["mlflow"])
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_until_ready(address: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"the server did not answer at {address}")


OWN_RUNS = """
import sys
import mlflow, trackio, wandb
from tests.reporters.tracked_run import train
from loopwright.core.events import TrainerCallback
import loopwright.reporters.registry as registry

class Own(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            wandb.log({"own": 1.0})
            trackio.log({"own": 1.0}, step=100)
            mlflow.log_metric("own", 1.0, step=100)

made = registry.reporter_callbacks
registry.reporter_callbacks = lambda names: [*made(names), Own()]
wandb.init(id="mine")
mlflow.set_tracking_uri(__import__("os").environ["MLFLOW_TRACKING_URI"])
mlflow.set_experiment("experiment")
with mlflow.start_run(run_name="mine"):
    train(sys.argv[1], ["wandb", "trackio", "mlflow"], None)
assert wandb.run is not None
wandb.finish()
"""


@pytest.mark.grid
def test_your_own_calls_reach_the_same_run(tmp_path):
    command = [str(PYTHON), "-c", OWN_RUNS, str(tmp_path / "run")]
    done = subprocess.run(
        command, cwd=tmp_path, env=_environment(tmp_path), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    assert folder.name.endswith("-mine")
    database = sqlite3.connect(tmp_path / "mlflow.db")
    assert database.execute("select name, status from runs").fetchall() == [("mine", "FINISHED")]
    assert database.execute("select count(*) from metrics where key in ('own', 'loss')").fetchone() == (STEPS + 1,)
    rows = sqlite3.connect(tmp_path / "trackio" / "project.db").execute("select run_name, metrics from metrics")
    names = [(run, "own" in json.loads(metrics)) for run, metrics in rows]
    assert {run for run, _ in names} == {"the-run"} and any(own for _, own in names)
