"""The classes of transformers that are replaced, and the modules that hold them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import loopwright

MODULES = (
    "transformers",
    "transformers.trainer",
    "transformers.training_args",
    "transformers.trainer_callback",
    "transformers.trainer_utils",
    "transformers.trainer_pt_utils",
    "transformers.trainer_seq2seq",
    "transformers.training_args_seq2seq",
    "transformers.trainer_optimizer",
    "transformers.optimization",
    "transformers.trainer_jit_checkpoint",
    "transformers.integrations",
    "transformers.integrations.integration_utils",
    "transformers.utils.notebook",
)
"""Modules that define or export them; those a version of transformers does not have are skipped."""

CLASSES = (
    "Trainer",
    "Seq2SeqTrainer",
    "TrainingArguments",
    "Seq2SeqTrainingArguments",
    "TrainerCallback",
    "CallbackHandler",
    "TrainerControl",
    "TrainerState",
    "ExportableState",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "NotebookProgressCallback",
    "PrinterCallback",
    "ProgressCallback",
    "AzureMLCallback",
    "ClearMLCallback",
    "CodeCarbonCallback",
    "CometCallback",
    "DagsHubCallback",
    "DVCLiveCallback",
    "FlyteCallback",
    "KubeflowCallback",
    "MLflowCallback",
    "SwanLabCallback",
    "TensorBoardCallback",
    "TrackioCallback",
    "WandbCallback",
    "EvalLoopOutput",
    "EvalPrediction",
    "PredictionOutput",
    "TrainOutput",
    "BestRun",
    "ParallelMode",
    "IntervalStrategy",
    "SaveStrategy",
    "SchedulerType",
    "HubStrategy",
    "FSDPOption",
    "HPSearchBackend",
    "OptimizerNames",
    "GreedyLR",
)
"""Classes of the same name in both packages, which are replaced."""

BASES = ("Trainer", "TrainingArguments", "TrainerCallback", "CallbackHandler")
"""Classes that other libraries derive from; `isinstance` is true for both packages' classes."""


def loaded_modules() -> list[Any]:
    """The modules of transformers that hold the classes, imported."""
    found = []
    for name in MODULES:
        try:
            found.append(import_module(name))
        except ModuleNotFoundError as error:
            if name == "transformers":
                raise
            if error.name is None or not error.name.startswith("transformers"):
                continue  # a package that only this module needs
    return found


def pairs(modules: list[Any]) -> list[tuple[type, type]]:
    """(transformers' class, loopwright's class) of every name."""
    found: list[tuple[type, type]] = []
    for name in CLASSES:
        for module in modules:
            old, new = _attribute(module, name), getattr(loopwright, name)
            if isinstance(old, type) and old is not new:
                found.append((old, new))
                break
    return found


def _attribute(module: Any, name: str) -> Any:
    try:
        return getattr(module, name, None)
    except (ImportError, RuntimeError):  # a lazy module raises these if a package of this name is not installed
        return None
