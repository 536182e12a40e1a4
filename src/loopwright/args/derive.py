"""Derived values: one function for each, applied in the order of definition."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from .field import list_of_names
from .groups.distributed import DistributedArgs, read_accelerator_config
from .groups.duration import DurationArgs
from .groups.hub import HubArgs
from .groups.logging import LoggingArgs
from .groups.memory import MemoryArgs
from .groups.optimizer import OptimizerArgs
from .groups.saving import SavingArgs
from .groups.script import ScriptArgs
from .groups.tracking import TrackingArgs, named_trackers
from .names import DebugOption, IntervalStrategy, SchedulerType
from .paths import plain_path
from .problems import Problems, short

if TYPE_CHECKING:
    from .base import BaseArguments

Derivation = Callable[["BaseArguments"], None]

DERIVATIONS: list[tuple[tuple[str, ...], Derivation]] = []
"""Each derivation with the fields it reads and writes."""

METRIC_SCHEDULES = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
"""Schedules that follow an evaluation metric."""


def derivation(*names: str) -> Callable[[Derivation], Derivation]:
    """Add a function to DERIVATIONS, with the fields it reads and writes."""

    def keep(function: Derivation) -> Derivation:
        DERIVATIONS.append((names, function))
        return function

    return keep


def derive(args: BaseArguments, problems: Problems) -> None:
    """Apply all derivations whose fields are valid."""
    for names, function in DERIVATIONS:
        if problems.concern(names):
            continue
        try:
            function(args)
        except ValueError as error:
            problems.add(f"{names[0]}: {error}", names[0])


def reason_of(name: str) -> str:
    """Why a field has a derived value, as the summary of its last derivation; empty if it has none."""
    found = [function.__doc__ or "" for names, function in DERIVATIONS if name in names]
    return found[-1].partition("\n")[0].rstrip(".") if found else ""


@derivation("output_dir")
def output_folder(args: DurationArgs) -> None:
    """Set the default folder, expand ~ and remove file://."""
    args.output_dir = plain_path(os.path.expanduser(args.output_dir or "trainer_output"))


@derivation("include_num_input_tokens_seen")
def token_count(args: LoggingArgs) -> None:
    """True means all tokens, False none."""
    value = args.include_num_input_tokens_seen
    words = {"true": "all", "false": "no", "none": "no"}
    args.include_num_input_tokens_seen = words.get(str(value).lower(), value)


@derivation("debug")
def debug_options(args: ScriptArgs) -> None:
    """A list of options, from a string of names."""
    words = args.debug.split() if isinstance(args.debug, str) else args.debug or []
    if list_of_names(words) is not None:
        raise ValueError(f"{short(words)} is neither text nor a list of names")
    args.debug = [DebugOption(word) for word in words]


@derivation("report_to")
def trackers(args: TrackingArgs) -> None:
    """A list of names, from a name, 'all' or 'none'."""
    names = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    if list_of_names(names) is not None:
        raise ValueError(f"{short(names)} is neither a name nor a list of names")
    args.report_to = named_trackers(names)


@derivation("accelerator_config")
def accelerator(args: DistributedArgs) -> None:
    """An AcceleratorConfig, from a dict or an object of that shape."""
    args.accelerator_config = read_accelerator_config(args.accelerator_config)


@derivation("accelerator_config", "gradient_accumulation_steps")
def accumulation(args: BaseArguments) -> None:
    """The micro-batches of an update, if they are given as num_steps of AcceleratorConfig."""
    options = read_accelerator_config(args.accelerator_config).gradient_accumulation_kwargs or {}
    steps, given = options.get("num_steps"), args.gradient_accumulation_steps
    if steps is not None and given == 1:  # the trainer refuses two different numbers
        args.gradient_accumulation_steps = steps


@derivation("logging_steps", "eval_steps", "save_steps", "warmup_steps")
def whole_steps(args: BaseArguments) -> None:
    """Convert step counts to int; only fractions of all steps remain float."""
    for name in ("logging_steps", "eval_steps", "save_steps", "warmup_steps"):
        value = getattr(args, name)
        if value is not None and value == int(value):
            setattr(args, name, int(value))


@derivation("resume_from_checkpoint")
def flag_to_resume(args: SavingArgs) -> None:
    """On a command line, True and False are words, not paths."""
    asked = args.resume_from_checkpoint
    if isinstance(asked, str) and asked.lower() in ("true", "false"):
        args.resume_from_checkpoint = asked.lower() == "true"


@derivation("adam_beta1", "adam_beta2")
def betas(args: OptimizerArgs) -> None:
    """Betas are float: torch refuses those of which one is an int."""
    args.adam_beta1, args.adam_beta2 = float(args.adam_beta1), float(args.adam_beta2)


@derivation("eval_strategy", "do_eval")
def script_evaluates(args: BaseArguments) -> None:
    """do_eval is True when the trainer evaluates."""
    args.do_eval = args.do_eval or args.eval_strategy != IntervalStrategy.NO


@derivation("eval_strategy", "eval_steps", "logging_steps")
def evaluation_interval(args: BaseArguments) -> None:
    """eval_steps defaults to logging_steps."""
    if args.eval_strategy == IntervalStrategy.STEPS and not args.eval_steps:
        args.eval_steps = args.logging_steps


@derivation(
    "metric_for_best_model", "greater_is_better", "load_best_model_at_end", "save_strategy", "lr_scheduler_type"
)
def best_metric(args: BaseArguments) -> None:
    """metric_for_best_model defaults to the loss where it is needed; larger is better unless the name ends in loss.

    For save_strategy="best" alone the trainer decides: it needs a name if there are other metrics.
    """
    needed = args.load_best_model_at_end or args.lr_scheduler_type in METRIC_SCHEDULES
    if args.metric_for_best_model is None and needed:
        args.metric_for_best_model = "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")


@derivation("torch_compile", "torch_compile_backend", "torch_compile_mode")
def compilation(args: MemoryArgs) -> None:
    """Setting a backend or a mode enables compilation; the default backend is inductor."""
    args.torch_compile = args.torch_compile or bool(args.torch_compile_backend or args.torch_compile_mode)
    if args.torch_compile:
        args.torch_compile_backend = args.torch_compile_backend or "inductor"


@derivation("use_cpu", "dataloader_pin_memory")
def pinned_memory(args: BaseArguments) -> None:
    """No pinned memory on the CPU: nothing is copied to a device."""
    args.dataloader_pin_memory = args.dataloader_pin_memory and not args.use_cpu


@derivation("disable_tqdm")
def progress_bar(args: LoggingArgs) -> None:
    """No progress bar if the log level hides warnings."""
    if args.disable_tqdm is None:
        args.disable_tqdm = logging.getLogger("loopwright").getEffectiveLevel() > logging.WARNING


@derivation("save_total_limit")
def kept_checkpoints(args: SavingArgs) -> None:
    """Zero or less means no limit."""
    if args.save_total_limit is not None and args.save_total_limit <= 0:
        args.save_total_limit = None


@derivation("hub_token")
def token(args: HubArgs) -> None:
    """Drop a token that is the mask written by to_dict."""
    if args.hub_token == "<HUB_TOKEN>":
        args.hub_token = None
