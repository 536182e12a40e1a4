"""BaseArguments: every argument in one flat class, derived and validated on construction, without a framework."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Self

from ..errors import UnknownArgument
from .derive import derive
from .effects import without_effect
from .field import UNSET, is_redeclared, nearest, specs
from .groups.data import DataArgs
from .groups.distributed import DistributedArgs
from .groups.duration import DurationArgs
from .groups.evaluation import EvaluationArgs
from .groups.hardware import HardwareArgs
from .groups.hub import HubArgs
from .groups.logging import LEVELS, LoggingArgs
from .groups.loss import LossArgs
from .groups.memory import MemoryArgs
from .groups.optimizer import OptimizerArgs
from .groups.precision import PrecisionArgs
from .groups.saving import SavingArgs
from .groups.schedule import ScheduleArgs
from .groups.script import ScriptArgs
from .groups.speed import SpeedArgs
from .groups.tracking import TrackingArgs, tensorboard_folder
from .legacy import LegacyArgs, apply_legacy
from .names import SaveStrategy
from .problems import Problems, shown
from .process import ProcessInfo
from .reading import check, read
from .rules import apply_rules
from .secrets import MASK, is_secret, masked_text
from .setters import Setters


class InitSignature:
    """Shows a class's __init__ to inspect and help(), which would otherwise show __new__."""

    def __get__(self, instance: object, cls: Any) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


