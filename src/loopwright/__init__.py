"""loopwright: a training library with the API of transformers' Trainer.

Public names are imported on first use, so `import loopwright` is fast and imports no framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# The module of every public name. A new one needs a row here and a line under TYPE_CHECKING below.
_MODULES: dict[str, tuple[str, ...]] = {
    "pt.trainer": ("Trainer",),
    "pt.seq2seq": ("Seq2SeqTrainer",),
    "pt.arguments": ("Seq2SeqTrainingArguments", "TrainingArguments"),
    "neuron.trainer": ("NeuronTrainer", "Seq2SeqNeuronTrainer"),
    "neuron.arguments": ("NeuronTrainingArguments", "Seq2SeqNeuronTrainingArguments"),
    "args.names": (
        "EvaluationStrategy",
        "FSDPOption",
        "HPSearchBackend",
        "HubStrategy",
        "IntervalStrategy",
        "OptimizerNames",
        "ParallelMode",
        "SaveStrategy",
        "SchedulerType",
    ),
    "core.events": ("CallbackHandler", "TrainerCallback"),
    "core.state": ("ExportableState", "TrainerControl", "TrainerState"),
    "core.outputs": (
        "BestRun",
        "EvalLoopOutput",
        "EvalPrediction",
        "PredictionOutput",
        "TrainOutput",
        "speed_metrics",
    ),
    "core.checkpoint.manager": ("get_last_checkpoint",),
    "callbacks.early_stopping": ("EarlyStoppingCallback",),
    "callbacks.flow": ("DefaultFlowCallback",),
    "callbacks.notebook": ("NotebookProgressCallback",),
    "callbacks.printer": ("PrinterCallback",),
    "callbacks.progress": ("ProgressCallback",),
    "reporters.azure_ml": ("AzureMLCallback",),
    "reporters.clearml": ("ClearMLCallback",),
    "reporters.codecarbon": ("CodeCarbonCallback",),
    "reporters.comet_ml": ("CometCallback",),
    "reporters.dagshub": ("DagsHubCallback",),
    "reporters.dvclive": ("DVCLiveCallback",),
    "reporters.flyte": ("FlyteCallback",),
    "reporters.kubeflow": ("KubeflowCallback",),
    "reporters.mlflow": ("MLflowCallback",),
    "reporters.swanlab": ("SwanLabCallback",),
    "reporters.tensorboard": ("TensorBoardCallback",),
    "reporters.trackio": ("TrackioCallback",),
    "reporters.wandb": ("WandbCallback",),
    "pt.checkpoint.weights": ("load_model",),
    "pt.model.averaging": ("EMACallback", "SWACallback"),
    "pt.model.overflow": ("DebugUnderflowOverflow",),
    "pt.optim.greedy_lr": ("GreedyLR",),
    "pt.data.loaders": ("has_length",),
    "pt.loss.targets": ("LabelSmoother",),
    "pt.rng": ("enable_full_determinism", "set_seed"),
    "pt.data.collators": (
        "DataCollatorForLanguageModeling",
        "DataCollatorForMultipleChoice",
        "DataCollatorForSeq2Seq",
        "DataCollatorForTokenClassification",
        "DataCollatorForWholeWordMask",
        "DataCollatorWithFlattening",
        "DataCollatorWithPadding",
        "DefaultDataCollator",
        "default_data_collator",
    ),
    "pt.optim.schedulers": (
        "get_constant_schedule",
        "get_constant_schedule_with_warmup",
        "get_cosine_schedule_with_warmup",
        "get_cosine_with_hard_restarts_schedule_with_warmup",
        "get_cosine_with_min_lr_schedule_with_warmup",
        "get_cosine_with_min_lr_schedule_with_warmup_lr_rate",
        "get_greedy_schedule",
        "get_inverse_sqrt_schedule",
        "get_linear_schedule_with_warmup",
        "get_polynomial_decay_schedule_with_warmup",
        "get_reduce_on_plateau_schedule",
        "get_scheduler",
        "get_wsd_schedule",
    ),
    "pt.optim.optimizers.adafactor": ("Adafactor",),
    "jax.arguments": ("JAXTrainingArguments",),
    "jax.trainer": ("JAXTrainer",),
    "keras.callbacks": ("KerasCallbackAdapter",),
    "tf.arguments": ("TFTrainingArguments",),
    "tf.optimizers": ("AdamWeightDecay", "GradientAccumulator", "WarmUp", "create_optimizer"),
    "tf.trainer": ("TFTrainer",),
    "errors": (
        "ArgumentsError",
        "BusyError",
        "CheckpointError",
        "DataError",
        "HubError",
        "LoopwrightError",
        "LogError",
        "LostRankError",
        "MetricError",
        "MissingPackage",
        "ModelError",
        "NonFiniteError",
        "NotAvailable",
        "OutputError",
        "OverrideError",
        "OwnerError",
        "PeerError",
        "RanksDisagree",
        "SearchError",
        "UnknownArgument",
    ),
}
_HOME: dict[str, str] = {name: module for module, names in _MODULES.items() for name in names}

# Re-exported from transformers for scripts that import them with the Trainer; not in __all__, because
# `from loopwright import *` must work without transformers.
_THEIR_MODULES: dict[str, tuple[str, ...]] = {
    "transformers": (
        "DataCollatorForPermutationLanguageModeling",
        "HfArgumentParser",
    ),
    "transformers.modelcard": ("TrainingSummary",),
    "transformers.optimization": ("AdafactorSchedule",),
    "transformers.trainer_pt_utils": (
        "BatchRebalanceSampler",
        "DistributedLengthGroupedSampler",
        "DistributedSamplerWithLoop",
        "EvalLoopContainer",
        "IterableDatasetShard",
        "LayerWiseDummyOptimizer",
        "LayerWiseDummyScheduler",
        "LengthGroupedSampler",
        "ShardSampler",
        "get_model_param_count",
        "get_parameter_names",
        "nested_concat",
        "nested_detach",
        "nested_numpify",
        "nested_truncate",
        "torch_distributed_zero_first",
    ),
    "transformers.trainer_utils": (
        "RemoveColumnsCollator",
        "TrainerMemoryTracker",
        "default_compute_objective",
        "find_executable_batch_size",
        "load_sharded_checkpoint",
        "rotate_checkpoints",
        "seed_worker",
        "sort_checkpoints",
    ),
}
_FROM_TRANSFORMERS = {name: module for module, names in _THEIR_MODULES.items() for name in names}

__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name the first time it is used."""
    if name in _HOME:
        value = _take_own(name)
    elif name in _FROM_TRANSFORMERS:
        value = _take_from_transformers(name)
    else:
        raise AttributeError(_unknown(name))
    globals()[name] = value  # later uses do not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_FROM_TRANSFORMERS})


