"""Trading time for memory, compilation and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..field import Group, arg, non_negative, options, positive


@dataclass
class MemoryArgs(Group):
    """Trading time for memory, compilation and kernels."""

    title = "Memory, compilation and kernels"

    gradient_checkpointing: bool = arg(False, "Recompute activations in the backward pass instead of storing them.")
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = arg(
        None,
        "Options for gradient checkpointing, as a dict or as JSON; policy=selective keeps matmuls and attention.",
        check=options,
    )
    torch_compile: bool = arg(False, "Compile the model with torch.compile, each repeated block in place.")
    torch_compile_backend: str | None = arg(
        None, "Backend of torch.compile (default: inductor); setting it enables compilation."
    )
    torch_compile_mode: str | None = arg(None, "Mode of torch.compile; setting it enables compilation.")
    torch_compile_scope: str = arg(
        "blocks",
        ("What to compile: blocks (each repeated block) or model (the whole model)."),
        choices=("blocks", "model"),
    )
    max_recompiles: int | None = arg(
        None, "Recompilations allowed before the run reports which input changed.", check=non_negative
    )
    use_liger_kernel: bool = arg(False, "Use Liger kernels for the run, if loss and gradients are the same.")
    liger_kernel_config: dict[str, Any] | str | None = arg(
        None, "Options for Liger kernels, as a dict or as JSON.", check=options
    )
    use_cache: bool = arg(False, "Let the model return its key-value cache in training.")
    torch_empty_cache_steps: int | None = arg(
        None, "Steps between two releases of the device's unused cached memory.", check=positive
    )
