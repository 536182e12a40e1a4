"""Rules about several fields, one function each; a rule returns the problem, or None."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .derive import METRIC_SCHEDULES
from .field import nearest
from .groups.data import DataArgs
from .groups.distributed import DistributedArgs, read_accelerator_config, unsuited
from .groups.duration import DurationArgs
from .groups.evaluation import EvaluationArgs
from .groups.logging import LoggingArgs
from .groups.optimizer import OptimizerArgs, why_refused
from .groups.precision import PrecisionArgs
from .groups.saving import SavingArgs
from .groups.tracking import REFUSED, TRACKERS, TrackingArgs, third_party
from .names import IntervalStrategy, SaveStrategy
from .nested.sharding import read_fsdp, read_parallelism, wants_fsdp
from .problems import Problems, shown

if TYPE_CHECKING:
    from .base import BaseArguments

Rule = Callable[["BaseArguments"], "str | None"]

RULES: list[tuple[tuple[str, ...], Rule]] = []
"""Each rule with the fields it reads."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Add a function to RULES, with the fields it reads."""

    def keep(function: Rule) -> Rule:
        RULES.append((names, function))
        return function

    return keep


def apply_rules(args: BaseArguments, problems: Problems) -> None:
    """Add the problem of every violated rule; rules about invalid fields are skipped."""
    for names, function in RULES:
        complaint = None if problems.concern(names) else function(args)
        if complaint:
            problems.add(complaint)


@rule("fp16", "bf16")
def one_half_precision(args: PrecisionArgs) -> str | None:
    """Mixed precision uses one dtype."""
    return "fp16 and bf16 are both True; set only one of them" if args.fp16 and args.bf16 else None


@rule("fp8", "fp16")
def fp8_beside_bf16(args: PrecisionArgs) -> str | None:
    """FP8 layers need bfloat16 or float32 in the rest of the model."""
    return "fp8 and fp16 are both True; use fp8 with bf16=True" if args.fp8 and args.fp16 else None


@rule("per_device_train_batch_tokens", "speed")
def token_budgets_need_layouts(args: BaseArguments) -> str | None:
    """A token budget needs the layouts of `speed`, which regroup samples."""
    if args.per_device_train_batch_tokens and args.speed == "off":
        return "per_device_train_batch_tokens needs speed='auto' or 'max'; speed='off' keeps the collator's batches"
    return None


@rule("batch_packing", "per_device_train_batch_tokens")
def packing_needs_a_token_budget(args: DataArgs) -> str | None:
    """Packing needs a number of tokens per micro-batch."""
    if args.batch_packing and not args.per_device_train_batch_tokens:
        name = shown("batch_packing", args.batch_packing)
        return f"{name} needs per_device_train_batch_tokens, the tokens of a micro-batch, for example 8192"
    return None


@rule("batch_packing", "train_sampling_strategy")
def micro_batches_are_made_one_way(args: DataArgs) -> str | None:
    """Packing and rebalancing both choose the samples of a micro-batch."""
    if args.batch_packing and args.train_sampling_strategy == "batch_rebalance":
        return "batch_packing and train_sampling_strategy='batch_rebalance' both form micro-batches; set only one"
    return None


@rule("fp16_full_eval", "bf16_full_eval")
def one_evaluation_precision(args: PrecisionArgs) -> str | None:
    """Evaluation uses one dtype."""
    both = args.fp16_full_eval and args.bf16_full_eval
    return "fp16_full_eval and bf16_full_eval are both True; set only one of them" if both else None


@rule("half_precision_backend", "fp16")
def apex_needs_fp16(args: PrecisionArgs) -> str | None:
    """Apex supports float16 only."""
    if args.half_precision_backend == "apex" and not args.fp16:
        return "half_precision_backend='apex' needs fp16=True; Apex supports no other mixed precision"
    return None


@rule("max_steps", "num_train_epochs")
def some_duration(args: DurationArgs) -> str | None:
    """A run needs max_steps or num_train_epochs."""
    if args.max_steps > 0 or args.num_train_epochs > 0:
        return None
    both = f"{shown('num_train_epochs', args.num_train_epochs)} and {shown('max_steps', args.max_steps)}"
    return f"{both} leave nothing to train; one of them must be above 0"


@rule("logging_strategy", "logging_steps")
def logging_interval(args: LoggingArgs) -> str | None:
    """Logging by steps needs an interval."""
    if args.logging_strategy == IntervalStrategy.STEPS and args.logging_steps == 0:
        return "logging_steps=0 with logging_strategy='steps'; set an interval, or logging_strategy='no'"
    return None


@rule("save_strategy", "save_steps")
def saving_interval(args: SavingArgs) -> str | None:
    """Saving by steps needs an interval."""
    if args.save_strategy == SaveStrategy.STEPS and args.save_steps == 0:
        return "save_steps=0 with save_strategy='steps'; set an interval, or save_strategy='no'"
    return None


