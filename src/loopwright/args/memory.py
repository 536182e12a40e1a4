"""Trading time for memory, compilation and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .field import Group, arg, non_negative, positive


@dataclass
class MemoryArgs(Group):
    """Trading time for memory, compilation and kernels."""

    title = "Memory, compilation and kernels"

    gradient_checkpointing: bool = arg(False, "Recompute activations in the backward pass instead of keeping them.")
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = arg(
        None, "Options for gradient checkpointing, as a dict or as JSON; policy=selective keeps matmuls and attention."
    )
    torch_compile: bool = arg(False, "Compile the model with torch.compile, each of its repeated blocks in place.")
    torch_compile_backend: str | None = arg(
        None, "Backend of torch.compile (inductor when not given); giving one switches compilation on."
    )
    torch_compile_mode: str | None = arg(None, "Mode of torch.compile; giving one switches compilation on.")
    torch_compile_scope: str = arg(
        "blocks", "What is compiled: blocks (each repeated block) or model (all of it).", choices=("blocks", "model")
    )
    max_recompiles: int | None = arg(
        None, "How often the model may be compiled again before the run says which input changed.", check=non_negative
    )
    use_liger_kernel: bool = arg(False, "Replace layers by Liger's kernels.")
    liger_kernel_config: dict[str, Any] | str | None = arg(None, "Options for Liger's kernels, as a dict or as JSON.")
    use_cache: bool = arg(False, "Let the model return its key-value cache in training.")
    torch_empty_cache_steps: int | None = arg(
        None, "Updates between two releases of the device's unused cached memory.", check=positive
    )
