"""DagsHub: the MLflow server of a repository."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import ArgumentsError
from .base import is_on, require
from .mlflow import MLflowCallback, MLflowReporter

if TYPE_CHECKING:
    from ..args.base import BaseArguments


class DagsHubReporter(MLflowReporter):
    """The MLflow server of a DagsHub repository; MLFLOW_TRACKING_URI is its address."""

    name: ClassVar[str] = "dagshub"

    def __init__(self) -> None:
        require("dagshub", self.name)
        super().__init__()
        self.address = os.environ.get("MLFLOW_TRACKING_URI") or ""
        if len(self.address.split("/")) < 2:
            raise ArgumentsError(
                f'report_to="dagshub": MLFLOW_TRACKING_URI={self.address!r} is not the address of a repository; call '
                "dagshub.init() first, or set it to https://dagshub.com/<owner>/<repository>.mlflow"
            )

    def artifact(self, path: str | os.PathLike[str], name: str) -> None:
        from dagshub.upload import Repo

        owner, repository = self.address.rstrip("/").split("/")[-2:]
        repo = Repo(owner=owner, name=repository.split(".")[0], branch=os.environ.get("BRANCH") or "main")
        repo.directory("artifacts").add_dir(os.fspath(path))

    def as_callback(self) -> DagsHubCallback:
        return DagsHubCallback(reporter=self)


class DagsHubCallback(MLflowCallback):
    """Reports to DagsHub; with HF_DAGSHUB_LOG_ARTIFACTS=1 the output folder is uploaded at the end."""

    def __init__(self, *, reporter: DagsHubReporter | None = None) -> None:
        super().__init__(reporter=reporter or DagsHubReporter())

    def on_save(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Checkpoints are uploaded with the output folder, at the end."""

    def on_train_end(self, args: BaseArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if is_on("HF_DAGSHUB_LOG_ARTIFACTS") and state.is_world_process_zero:
            self.artifact(args.output_dir, os.environ.get("HF_DAGSHUB_MODEL_NAME") or "main")
        super().on_train_end(args, state, control, **kwargs)
