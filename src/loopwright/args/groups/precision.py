"""Number formats of the computation."""

from __future__ import annotations

from dataclasses import dataclass

from ..field import Group, arg


@dataclass
class PrecisionArgs(Group):
    """Number formats of the computation."""

    title = "Precision"

    bf16: bool = arg(False, "Use bfloat16 mixed precision.")
    fp16: bool = arg(False, "Use float16 mixed precision, with loss scaling.")
    bf16_full_eval: bool = arg(False, "Evaluate with the weights cast to bfloat16.")
    fp16_full_eval: bool = arg(False, "Evaluate with the weights cast to float16.")
    fp8: bool = arg(
        False,
        "Compute linear layers in FP8 where a measurement shows a speedup; results differ from bf16 beyond rounding.",
    )
    tf32: bool | None = arg(None, "Allow (or forbid) TF32 in float32 matmuls; None leaves torch's setting alone.")
    half_precision_backend: str = arg(
        "auto",
        "Mixed precision backend: torch's own (auto, torch, cuda_amp, cpu_amp) or NVIDIA Apex (apex).",
        choices=("auto", "torch", "cuda_amp", "cpu_amp", "apex"),
    )
    fp16_opt_level: str = arg(
        "O1", "Apex's optimization level, with half_precision_backend='apex'.", choices=("O0", "O1", "O2", "O3")
    )
