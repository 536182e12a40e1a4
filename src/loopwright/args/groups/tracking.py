"""Arguments of experiment trackers."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from typing import Any, Literal

from ..field import Group, arg, text_or_false
from ..paths import working_folder

TRACKERS: dict[str, tuple[str, ...]] = {
    "azure_ml": ("azureml",),
    "clearml": ("clearml",),
    "codecarbon": ("codecarbon",),
    "comet_ml": ("comet_ml",),
    "dagshub": ("dagshub",),
    "dvclive": ("dvclive",),
    "flyte": ("flytekit",),
    "kubeflow": (),
    "mlflow": ("mlflow",),
    "swanlab": ("swanlab",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}
"""Known trackers, each with packages of which one must be installed."""

REFUSED: dict[str, str] = {
    "neptune": "its service ended on 5 March 2026 and its data were deleted; use another one, such as trackio or wandb",
}
"""Names of trackers that cannot be used any more, with the reason and the alternative."""

ENTRY_POINTS = "loopwright.reporters"
"""The entry point group under which other packages register reporters."""


@dataclass
class TrackingArgs(Group):
    """Arguments of experiment trackers."""

    title = "Tracking"

    report_to: None | str | list[str] = arg(
        "none", "Trackers to report to: names, 'all' installed, or 'none'.", ranks="any"
    )
    run_name: str | None = arg(None, "The name of this run in trackers.", ranks="any")
    logging_dir: str | None = arg(
        None,
        "TensorBoard's folder; defaults to TENSORBOARD_LOGGING_DIR or runs/<date>_<host> in output_dir.",
        ranks="any",
    )
    project: str = arg("huggingface", "The Trackio project.", ranks="any")
    trackio_space_id: str | None = arg(None, "The Space that shows Trackio's metrics live.", ranks="any")
    trackio_bucket_id: str | None = arg(None, "The bucket behind a Trackio Space.", ranks="any")
    trackio_static_space_id: str | None | Literal[False] = arg(
        None, "A read-only Trackio Space; False for none.", check=text_or_false, ranks="any"
    )


def named_trackers(report_to: Any) -> list[str]:
    """`report_to` as a list of names: none, all that are installed, or the given ones."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    if names == ["all"]:
        return [name for name in TRACKERS if is_installed(name)] + third_party()
    names = [] if names == ["none"] else names
    # The controller of a TrainJob sets the variables of its tracker to receive the progress of the job.
    return [*names, "kubeflow"] if is_installed("kubeflow") and "kubeflow" not in names else names


def is_installed(tracker: str) -> bool:
    """Whether "all" includes a tracker: its package is installed and its service can be used, as in transformers."""
    if tracker == "kubeflow":
        return bool(os.environ.get("KUBEFLOW_TRAINER_SERVER_URL")) and not _is_disabled("KUBEFLOW")
    if tracker == "flyte" or not any(map(_is_found, TRACKERS[tracker])):
        return False
    if tracker == "azure_ml":
        return not is_installed("mlflow")  # which reports to the same server
    if tracker == "mlflow":
        return not _is_disabled("MLFLOW")
    if tracker == "dagshub":
        return _is_found("mlflow")
    return tracker != "comet_ml" or _has_comet_key()


def _is_found(package: str) -> bool:
    return find_spec(package) is not None


def _is_disabled(integration: str) -> bool:
    return os.environ.get(f"DISABLE_{integration}_INTEGRATION", "").upper() == "TRUE"


def _has_comet_key() -> bool:
    config = os.environ.get("COMET_CONFIG") or os.path.join(os.path.expanduser("~"), ".comet.config")
    return bool(os.environ.get("COMET_API_KEY")) or os.path.exists(config)


def third_party() -> list[str]:
    """Reporters registered by other installed packages."""
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    return sorted({point.name for point in entry_points(group=ENTRY_POINTS)})


def tensorboard_folder(logging_dir: str | None, output_dir: str) -> str:
    """TensorBoard's folder; by default its name contains the current time."""
    given = logging_dir or os.environ.get("TENSORBOARD_LOGGING_DIR")
    if given:
        return os.path.expanduser(given)
    return os.path.join(working_folder(output_dir), "runs", f"{datetime.now():%b%d_%H-%M-%S}_{socket.gethostname()}")
