"""Linear layers in FP8: forward and both products of the backward pass; the weights are unchanged.

Opt-in, since FP8 changes results: a product of 8-bit numbers has about two digits. A layer is changed only if a
measurement on the device shows that it becomes faster; small layers lose more by conversion than they gain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ArgumentsError
from ...notices import logger

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
"""e4m3 for activations and weights, which need precision; e5m2 for gradients, which need range."""

GAIN = 0.95
"""Largest fraction of the plain time that a layer may take in FP8 to be changed."""

MULTIPLE = 16
"""The kernels require sizes that are a multiple of this."""

Measure = Callable[[int, int], "Timing"]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of forward and backward of one layer."""

    plain: float
    fp8: float

    @property
    def wins(self) -> bool:
        return self.fp8 <= GAIN * self.plain


@dataclass
class Fp8Layers:
    """The layers of a model that use FP8, why the others do not, and the measurements."""

    layers: list[nn.Linear] = field(default_factory=list)
    left: Counter[str] = field(default_factory=Counter)
    timings: dict[tuple[int, int], Timing] = field(default_factory=dict)

    def remove(self) -> None:
        """Restore the layers' own forward."""
        for layer in self.layers:
            layer.__dict__.pop("forward", None)
        self.layers = []

    def summary(self) -> str:
        """One line: the number of layers, and why others are not changed."""
        rest = "".join(f"; {count} {why}" for why, count in self.left.items())
        return f"fp8: {len(self.layers)} linear layers{rest}"


def refuse_without_fp8(device: torch.device) -> None:
    """Raise `ArgumentsError` if the device has no FP8 matrix products."""
    reason = _no_fp8(device)
    if reason:
        raise ArgumentsError(
            f"fp8=True, but {device} {reason}. FP8 needs an NVIDIA GPU of compute capability 8.9 or newer (Ada, "
            "Hopper, Blackwell); use bf16=True alone."
        )


