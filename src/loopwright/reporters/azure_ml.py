"""Azure Machine Learning: the MLflow server of a workspace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from .base import Row, RunInfo, as_number, require
from .mlflow import MLflowCallback, MLflowReporter


class AzureMLReporter(MLflowReporter):
    """The MLflow server of an Azure Machine Learning workspace, or a run of azureml-core."""

    name: ClassVar[str] = "azure_ml"

    def __init__(self, azureml_run: Any = None) -> None:
        self.azureml_run = azureml_run
        if azureml_run is None:
            require("azureml", self.name, install="azureml-mlflow")
            super().__init__()

    def attach(self) -> None:
        if self.azureml_run is None:
            super().attach()

    def start(self, run: RunInfo) -> None:
        if self.azureml_run is None:
            super().start(run)

    def log(self, values: dict[str, Any], step: int) -> None:
        if self.azureml_run is None:
            super().log(values, step)
            return
        for name, value in values.items():
            number = as_number(value)
            if number is not None:
                self.azureml_run.log(name, number, description=name)

    def unstored(self, rows: Sequence[Row]) -> list[Row] | None:
        return super().unstored(rows) if self.azureml_run is None else None

    def finish(self, status: str) -> None:
        if self.azureml_run is None:
            super().finish(status)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self.azureml_run is None else {}

    def as_callback(self) -> AzureMLCallback:
        return AzureMLCallback(reporter=self)


class AzureMLCallback(MLflowCallback):
    """Reports to Azure Machine Learning: to its MLflow server, or to the run of azureml-core if one is given."""

    def __init__(self, azureml_run: Any = None, *, reporter: AzureMLReporter | None = None) -> None:
        super().__init__(reporter=reporter or AzureMLReporter(azureml_run))
