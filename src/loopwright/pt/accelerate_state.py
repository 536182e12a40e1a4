"""accelerate's state of this process, which its loggers and helpers read."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import TrainingArguments


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
            from .distributed.process_group import open_processes

            open_processes(args.device, backend=args.ddp_backend, timeout=args.ddp_timeout_delta)
        states.PartialState(cpu=on_cpu)
    if not states.AcceleratorState._shared_state:
        from accelerate.utils import TorchDynamoPlugin

        states.AcceleratorState(
            mixed_precision=args.mixed_precision, cpu=on_cpu, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True
        )
    return states.PartialState()
