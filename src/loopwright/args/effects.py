"""Arguments that were given but have no effect in this run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .field import specs
from .groups.distributed import read_accelerator_config
from .groups.speed import SpeedArgs
from .groups.tracking import TrackingArgs
from .names import IntervalStrategy, SaveStrategy, SchedulerType
from .process import ProcessInfo

if TYPE_CHECKING:
    from .base import BaseArguments

NO_WARMUP = (SchedulerType.CONSTANT, SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
NOT_ADAM = ("sgd", "adagrad", "adafactor", "rmsprop", "lomo", "adalomo", "schedule_free_sgd", "galore_adafactor")


@dataclass(frozen=True)
class Idle:
    """Fields without effect when a condition holds."""

    names: tuple[str, ...]
    when: Callable[[BaseArguments], bool]


def _always(args: BaseArguments) -> bool:
    return True


def _one_process(args: ProcessInfo) -> bool:
    return bool(args.world_size == 1)


def _nothing_compiles(args: SpeedArgs) -> bool:
    return bool(args.speed == "off" and not os.environ.get("PJRT_DEVICE"))  # lazy XLA compiles every step


def _no_tracker(*names: str) -> Callable[[TrackingArgs], bool]:
    return lambda args: not set(names) & set(args.report_to or ())


IDLE = (
    Idle(("local_rank",), _always),
    Idle(("save_on_interrupt",), lambda args: not args.enable_jit_checkpoint),
    Idle(
        (
            "ddp_find_unused_parameters",
            "ddp_bucket_cap_mb",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
            "ddp_backend",
            "ddp_timeout",
            "average_tokens_across_devices",
            "log_on_each_node",
            "log_level_replica",
            "save_on_each_node",
            "eval_use_gather_object",
        ),
        _one_process,
    ),
    Idle(("fsdp_config",), lambda args: not args.fsdp),
    # The others are also used by trainer.push_to_hub(), and hub_private_repo by Trackio.
    Idle(("hub_strategy",), lambda args: not args.push_to_hub),
    Idle(("hub_always_push",), lambda args: not args.push_to_hub or args.hub_strategy in ("end", "all_checkpoints")),
    Idle(
        ("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        _no_tracker("trackio"),
    ),
    Idle(("logging_dir",), _no_tracker("tensorboard")),
    Idle(("run_name",), lambda args: not args.report_to),
    Idle(("num_train_epochs",), lambda args: args.max_steps > 0),
    Idle(("logging_steps",), lambda args: args.logging_strategy != IntervalStrategy.STEPS and args.eval_steps is None),
    Idle(("eval_steps",), lambda args: args.eval_strategy != IntervalStrategy.STEPS),
    Idle(("save_steps",), lambda args: args.save_strategy != SaveStrategy.STEPS),
    Idle(
        ("warmup_steps",),
        lambda args: args.lr_scheduler_type in NO_WARMUP and not args.optim.startswith("schedule_free"),
    ),
    Idle(("adam_beta1", "adam_beta2", "adam_epsilon"), lambda args: args.optim.startswith(NOT_ADAM)),
    Idle(("optim_target_modules",), lambda args: not args.optim.startswith(("galore_", "apollo_"))),
    Idle(("gradient_checkpointing_kwargs",), lambda args: not args.gradient_checkpointing),
    Idle(("liger_kernel_config",), lambda args: not args.use_liger_kernel),
    Idle(("torch_compile_scope",), lambda args: not args.torch_compile),
    Idle(("max_recompiles",), lambda args: not args.torch_compile and (args.use_cpu or _nothing_compiles(args))),
    Idle(("fp16_opt_level",), lambda args: args.half_precision_backend != "apex"),
    Idle(
        ("length_column_name",),
        lambda args: (
            not args.batch_packing and args.train_sampling_strategy not in ("group_by_length", "batch_rebalance")
        ),
    ),
    Idle(
        ("per_device_train_batch_size",),
        lambda args: bool(args.batch_packing) and args.train_sampling_strategy != "group_by_length",
    ),
    Idle(("dataloader_multiprocessing_context", "dataloader_in_order"), lambda args: args.dataloader_num_workers == 0),
    Idle(
        ("generation_max_length", "generation_num_beams", "generation_config"),
        lambda args: not getattr(args, "predict_with_generate", True),
    ),
)
"""Which fields have no effect, and when."""


def without_effect(args: BaseArguments) -> list[str]:
    """Names of the arguments that differ from their default but have no effect in this run."""
    known = specs(type(args))
    idle = [name for row in IDLE if row.when(args) for name in row.names]
    changed = [name for name in idle if name in known and getattr(args, name) != known[name].default]
    spread = read_accelerator_config(args.accelerator_config)
    if _one_process(args) and not spread.even_batches:
        changed.append("accelerator_config.even_batches")
    if spread.dispatch_batches is False or (_one_process(args) and spread.dispatch_batches):
        changed.append("accelerator_config.dispatch_batches")
    if _one_process(args) and spread.split_batches:
        changed.append("accelerator_config.split_batches")
    if not spread.use_seedable_sampler:  # the order of samples is always a function of the seed
        changed.append("accelerator_config.use_seedable_sampler")
    return changed
