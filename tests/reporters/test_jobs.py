"""Trackers inside the jobs of other systems, through their interfaces: Kubeflow, Flyte, Azure ML, DagsHub."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import loopwright
from loopwright.args.base import BaseArguments
from loopwright.core.state import TrainerControl, TrainerState
from loopwright.errors import ArgumentsError
from loopwright.reporters.base import RunInfo
from loopwright.reporters.registry import REPORTERS, reporter_callbacks, reporter_class
from tests.core.numpy_strategy import LinearModel
from tests.core.numpy_trainer import NumpyTrainer

NAMES = {
    "azure_ml": "AzureMLCallback", "clearml": "ClearMLCallback", "codecarbon": "CodeCarbonCallback",
    "comet_ml": "CometCallback", "dagshub": "DagsHubCallback", "dvclive": "DVCLiveCallback", "flyte": "FlyteCallback",
    "kubeflow": "KubeflowCallback", "mlflow": "MLflowCallback", "swanlab": "SwanLabCallback",
    "tensorboard": "TensorBoardCallback", "trackio": "TrackioCallback", "wandb": "WandbCallback",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REPORTERS))
def test_every_tracker_has_the_callback_of_transformers(name):
    callback = getattr(loopwright, NAMES[name])
    assert callback.__module__ == reporter_class(name).__module__
    theirs = pytest.importorskip("transformers.integrations.integration_utils").INTEGRATION_TO_CALLBACK[name]
    assert theirs.__name__ == NAMES[name]


class Controller(BaseHTTPRequestHandler):
    """The controller of a TrainJob: accepts updates with the right token."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.updates.append((self.headers["Authorization"], body["trainerStatus"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words):
        pass


@pytest.fixture
def controller(tmp_path, monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), Controller)
    server.updates = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{server.server_port}/status")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    yield server
    server.shutdown()
    thread.join()


def train(folder, callbacks):
    samples = [(row, row.sum(keepdims=True)) for row in np.random.default_rng(0).normal(size=(16, 3))]
    args = BaseArguments(
        str(folder), max_steps=4, per_device_train_batch_size=4, logging_steps=1, disable_tqdm=True, save_strategy="no",
    )
    NumpyTrainer(LinearModel(3), args, samples, callbacks=callbacks).train()


def test_kubeflow_receives_progress_and_metrics(tmp_path, controller, monkeypatch):
    import loopwright.reporters.kubeflow as kubeflow

    monkeypatch.setattr(kubeflow, "INTERVAL", 0.0)
    train(tmp_path / "run", reporter_callbacks(["kubeflow"]))
    assert {token for token, _ in controller.updates} == {"Bearer secret"}
    updates = [update for _, update in controller.updates]
    assert [update["progressPercentage"] for update in updates] == [0, 25, 50, 75, 99, 100]
    last = {each["name"]: each["value"] for each in updates[-1]["metrics"]}
    assert {"loss", "learning_rate", "train_runtime"} <= set(last)
    assert updates[-1]["estimatedRemainingSeconds"] == 0
    steps = [{each["name"]: each["value"] for each in update["metrics"]}.get("current_step") for update in updates]
    assert steps == [None, "1", "2", "3", "4", None]


def test_kubeflow_is_throttled(tmp_path, controller):
    train(tmp_path / "run", reporter_callbacks(["kubeflow"]))
    assert [update["progressPercentage"] for _, update in controller.updates] == [0, 100]


def test_kubeflow_is_used_when_its_controller_expects_it(monkeypatch):
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1:9/")
    assert BaseArguments("out").report_to == ["kubeflow"]
    assert BaseArguments("out", report_to="tensorboard").report_to == ["tensorboard", "kubeflow"]
    monkeypatch.setenv("DISABLE_KUBEFLOW_INTEGRATION", "TRUE")
    assert BaseArguments("out").report_to == []


def test_a_controller_that_does_not_answer_ends_nothing(tmp_path, controller, monkeypatch, caplog):
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "absent"))
    train(tmp_path / "run", reporter_callbacks(["kubeflow"]))
    assert caplog.text.count("kubeflow: the progress was not sent (the file of KUBEFLOW_TRAINER_SERVER_TOKEN") == 1
    assert controller.updates == []


def test_flyte_saves_checkpoints_of_the_task(tmp_path, monkeypatch):
    saved = []
    flytekit = ModuleType("flytekit")
    flytekit.__spec__ = SimpleNamespace()
    flytekit.current_context = lambda: SimpleNamespace(checkpoint=SimpleNamespace(save=saved.append))
    monkeypatch.setitem(sys.modules, "flytekit", flytekit)
    callback = loopwright.FlyteCallback(save_log_history=False)
    args, state = SimpleNamespace(output_dir=str(tmp_path)), TrainerState(global_step=2)
    callback.on_train_begin(args, state, TrainerControl())
    (tmp_path / "checkpoint-2").mkdir()
    callback.on_save(args, state, TrainerControl())
    callback.on_train_end(args, state, TrainerControl())
    assert saved == [str(tmp_path / "checkpoint-2")]


def test_azure_ml_uses_a_given_run():
    logged = []
    run = SimpleNamespace(log=lambda name, value, description: logged.append((name, value, description)))
    callback = loopwright.AzureMLCallback(run)
    args, state = SimpleNamespace(), TrainerState(global_step=1)
    callback.on_train_begin(args, state, TrainerControl())
    callback.on_log(args, state, TrainerControl(), logs={"loss": 0.5, "note": "x"})
    callback.on_train_end(args, state, TrainerControl())
    assert logged == [("loss", 0.5, "loss")]


def test_dagshub_needs_the_address_of_a_repository(monkeypatch):
    for name in ("dagshub", "mlflow"):
        module = ModuleType(name)
        module.__spec__ = SimpleNamespace()
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ArgumentsError, match="MLFLOW_TRACKING_URI='' is not the address of a repository"):
        loopwright.DagsHubCallback()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://dagshub.com/owner/name.mlflow")
    assert loopwright.DagsHubCallback().reporter.address.endswith("name.mlflow")


def test_the_run_is_described_by_model_and_arguments():
    run = RunInfo("id", config={"seed": 1, "layers": 3}, model_config={"layers": 2, "width": 4})
    assert run.hyper_parameters == {"seed": 1, "layers": 3, "width": 4}