# A dataclass lists the fields of its last base first: DurationArgs, with output_dir, has to stay at the end.
@dataclass
class BaseArguments(
    Setters,
    ProcessInfo,
    LegacyArgs,
    ScriptArgs,
    SpeedArgs,
    DistributedArgs,
    HubArgs,
    TrackingArgs,
    LoggingArgs,
    HardwareArgs,
    MemoryArgs,
    PrecisionArgs,
    SavingArgs,
    EvaluationArgs,
    DataArgs,
    LossArgs,
    ScheduleArgs,
    OptimizerArgs,
    DurationArgs,
):
    """All arguments of a run. Derived and checked on construction; only the set_* methods change them later."""

    __signature__: ClassVar[InitSignature] = InitSignature()
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        "accelerator_config",
        "fsdp_config",
        "deepspeed",
        "gradient_checkpointing_kwargs",
        "lr_scheduler_kwargs",
        "param_groups",
        "train_dataset_weights",
    ]
    """Fields that accept a dict as JSON; subclasses of third parties add their own."""
    deepspeed_plugin = hf_deepspeed_config = None
    logger_name: ClassVar[str] = "loopwright"
    """The logger whose level is the one of `passive`; set by `loopwright.compat`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse names that do not exist, with the nearest one that does.

        Done here because a dataclass derived from this one generates its own __init__.
        """
        known = accepted_names(cls)
        unknown = [name for name in kwargs if known is not None and name not in known]
        if unknown:
            rows = specs(cls)  # old names are handled by legacy.py
            new = [each for each in known or () if each not in rows or rows[each].row is None]
            raise UnknownArgument([f"{cls.__name__} has no argument {name!r}{nearest(name, new)}" for name in unknown])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.settle()

    def settle(self) -> None:
        """Translate old names, parse, derive and check all values; raises one error with all problems."""
        problems = Problems()
        self._refuse_arrays(problems)
        apply_legacy(self, problems)
        self._read_fields(problems)
        self._read_added_dicts(problems)
        derive(self, problems)
        self._check_fields(problems)
        apply_rules(self, problems)
        self.settle_framework(problems)
        problems.raise_if_any()

    def settle_framework(self, problems: Problems) -> None:
        """Add problems for what a framework does not support; overridden by the framework's arguments."""

    def _refuse_arrays(self, problems: Problems) -> None:
        """Add a problem for arrays and tensors: no argument is one, and most comparisons with one raise."""
        for name in specs(type(self)):
            value = getattr(self, name)
            if isinstance(getattr(value, "shape", None), tuple) and tuple(value.shape):
                problems.add(f"{name}: a {type(value).__name__} of shape {tuple(value.shape)} is not an argument", name)
                setattr(self, name, UNSET if specs(type(self))[name].row is not None else None)

    def _read_fields(self, problems: Problems) -> None:
        for name, spec in specs(type(self)).items():
            if spec.row is None and name not in problems.broken:
                try:
                    setattr(self, name, read(spec, getattr(self, name)))
                except ValueError as error:
                    problems.add(f"{name}: {error}", name)

    def _read_added_dicts(self, problems: Problems) -> None:
        """Parse dicts of fields that a subclass has declared and added to `_VALID_DICT_FIELDS`."""
        for name in set(type(self)._VALID_DICT_FIELDS) - set(specs(type(self))):
            value = getattr(self, name, None)
            if isinstance(value, str) and value.lstrip().startswith("{"):
                try:
                    setattr(self, name, json.loads(value))
                except ValueError as error:
                    problems.add(f"{shown(name, value)}: not JSON ({error})", name)

    def _check_fields(self, problems: Problems) -> None:
        for name, spec in specs(type(self)).items():
            if spec.row is None and name not in problems.broken:
                value = getattr(self, name)
                complaint = check(spec, value)
                if complaint:
                    problems.add(f"{shown(name, value)}: {complaint}", name)

    def without_effect(self) -> list[str]:
        """Names of the arguments that were set but have no effect in this run."""
        return without_effect(self)

    @property
    def train_batch_size(self) -> int:
        """Samples per forward pass of training."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples per forward pass of evaluation."""
        return self.per_device_eval_batch_size

    @property
    def mixed_precision(self) -> str:
        """The dtype of mixed precision: fp16, bf16 or no."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "no"

    @property
    def best_model_metric(self) -> str | None:
        """The metric that selects the best model; None if none is selected."""
        return self.metric_for_best_model or ("loss" if self.save_strategy == SaveStrategy.BEST else None)

    def get_process_log_level(self) -> int:
        """The log level of this process; for `passive`, the current level of `logger_name`."""
        level = LEVELS[self.log_level if self.should_log else self.log_level_replica]
        return level or logging.getLogger(self.logger_name).getEffectiveLevel()

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Number of warmup updates in a run of `num_training_steps` updates."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    def get_tensorboard_dir(self) -> str:
        """TensorBoard's folder; without logging_dir its name contains the current time, so two calls may differ."""
        return tensorboard_folder(self.logging_dir, str(self.output_dir))

    def to_dict(self) -> dict[str, Any]:
        """All arguments as plain values; tokens are masked and old names omitted."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}
        own, old = type(self), [name for name, spec in specs(type(self)).items() if spec.row is not None]
        for name in old:
            if values[name] is UNSET or not is_redeclared(own, name):
                del values[name]
        return {name: _masked(name, value) for name, value in values.items() if value is not UNSET}

    def to_json_string(self) -> str:
        """All arguments as JSON."""
        return json.dumps(without_secrets(self.to_dict()), indent=2, default=_as_text)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """All arguments as numbers, booleans and strings, for trackers that accept nothing else."""
        sizes = {"train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        values = {**without_secrets(self.to_dict()), **sizes}
        return {
            name: value if type(value) in (bool, int, float, str) else _as_text(value) for name, value in values.items()
        }

    def __str__(self) -> str:
        lines = "".join(f"  {name}={value!r},\n" for name, value in sorted(without_secrets(self.to_dict()).items()))
        return f"{type(self).__name__}(\n{lines})"


def accepted_names(cls: Any) -> frozenset[str] | None:
    """The keywords that a class's __init__ accepts; None if it accepts any."""
    return _accepted_names(cls.__init__)


@functools.cache
def _accepted_names(init: Callable[..., None]) -> frozenset[str] | None:
    parameters = inspect.signature(init).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _as_text(value: Any) -> str:
    """str() of a value, or its type if that raises."""
    try:
        return str(value)
    except Exception:  # the value is the user's
        return f"<{type(value).__name__}>"


def _masked(name: str, value: Any) -> Any:
    if name.endswith("_token") and value is not None:
        return f"<{name.upper()}>"
    return plain(value)


def without_secrets(value: Any) -> Any:
    """JSON values with the credentials of URLs, values under secret names, and well-known tokens masked."""
    if isinstance(value, str):
        return masked_text(value)
    if isinstance(value, dict):
        secret = {key: each for key, each in value.items() if isinstance(each, str) and is_secret(str(key))}
        hidden = {key for key, each in secret.items() if not each.startswith("<")}  # else it is masked already
        return {key: MASK if key in hidden else without_secrets(each) for key, each in value.items()}
    return type(value)(map(without_secrets, value)) if type(value) in (list, tuple) else value


def plain(value: Any) -> Any:
    """The value converted to JSON types as far as possible."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if not isinstance(value, type) and callable(getattr(value, "to_dict", None)):
        return plain(value.to_dict())
    return value
