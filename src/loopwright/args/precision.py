"""Number formats of the computation."""

from __future__ import annotations

from dataclasses import dataclass

from .field import Group, arg


@dataclass
class PrecisionArgs(Group):
    """Number formats of the computation."""

    title = "Precision"

    bf16: bool = arg(False, "Compute in bfloat16 where that is safe.")
    fp16: bool = arg(False, "Compute in float16 where that is safe, with loss scaling.")
    bf16_full_eval: bool = arg(False, "Evaluate with the weights themselves in bfloat16.")
    fp16_full_eval: bool = arg(False, "Evaluate with the weights themselves in float16.")
    fp8: bool = arg(
        False,
        "Compute linear layers in 8-bit floating point where a measurement shows that they become faster; results "
        "differ from bf16 beyond rounding.",
    )
    tf32: bool | None = arg(None, "Allow (or forbid) TF32 in float32 matrix products; None leaves it as it is.")
    half_precision_backend: str = arg(
        "auto",
        "What does mixed precision: torch's own (auto, torch, cuda_amp, cpu_amp) or NVIDIA Apex (apex).",
        choices=("auto", "torch", "cuda_amp", "cpu_amp", "apex"),
    )
    fp16_opt_level: str = arg(
        "O1", "Apex's optimisation level, with half_precision_backend='apex'.", choices=("O0", "O1", "O2", "O3")
    )
