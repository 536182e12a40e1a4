"""Finding reporters by name, ours and third parties'."""

from __future__ import annotations

import sys

import pytest

from loopwright.args.groups.tracking import REFUSED, TRACKERS, is_installed, named_trackers
from loopwright.callbacks.defaults import default_callbacks
from loopwright.errors import ArgumentsError, MissingPackage
from loopwright.reporters.base import Reporter
from loopwright.reporters.registry import REPORTERS, build_reporters, known_names, reporter_callbacks, reporter_class

THIRD_PARTY = """
from loopwright.reporters.base import Reporter

class Diary(Reporter):
    name = "diary"
    def __init__(self):
        self.lines = []
    def log(self, values, step):
        self.lines.append((step, values))

class Stranger:
    def start(self, run): ...
    def log(self, values, step): ...
    def artifact(self, path, name): ...
    def finish(self, status): ...
"""


@pytest.fixture
def diary(tmp_path, monkeypatch):
    """A package on sys.path that registers reporters by entry points."""
    (tmp_path / "diary_package.py").write_text(THIRD_PARTY)
    folder = tmp_path / "diary_package-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: diary-package\nVersion: 1.0\n")
    points = "diary = diary_package:Diary\nstranger = diary_package:Stranger\n"
    (folder / "entry_points.txt").write_text(f"[loopwright.reporters]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("diary_package", None)


@pytest.mark.parametrize("names", [None, [], "none", ["none"]])
def test_nothing_is_reported_unless_asked(names):
    assert build_reporters(names) == []


@pytest.mark.parametrize("name", sorted(REPORTERS))
def test_every_row_of_the_table_is_a_reporter(name):
    assert issubclass(reporter_class(name), Reporter)
    assert reporter_class(name).name == name


def test_the_arguments_and_the_table_know_the_same_reporters():
    assert sorted(TRACKERS) == sorted(REPORTERS)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ArgumentsError, match=r"'tensorbord' is not a known reporter \(known: azure_ml, clearml"):
        build_reporters(["tensorbord"])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_tracker_that_has_ended_is_refused_with_the_reason(name):
    with pytest.raises(ArgumentsError, match=f"{name}' cannot be used: its service ended on 5 March 2026"):
        build_reporters(name)


@pytest.mark.parametrize("name", [name for name in sorted(TRACKERS) if not is_installed(name) and TRACKERS[name]])
def test_a_missing_package_is_named(name):
    with pytest.raises(MissingPackage, match=rf'report_to="{name}" needs the package .*pip install'):
        build_reporters(name)


def test_kubeflow_outside_a_job_is_refused(monkeypatch):
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    with pytest.raises(ArgumentsError, match="works inside a TrainJob"):
        build_reporters("kubeflow")


PACKAGES = {"azureml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flytekit", "mlflow", "swanlab",
            "tensorboard", "trackio", "wandb"}  # fmt: skip


@pytest.mark.parametrize(
    ("installed", "environment", "left_out"),
    [
        (PACKAGES, {"COMET_API_KEY": "x"}, {"flyte", "azure_ml", "kubeflow"}),
        (PACKAGES - {"mlflow"}, {"COMET_API_KEY": "x"}, {"flyte", "kubeflow", "mlflow", "dagshub"}),
        (PACKAGES, {}, {"flyte", "azure_ml", "kubeflow", "comet_ml"}),
        (PACKAGES, {"DISABLE_MLFLOW_INTEGRATION": "TRUE"}, {"flyte", "kubeflow", "mlflow", "comet_ml"}),
        (PACKAGES, {"KUBEFLOW_TRAINER_SERVER_URL": "http://x"}, {"flyte", "azure_ml", "comet_ml"}),
    ],
)
def test_all_is_what_transformers_calls_all(monkeypatch, tmp_path, installed, environment, left_out):
    import loopwright.args.groups.tracking as tracking

    for name in ("COMET_API_KEY", "COMET_CONFIG", "KUBEFLOW_TRAINER_SERVER_URL", "DISABLE_MLFLOW_INTEGRATION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tracking, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(tracking, "third_party", list)
    assert set(named_trackers("all")) == set(TRACKERS) - left_out


def test_all_means_what_is_installed():
    pytest.importorskip("tensorboard")
    assert [reporter.name for reporter in build_reporters("all")] == ["tensorboard"]


def test_third_parties_register_by_entry_points(diary):
    assert {"diary", "stranger", "tensorboard"} <= set(known_names())
    (reporter,) = build_reporters(["diary", "diary"])
    reporter.log({"train/loss": 1.0}, 3)
    assert reporter.lines == [(3, {"train/loss": 1.0})]


def test_a_third_party_reporter_need_not_inherit_from_ours(diary):
    (callback,) = reporter_callbacks(["stranger"])
    assert callback.state_dict() == {"reporter": "Stranger", "run_id": None, "state": {}}


def test_default_callbacks_reach_third_parties(diary):
    from types import SimpleNamespace

    last = default_callbacks(SimpleNamespace(disable_tqdm=True, report_to=["diary"]))[-1]
    assert type(last.reporter).__name__ == "Diary"


def test_third_parties_are_listed_in_the_error(diary):
    with pytest.raises(ArgumentsError, match="diary, dvclive.*stranger, swanlab"):
        build_reporters("diray")