@rule("eval_strategy", "eval_steps", "logging_steps")
def evaluation_interval(args: EvaluationArgs) -> str | None:
    """Evaluating by steps needs an interval."""
    if args.eval_strategy == IntervalStrategy.STEPS and not args.eval_steps:
        return "eval_strategy='steps' needs an interval; set eval_steps or logging_steps above 0"
    return None


@rule("load_best_model_at_end", "eval_strategy")
def best_model_needs_evaluation(args: BaseArguments) -> str | None:
    """Only evaluations can be compared."""
    if args.load_best_model_at_end and args.eval_strategy == IntervalStrategy.NO:
        return "load_best_model_at_end=True needs evaluations; set eval_strategy='steps' or 'epoch'"
    return None


@rule("save_strategy", "eval_strategy")
def saving_best_needs_evaluation(args: BaseArguments) -> str | None:
    """Only evaluations can be compared."""
    if args.save_strategy == SaveStrategy.BEST and args.eval_strategy == IntervalStrategy.NO:
        return "save_strategy='best' needs evaluations; set eval_strategy='steps' or 'epoch'"
    return None


@rule("lr_scheduler_type", "eval_strategy")
def metric_schedule_needs_evaluation(args: BaseArguments) -> str | None:
    """A schedule that follows a metric needs one."""
    if args.lr_scheduler_type in METRIC_SCHEDULES and args.eval_strategy == IntervalStrategy.NO:
        name = shown("lr_scheduler_type", args.lr_scheduler_type)
        return f"{name} follows an evaluation metric; set eval_strategy='steps' or 'epoch'"
    return None


@rule("dataloader_prefetch_factor", "dataloader_num_workers")
def prefetching_needs_workers(args: DataArgs) -> str | None:
    """Only worker processes prefetch."""
    if args.dataloader_prefetch_factor is not None and args.dataloader_num_workers == 0:
        name = shown("dataloader_prefetch_factor", args.dataloader_prefetch_factor)
        return f"{name} needs dataloader_num_workers above 0"
    return None


@rule("dataloader_persistent_workers", "dataloader_num_workers")
def persistence_needs_workers(args: DataArgs) -> str | None:
    """Only worker processes can be persistent."""
    if args.dataloader_persistent_workers and args.dataloader_num_workers == 0:
        return "dataloader_persistent_workers=True needs dataloader_num_workers above 0"
    return None


@rule("optim")
def optimizers_step_after_the_backward(args: OptimizerArgs) -> str | None:
    """An optimizer steps when all gradients of an update are there."""
    return why_refused(str(args.optim))


@rule("optim", "optim_target_modules")
def low_rank_optimizers_need_targets(args: OptimizerArgs) -> str | None:
    """GaLore and APOLLO need the modules to project."""
    if args.optim.startswith(("galore_", "apollo_")) and not (args.optim_target_modules or why_refused(args.optim)):
        return f"{shown('optim', args.optim)} needs optim_target_modules, for example 'all-linear'"
    return None


@rule("report_to")
def trackers_exist(args: TrackingArgs) -> str | None:
    """Every tracker in report_to must be known, and must not be one that has ended."""
    for name in args.report_to or ():
        if name in REFUSED:
            return f"report_to: {name!r} cannot be used: {REFUSED[name]}"
    unknown = [name for name in args.report_to or () if name not in TRACKERS]
    unknown = [name for name in unknown if name not in third_party()] if unknown else []
    if unknown:
        names = ", ".join(sorted(TRACKERS))
        return f"report_to: {unknown[0]!r} is not a tracker{nearest(unknown[0], set(TRACKERS))} (known: {names})"
    return None


@rule("fsdp", "fsdp_config")
def sharding_makes_sense(args: DistributedArgs) -> str | None:
    """FSDP options must be known."""
    if args.fsdp_config is None and not wants_fsdp(args):
        return None
    try:
        read_fsdp(args.fsdp, args.fsdp_config)
    except (AttributeError, TypeError, ValueError) as error:
        return f"fsdp, fsdp_config: {error}"
    return None


@rule("parallelism_config")
def parallel_sizes_make_sense(args: DistributedArgs) -> str | None:
    """Parallel dimensions must be known, with integer sizes."""
    try:
        read_parallelism(args.parallelism_config)
    except (AttributeError, TypeError, ValueError) as error:
        return f"parallelism_config: {error}"
    return None


@rule("accelerator_config")
def batches_are_spread_one_way(args: BaseArguments) -> str | None:
    """Some options of AcceleratorConfig are not supported."""
    found = unsuited(read_accelerator_config(args.accelerator_config), one_process=args.world_size == 1)
    return f"accelerator_config: {'; '.join(found)}" if found else None