def _take_own(name: str) -> Any:
    try:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name not in ("tensorflow", "keras", "jax"):
            raise
        from .errors import MissingPackage

        install = "'loopwright[tf]' jax" if error.name == "jax" else "'loopwright[tf]'"
        raise MissingPackage(error.name, needed_for=f"loopwright.{name}", install=install) from None


def _take_from_transformers(name: str) -> Any:
    try:
        return getattr(import_module(_FROM_TRANSFORMERS[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        from .errors import MissingPackage

        raise MissingPackage("transformers", needed_for=f"loopwright.{name}") from None


def _unknown(name: str) -> str:
    text = f"module 'loopwright' has no attribute {name!r}"
    if name.startswith("_"):  # requested by tools, not typed by users
        return text
    from difflib import get_close_matches

    close = get_close_matches(name, [*_HOME, *_FROM_TRANSFORMERS], n=1)
    return f"{text}; did you mean {close[0]!r}?" if close else text


if TYPE_CHECKING:
    from transformers import (
        DataCollatorForPermutationLanguageModeling as DataCollatorForPermutationLanguageModeling,
        HfArgumentParser as HfArgumentParser,
    )
    from transformers.modelcard import (
        TrainingSummary as TrainingSummary,
    )
    from transformers.optimization import (
        AdafactorSchedule as AdafactorSchedule,
    )
    from transformers.trainer_pt_utils import (
        BatchRebalanceSampler as BatchRebalanceSampler,
        DistributedLengthGroupedSampler as DistributedLengthGroupedSampler,
        DistributedSamplerWithLoop as DistributedSamplerWithLoop,
        EvalLoopContainer as EvalLoopContainer,
        IterableDatasetShard as IterableDatasetShard,
        LayerWiseDummyOptimizer as LayerWiseDummyOptimizer,
        LayerWiseDummyScheduler as LayerWiseDummyScheduler,
        LengthGroupedSampler as LengthGroupedSampler,
        ShardSampler as ShardSampler,
        get_model_param_count as get_model_param_count,
        get_parameter_names as get_parameter_names,
        nested_concat as nested_concat,
        nested_detach as nested_detach,
        nested_numpify as nested_numpify,
        nested_truncate as nested_truncate,
        torch_distributed_zero_first as torch_distributed_zero_first,
    )
    from transformers.trainer_utils import (
        RemoveColumnsCollator as RemoveColumnsCollator,
        TrainerMemoryTracker as TrainerMemoryTracker,
        default_compute_objective as default_compute_objective,
        find_executable_batch_size as find_executable_batch_size,
        load_sharded_checkpoint as load_sharded_checkpoint,
        rotate_checkpoints as rotate_checkpoints,
        seed_worker as seed_worker,
        sort_checkpoints as sort_checkpoints,
    )

    from .args.names import (
        EvaluationStrategy as EvaluationStrategy,
        FSDPOption as FSDPOption,
        HPSearchBackend as HPSearchBackend,
        HubStrategy as HubStrategy,
        IntervalStrategy as IntervalStrategy,
        OptimizerNames as OptimizerNames,
        ParallelMode as ParallelMode,
        SaveStrategy as SaveStrategy,
        SchedulerType as SchedulerType,
    )
    from .callbacks.early_stopping import EarlyStoppingCallback as EarlyStoppingCallback
    from .callbacks.flow import DefaultFlowCallback as DefaultFlowCallback
    from .callbacks.notebook import NotebookProgressCallback as NotebookProgressCallback
    from .callbacks.printer import PrinterCallback as PrinterCallback
    from .callbacks.progress import ProgressCallback as ProgressCallback
    from .core.checkpoint.manager import get_last_checkpoint as get_last_checkpoint
    from .core.events import CallbackHandler as CallbackHandler, TrainerCallback as TrainerCallback
    from .core.outputs import (
        BestRun as BestRun,
        EvalLoopOutput as EvalLoopOutput,
        EvalPrediction as EvalPrediction,
        PredictionOutput as PredictionOutput,
        TrainOutput as TrainOutput,
        speed_metrics as speed_metrics,
    )
    from .core.state import (
        ExportableState as ExportableState,
        TrainerControl as TrainerControl,
        TrainerState as TrainerState,
    )
    from .errors import (
        ArgumentsError as ArgumentsError,
        BusyError as BusyError,
        CheckpointError as CheckpointError,
        DataError as DataError,
        HubError as HubError,
        LogError as LogError,
        LoopwrightError as LoopwrightError,
        LostRankError as LostRankError,
        MetricError as MetricError,
        MissingPackage as MissingPackage,
        ModelError as ModelError,
        NonFiniteError as NonFiniteError,
        NotAvailable as NotAvailable,
        OutputError as OutputError,
        OverrideError as OverrideError,
        OwnerError as OwnerError,
        PeerError as PeerError,
        RanksDisagree as RanksDisagree,
        SearchError as SearchError,
        UnknownArgument as UnknownArgument,
    )
    from .jax.arguments import JAXTrainingArguments as JAXTrainingArguments
    from .jax.trainer import JAXTrainer as JAXTrainer
    from .keras.callbacks import KerasCallbackAdapter as KerasCallbackAdapter
    from .neuron.arguments import (
        NeuronTrainingArguments as NeuronTrainingArguments,
        Seq2SeqNeuronTrainingArguments as Seq2SeqNeuronTrainingArguments,
    )
    from .neuron.trainer import NeuronTrainer as NeuronTrainer, Seq2SeqNeuronTrainer as Seq2SeqNeuronTrainer
    from .pt.arguments import (
        Seq2SeqTrainingArguments as Seq2SeqTrainingArguments,
        TrainingArguments as TrainingArguments,
    )
    from .pt.checkpoint.weights import load_model as load_model
    from .pt.data.collators import (
        DataCollatorForLanguageModeling as DataCollatorForLanguageModeling,
        DataCollatorForMultipleChoice as DataCollatorForMultipleChoice,
        DataCollatorForSeq2Seq as DataCollatorForSeq2Seq,
        DataCollatorForTokenClassification as DataCollatorForTokenClassification,
        DataCollatorForWholeWordMask as DataCollatorForWholeWordMask,
        DataCollatorWithFlattening as DataCollatorWithFlattening,
        DataCollatorWithPadding as DataCollatorWithPadding,
        DefaultDataCollator as DefaultDataCollator,
        default_data_collator as default_data_collator,
    )
    from .pt.data.loaders import has_length as has_length
    from .pt.loss.targets import LabelSmoother as LabelSmoother
    from .pt.model.averaging import EMACallback as EMACallback, SWACallback as SWACallback
    from .pt.model.overflow import DebugUnderflowOverflow as DebugUnderflowOverflow
    from .pt.optim.greedy_lr import GreedyLR as GreedyLR
    from .pt.optim.optimizers.adafactor import Adafactor as Adafactor
    from .pt.optim.schedulers import (
        get_constant_schedule as get_constant_schedule,
        get_constant_schedule_with_warmup as get_constant_schedule_with_warmup,
        get_cosine_schedule_with_warmup as get_cosine_schedule_with_warmup,
        get_cosine_with_hard_restarts_schedule_with_warmup as get_cosine_with_hard_restarts_schedule_with_warmup,
        get_cosine_with_min_lr_schedule_with_warmup as get_cosine_with_min_lr_schedule_with_warmup,
        get_cosine_with_min_lr_schedule_with_warmup_lr_rate as get_cosine_with_min_lr_schedule_with_warmup_lr_rate,
        get_greedy_schedule as get_greedy_schedule,
        get_inverse_sqrt_schedule as get_inverse_sqrt_schedule,
        get_linear_schedule_with_warmup as get_linear_schedule_with_warmup,
        get_polynomial_decay_schedule_with_warmup as get_polynomial_decay_schedule_with_warmup,
        get_reduce_on_plateau_schedule as get_reduce_on_plateau_schedule,
        get_scheduler as get_scheduler,
        get_wsd_schedule as get_wsd_schedule,
    )
    from .pt.rng import enable_full_determinism as enable_full_determinism, set_seed as set_seed
    from .pt.seq2seq import Seq2SeqTrainer as Seq2SeqTrainer
    from .pt.trainer import Trainer as Trainer
    from .reporters.azure_ml import AzureMLCallback as AzureMLCallback
    from .reporters.clearml import ClearMLCallback as ClearMLCallback
    from .reporters.codecarbon import CodeCarbonCallback as CodeCarbonCallback
    from .reporters.comet_ml import CometCallback as CometCallback
    from .reporters.dagshub import DagsHubCallback as DagsHubCallback
    from .reporters.dvclive import DVCLiveCallback as DVCLiveCallback
    from .reporters.flyte import FlyteCallback as FlyteCallback
    from .reporters.kubeflow import KubeflowCallback as KubeflowCallback
    from .reporters.mlflow import MLflowCallback as MLflowCallback
    from .reporters.swanlab import SwanLabCallback as SwanLabCallback
    from .reporters.tensorboard import TensorBoardCallback as TensorBoardCallback
    from .reporters.trackio import TrackioCallback as TrackioCallback
    from .reporters.wandb import WandbCallback as WandbCallback
    from .tf.arguments import TFTrainingArguments as TFTrainingArguments
    from .tf.optimizers import (
        AdamWeightDecay as AdamWeightDecay,
        GradientAccumulator as GradientAccumulator,
        WarmUp as WarmUp,
        create_optimizer as create_optimizer,
    )
    from .tf.trainer import TFTrainer as TFTrainer