def _no_fp8(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return "is not an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) >= (8, 9) else f"has compute capability {major}.{minor}"


def use_fp8(model: nn.Module, measure: Measure) -> Fp8Layers:
    """Switch the linear layers that `measure` shows to be faster to FP8; names in the state dict are unchanged.

    `measure(inputs, outputs)` times a layer of that size with the run's number of tokens.
    """
    found = Fp8Layers()
    shared = _shared_weights(model)
    for module in model.modules():
        if not isinstance(module, nn.Linear):
            continue
        reason = _left_alone(module, shared)
        if reason is None:
            size = (module.in_features, module.out_features)
            if size not in found.timings:
                found.timings[size] = measure(*size)
            reason = None if found.timings[size].wins else "not faster"
        if reason is not None:
            found.left[reason] += 1
            continue
        module.forward = MethodType(fp8_forward, module)
        found.layers.append(module)
    logger.info(found.summary())
    return found


def _left_alone(layer: nn.Linear, shared: set[int]) -> str | None:
    """Why a layer keeps its own forward regardless of its speed; None if it may be changed."""
    if type(layer) is not nn.Linear or "forward" in layer.__dict__:
        return "of an unsupported type"
    if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
        return f"with sizes not divisible by {MULTIPLE}"
    if layer.weight.dtype not in (torch.float32, torch.bfloat16):
        return f"in {layer.weight.dtype}".replace("torch.", "")
    return "the head" if id(layer.weight) in shared else None


def _shared_weights(model: nn.Module) -> set[int]:
    """Ids of tied weights, which several modules hold, and of the output layer's weight."""
    count = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    shared = {key for key, times in count.items() if times > 1}
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return shared if getattr(head, "weight", None) is None else shared | {id(head.weight)}


# ---- computing ------------------------------------------------------------------------------------------------------


def fp8_forward(self: nn.Linear, input: Tensor) -> Tensor:
    """Replaces `nn.Linear.forward`; evaluation uses the unquantized weights."""
    if not self.training or input.numel() == 0:
        return nn.functional.linear(input, self.weight, self.bias)
    kind = input.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
    rows = input.reshape(-1, self.in_features).to(dtype)
    result: Tensor = _Linear.apply(rows, self.weight, self.bias)
    return result.view(*input.shape[:-1], self.out_features)


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias, each product in FP8 with one scale per tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x8, x_scale = as_rows(x, VALUES)
        w8, w_scale = as_rows(weight.detach(), VALUES)  # compilers treat a parameter's shape as constant
        # The high-precision input is saved, not its FP8 copy: layers with the same input share it.
        ctx.save_for_backward(x, weight, x_scale, w_scale)
        ctx.bias_dtype = None if bias is None else bias.dtype
        out = scaled_product(x8, w8.t(), x_scale, w_scale, dtype=x.dtype, fast=True)
        return out if bias is None else out + bias.to(out.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, x_scale, w_scale = ctx.saved_tensors
        (gradient,) = gradients
        gradient = gradient.contiguous()
        for_x, for_weight, for_bias = ctx.needs_input_grad
        g8, g8_columns, g_scale = as_both(_padded(gradient), GRADIENTS)
        of_x = of_weight = of_bias = None
        if for_x:
            w8 = as_columns(weight.detach(), w_scale, VALUES)
            of_x = scaled_product(g8[: len(gradient)], w8.t(), g_scale, w_scale, dtype=x.dtype)
        if for_weight:
            x8 = as_columns(_padded(x), x_scale, VALUES)
            of_weight = scaled_product(g8_columns, x8.t(), g_scale, x_scale, dtype=weight.dtype)
        if for_bias:
            of_bias = gradient.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return of_x, of_weight, of_bias


def scaled_product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """a @ b of FP8 tensors times their scales; `a` is row-major, `b` column-major."""
    return torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)


def dequantised_product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """`scaled_product` in float32, as a reference."""
    return (a.float() * a_scale) @ (b.float() * b_scale)


def _padded(x: Tensor) -> Tensor:
    """The tensor with rows of zeros added, to a number the kernels support."""
    return nn.functional.pad(x, (0, 0, 0, -len(x) % MULTIPLE)) if len(x) % MULTIPLE else x


# ---- converting -----------------------------------------------------------------------------------------------------


def _rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = _scale(x, dtype)
    return _cast(x, scale, dtype), scale


def _columns(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _cast(x, scale, dtype).t().contiguous()


def _both(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    scale = _scale(x, dtype)
    rows = _cast(x, scale, dtype)
    return rows, rows.t().contiguous(), scale


def _scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of an FP8 tensor: the largest absolute value maps to the largest FP8 number, so none overflows."""
    # A value that is not finite makes the scale and the whole product not finite, so it is not hidden.
    return x.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-most, most).to(dtype)


class _Fused:
    """A function of elementwise steps, compiled into one kernel on GPUs: separate kernels would cost the gain."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._plain = function
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, x: Tensor, *rest: Any) -> Any:
        if x.device.type != "cuda" or torch.compiler.is_compiling():
            return self._plain(x, *rest)
        if self._compiled is None:
            self._compiled = torch.compile(self._plain, dynamic=True)
        return self._compiled(x, *rest)


as_rows, as_columns, as_both = _Fused(_rows), _Fused(_columns), _Fused(_both)


# ---- measuring ------------------------------------------------------------------------------------------------------


def measured_on(device: torch.device, tokens: int, *, weight: torch.dtype, compute: torch.dtype) -> Measure:
    """A `measure` for `use_fp8`: times layers on the device with this many tokens and these dtypes."""

    def measure(inputs: int, outputs: int) -> Timing:
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False, device=device, dtype=weight)
        draws = torch.Generator(device).manual_seed(0)  # does not change the run's random states
        with torch.no_grad():
            layer.weight.normal_(std=inputs**-0.5, generator=draws)
        x = torch.empty(tokens, inputs, device=device, dtype=compute).normal_(generator=draws).requires_grad_()
        gradient = torch.empty(tokens, outputs, device=device, dtype=compute).normal_(generator=draws)

        def milliseconds() -> float:
            def once() -> None:
                with torch.autocast(device.type, dtype=compute, enabled=compute is not torch.float32):
                    result = layer(x)
                result.backward(gradient.to(result.dtype))
                layer.weight.grad = x.grad = None

            return _milliseconds(once)

        plain = milliseconds()
        layer.forward = MethodType(fp8_forward, layer)
        return Timing(plain, milliseconds())

    return measure


def _milliseconds(once: Callable[[], None], rounds: int = 10) -> float:
    """Mean time of the faster half of the rounds on the device, after compilation and autotuning."""
    for _ in range(3):
        once()
    times: list[float] = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        once()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    best = sorted(times)[: max(1, rounds // 2)]
    return sum(best) / len(best)
