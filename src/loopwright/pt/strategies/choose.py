"""Choosing the strategy of a run: one table of supported combinations, and the reasons against the others.

The choice depends only on the arguments, before a model or data exist.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...args.base import BaseArguments
from ...args.groups.distributed import DistributedArgs
from ...args.nested.sharding import ParallelSizes, read_fsdp, read_parallelism, unneeded_keys, wants_fsdp
from ...args.nested.zero import contradictions, stage_of
from ...args.process import ProcessInfo
from ...core.distributed.agreement import compare_arguments
from ...errors import ArgumentsError
from ..device_traits import kind_of
from ..devices import is_lazy
from ..distributed.process_group import Processes, open_processes
from ..precision import Precision
from .single import SingleDevice

Build = Callable[[BaseArguments, torch.device, Precision], SingleDevice]


@dataclass(frozen=True)
class Unsupported:
    """A combination that is invalid or not available yet, with an alternative."""

    reason: str


# ---- builders: a strategy is imported only when it is chosen ---------------------------------------------------------


def _single(args: BaseArguments, device: torch.device, precision: Precision) -> SingleDevice:
    special = kind_of(device).strategy
    if special is None:
        return SingleDevice(device, precision, non_blocking=_non_blocking(args))
    made: SingleDevice = special(args, device, precision)
    return made


def _ddp(args: BaseArguments, device: torch.device, precision: Precision) -> SingleDevice:
    from .ddp import DataParallel

    names = {
        "ddp_find_unused_parameters": "find_unused_parameters",
        "ddp_bucket_cap_mb": "bucket_cap_mb",
        "ddp_broadcast_buffers": "broadcast_buffers",
        "ddp_static_graph": "static_graph",
    }
    given = {torch_name: getattr(args, ours) for ours, torch_name in names.items() if getattr(args, ours) is not None}
    return DataParallel(device, precision, _processes(args, device), options=given, non_blocking=_non_blocking(args))


def _fsdp(args: BaseArguments, device: torch.device, precision: Precision) -> SingleDevice:
    from .fsdp import FullySharded

    options, sizes = read_fsdp(args.fsdp or True, args.fsdp_config), read_parallelism(args.parallelism_config)
    replicas = sizes.dp_replicate_size
    if options.hybrid and replicas == 1:  # one full model per machine
        replicas = max(args.world_size // _on_this_machine(args), 1)
    return FullySharded(
        device,
        precision,
        _processes(args, device),
        options=options,
        replicas=replicas,
        compute_dtype=torch.bfloat16 if args.bf16 else None,
        non_blocking=_non_blocking(args),
    )


def _tensor(args: BaseArguments, device: torch.device, precision: Precision) -> SingleDevice:
    from .tensor import TensorParallel

    sizes = read_parallelism(args.parallelism_config)
    sharding = read_fsdp(args.fsdp or True, args.fsdp_config) if "fsdp" in requested_parallelism(args) else None
    return TensorParallel(
        device,
        precision,
        _processes(args, device),
        size=sizes.tp_size,
        plan=sizes.tp_plan,
        sharding=sharding,
        compute_dtype=torch.bfloat16 if args.bf16 else None,
        non_blocking=_non_blocking(args),
    )


def _deepspeed(args: BaseArguments, device: torch.device, precision: Precision) -> SingleDevice:
    from .deepspeed import DeepSpeed

    return DeepSpeed(device, precision, _processes(args, device), args=args, non_blocking=_non_blocking(args))


def _processes(args: BaseArguments, device: torch.device) -> Processes:
    """The ranks, compared when they first meet: those with other strategies would wait for each other."""
    processes = open_processes(device, backend=args.ddp_backend, timeout=args.ddp_timeout_delta)
    if not processes.has_compared:
        processes.has_compared = True
        compare_arguments(args, processes.host.all_gather_numbers)
    return processes


def _on_this_machine(args: ProcessInfo) -> int:

    return int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))


def _non_blocking(args: BaseArguments) -> bool:
    return bool(getattr(args.accelerator_config, "non_blocking", False)) or args.dataloader_pin_memory


# ---- the table -------------------------------------------------------------------------------------------------------

TABLE: dict[frozenset[str], Build | Unsupported] = {
    frozenset(): _single,
    frozenset({"processes"}): _ddp,
    frozenset({"processes", "replicas"}): _ddp,
    frozenset({"fsdp"}): _fsdp,
    frozenset({"processes", "fsdp"}): _fsdp,
    frozenset({"processes", "fsdp", "replicas"}): _fsdp,
    frozenset({"processes", "tensor"}): _tensor,
    frozenset({"processes", "tensor", "fsdp"}): _tensor,
    frozenset({"processes", "tensor", "replicas"}): Unsupported(
        "parallelism_config: dp_replicate_size with tp_size is not supported by torch (DDP does not accept "
        "tensor-parallel parameters); use dp_shard_size with fsdp=True instead"
    ),
    frozenset({"processes", "tensor", "fsdp", "replicas"}): Unsupported(
        "parallelism_config: dp_replicate_size, dp_shard_size and tp_size together are not available; use two of them"
    ),
    frozenset({"deepspeed"}): _deepspeed,
    frozenset({"processes", "deepspeed"}): _deepspeed,
    frozenset({"processes", "deepspeed", "fsdp"}): Unsupported(
        "deepspeed and fsdp both shard the model; use only one of them"
    ),
    frozenset({"deepspeed", "fsdp"}): Unsupported("deepspeed and fsdp both shard the model; use only one of them"),
    frozenset({"processes", "deepspeed", "tensor"}): Unsupported(
        "parallelism_config: tp_size does not work with deepspeed; use it with fsdp=True, or deepspeed alone"
    ),
}  # fmt: skip
"""Requested combination -> its builder."""

NOWHERE = {
    "context": (
        "parallelism_config: cp_size (context parallelism) is not available, since torch has no CPU implementation to "
        "test it with; remove cp_size"
    ),
    "sequence": "parallelism_config: sp_size (DeepSpeed's sequence parallelism) is not available; remove it",
    "pipeline": "parallelism_config: pp_size (pipeline parallelism) is not available; remove it",
    "expert": "parallelism_config: ep_size (expert parallelism) is not available; remove it",
}
"""Options that are refused in any combination."""

ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "schedule_free_adamw",
               "schedule_free_sgd", "schedule_free_radam", "lion_32bit")  # fmt: skip
"""Optimizers that treat every element of a parameter independently, so that they work on shards."""

LIMITS: list[tuple[tuple[str, ...], Callable[[BaseArguments], bool], str]] = [
    (
        ("processes",),
        lambda args: bool(args.auto_find_batch_size),
        (
            "auto_find_batch_size=True with several ranks: one rank running out of memory would leave the others "
            "hanging; find a batch size that fits on one rank first"
        ),
    ),
    (
        ("fsdp", "tensor"),
        lambda args: bool(args.fp16),
        "fp16=True needs loss scaling, which does not support sharded gradients; use bf16=True with fsdp and tp_size",
    ),
    (
        ("fsdp", "tensor"),
        lambda args: bool(args.fp16_full_eval or args.bf16_full_eval),
        "fp16_full_eval and bf16_full_eval cast whole models; use bf16=True with fsdp and tp_size",
    ),
    (
        ("fsdp", "tensor"),
        lambda args: args.optim not in ELEMENTWISE,
        "this optim needs whole parameters, but with fsdp or tp_size each rank holds a shard; use one of "
        + ", ".join(ELEMENTWISE),
    ),
    (
        ("fsdp", "tensor", "deepspeed"),
        lambda args: args.checkpoint_format == "transformers" and args.save_strategy != "no",
        (
            "checkpoint_format='transformers' does not support the shards of fsdp, tp_size and deepspeed; use "
            "'native', and save_model for full weights"
        ),
    ),
    (
        ("deepspeed",),
        lambda args: args.on_nonfinite != "continue",
        "on_nonfinite: DeepSpeed itself decides whether a step is applied; leave it at 'continue'",
    ),
    (
        ("deepspeed",),
        lambda args: not isinstance(args.deepspeed, dict) or stage_of(args.deepspeed) not in (1, 2, 3),
        "deepspeed: zero_optimization.stage must be 1, 2 or 3",
    ),
    (
        ("deepspeed",),
        lambda args: not args.optim.startswith(("adamw_torch", "sgd")),
        "optim with deepspeed must be one of adamw_torch, adamw_torch_fused, sgd, since ZeRO flattens parameters",
    ),
]
"""Arguments that some strategies do not support: options, condition and reason."""


def requested_parallelism(args: BaseArguments) -> frozenset[str]:
    """The options of the table that these arguments request."""
    sizes = read_parallelism(args.parallelism_config)
    sharded = wants_fsdp(args) or sizes.dp_shard_size > 1
    hybrid = wants_fsdp(args) and read_fsdp(args.fsdp, args.fsdp_config).hybrid
    wanted = {
        "processes": args.world_size > 1,
        "fsdp": sharded,
        "replicas": sizes.dp_replicate_size > 1 or (hybrid and args.world_size > 1),
        "tensor": sizes.tp_size > 1,
        "context": sizes.cp_size > 1,
        "sequence": sizes.sp_size > 1,
        "pipeline": sizes.pp_size > 1,
        "expert": sizes.ep_size > 1,
        "deepspeed": args.deepspeed is not None,
    }
    return frozenset(name for name, asked in wanted.items() if asked)


def choose_strategy(args: BaseArguments, device: torch.device, precision: Precision) -> SingleDevice:
    """The strategy for these arguments; raises an error with the reason if there is none."""
    if is_lazy(device) and requested_parallelism(args):
        chosen_row(args)  # unsupported combinations are refused on every device
        if requested_parallelism(args) == {"processes"}:
            build = kind_of(device).processes
            assert build is not None
            made: SingleDevice = build(args, device, precision)
            return made
        wanted = " and ".join(sorted(requested_parallelism(args)))
        raise ArgumentsError(
            f"on lazy XLA each rank holds the whole model, but this run uses {wanted}; start one process, and "
            "shard with NeuronTrainingArguments(xla_spmd='fsdp', tensor_parallel_size=...)"
        )
    return chosen_row(args)(args, device, precision)


def chosen_row(args: BaseArguments) -> Build:
    """The builder in the table; raises with all reasons if the arguments cannot be honoured."""
    asked = requested_parallelism(args)
    row = TABLE.get(
        asked - set(NOWHERE), Unsupported(f"{' with '.join(sorted(asked))}: this combination is not supported")
    )
    problems = [NOWHERE[name] for name in sorted(asked) if name in NOWHERE]
    problems += [] if problems or not isinstance(row, Unsupported) else [row.reason]
    problems += [] if problems else _wrong_sizes(read_parallelism(args.parallelism_config), asked, args.world_size)
    problems += [reason for names, applies, reason in LIMITS if asked & set(names) and applies(args)]
    if "deepspeed" in asked and isinstance(args.deepspeed, dict):
        problems += [f"deepspeed: {problem}" for problem in contradictions(args.deepspeed, args, args.world_size)]
    if problems:
        raise ArgumentsError(problems)
    assert not isinstance(row, Unsupported)
    return row


def _wrong_sizes(sizes: ParallelSizes, asked: frozenset[str], world: int) -> list[str]:
    """Errors for sizes that do not multiply to the number of ranks."""
    given = sizes.dp_replicate_size * sizes.dp_shard_size * sizes.other_than_data()
    if world % sizes.tp_size or (given > 1 and world % given):
        return [
            (
                f"parallelism_config needs {given} ranks or a multiple, but there are {world}; change the sizes, or "
                "the number of processes"
            )
        ]
    if "tensor" in asked and world > sizes.tp_size and "fsdp" not in asked:
        return [
            (
                f"tp_size={sizes.tp_size} on {world} ranks leaves {world // sizes.tp_size} replicas of the model, "
                "which torch synchronizes by sharding only; also set fsdp=True (or "
                f"dp_shard_size={world // sizes.tp_size})"
            )
        ]
    if sizes.dp_shard_size > 1 and given != world:
        return [f"parallelism_config is for {given} ranks, but there are {world}; change dp_shard_size"]
    return []


def unused_options(args: DistributedArgs) -> list[str]:
    """Warnings about keys that have no effect."""
    keys = unneeded_keys(args.fsdp_config) if wants_fsdp(args) else {}
    return [f"fsdp_config[{key!r}] has no effect: {reason}" for key, reason in keys.items()]
