"""accelerate's state of this process, which its loggers and helpers read."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ...errors import ArgumentsError, MissingPackage

if TYPE_CHECKING:
    from ..arguments import TrainingArguments


def initialize_accelerate(args: TrainingArguments) -> Any:
    """accelerate's state of this process, created if accelerate was imported: its loggers and helpers need it.

    With several processes their group is opened first, so that accelerate uses it.
    """
    states = sys.modules.get("accelerate.state")
    if states is None:
        return None
    on_cpu = args.device.type == "cpu"
    if not states.PartialState._shared_state:
        if args.world_size > 1:
            from ..distributed.process_group import open_processes

            open_processes(args.device, backend=args.ddp_backend, timeout=args.ddp_timeout_delta)
        states.PartialState(cpu=on_cpu)
    if not states.AcceleratorState._shared_state:
        from accelerate.utils import TorchDynamoPlugin

        states.AcceleratorState(
            mixed_precision=args.mixed_precision, cpu=on_cpu, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True
        )
    return states.PartialState()


def accelerator_arguments(args: TrainingArguments, model: Any, added: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments with which accelerate would create an Accelerator of these settings."""
    try:
        from accelerate.utils import DistributedDataParallelKwargs, TorchDynamoPlugin
    except ModuleNotFoundError:
        raise MissingPackage("accelerate", needed_for="trainer._build_accelerator_args") from None
    checkpointed = args.gradient_checkpointing or getattr(model, "is_gradient_checkpointing", False)
    unused = args.ddp_find_unused_parameters
    given = {
        "find_unused_parameters": not checkpointed if unused is None else unused,
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "static_graph": args.ddp_static_graph,
    }
    found = {
        "mixed_precision": args.mixed_precision,
        "deepspeed_plugin": args.deepspeed_plugin,
        **added,
        "kwargs_handlers": [DistributedDataParallelKwargs(**{k: v for k, v in given.items() if v is not None})],
        "dynamo_plugin": TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode),
    }
    if args.parallelism_config is not None:
        found["parallelism_config"] = args.parallelism_config
    return found


def check_configured_state() -> None:
    """Raise unless accelerate's state exists, for accelerator_config={"use_configured_state": True}."""
    states = sys.modules.get("accelerate.state")
    if states is None or not states.AcceleratorState._shared_state:
        raise ArgumentsError(
            "accelerator_config: use_configured_state=True, but accelerate has no state yet. Please define this "
            "beforehand, for example by creating an Accelerator, or remove use_configured_state"
        )
