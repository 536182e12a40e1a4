"""Distances between losses and between gradients, and the tolerances for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """Largest relative error of the loss, the gradient, one parameter's gradient, and values that must not change."""

    loss: float
    gradient: float
    parameter: float
    still: float
    floor: float
    """Fraction of the whole gradient's norm below which a parameter's gradient counts as rounding error."""


DOUBLE = Tolerance(1e-10, 1e-9, 1e-8, 1e-12, 1e-12)
SINGLE = Tolerance(1e-5, 1e-4, 1e-3, 2.5e-7, 1e-6)
HALF = Tolerance(5e-3, 5e-2, 2.5e-1, 5e-3, 2e-2)
"""For comparisons in the precision of training on GPUs; a few samples are also compared in single precision."""
NOISE_APART = 1.5
"""How far two half-precision gradients may be apart, in units of the rounding error of the normal path."""
MOST_NOISE = 0.2
"""Largest rounding error, relative to the gradient's norm, that raises the tolerance: more would prove nothing."""
COLUMN_FLOOR = 1e-2
"""`Tolerance.floor` for a column of an output, as a fraction of that for a parameter: columns differ more in size."""

PIECE = 1 << 20
"""Numbers of a gradient that are compared at a time."""
DEVICE_PIECE = 1 << 23
"""Numbers compared at a time on devices, where kernels of many small pieces would take longer to launch than to run."""


def half_tolerance(noise: float) -> Tolerance:
    """HALF, or more for a model whose half-precision gradients have a rounding error `noise` that is larger than that.

    Deep models with few trained weights (adapters) have gradients of which bf16 rounds away a tenth.
    """
    apart = NOISE_APART * min(noise, MOST_NOISE)
    more = max(apart / HALF.gradient, 1.0)
    return HALF._replace(gradient=HALF.gradient * more, parameter=min(HALF.parameter * more, 0.5))


SquaredNorms = list[tuple[float, float]]
"""For every parameter, the squared norms of the difference of two gradients and of the expected one."""


def gradient_distance(expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> float:
    """Relative L2 distance of two gradients, over all parameters together."""
    return distance_of(squared_norms(expected, found))


def distance_of(norms: SquaredNorms) -> float:
    """Relative L2 distance over all parameters together, from the norms of each."""
    apart, size = (sum(values) for values in zip(*norms, strict=True)) if norms else (0.0, 0.0)
    return float((apart / size) ** 0.5) if size else (0.0 if apart == 0 else float("inf"))


def worst_parameter(norms: SquaredNorms, tolerance: Tolerance) -> tuple[int, float] | None:
    """Index and relative error of the parameter whose gradient is furthest off; None if all are within tolerance."""
    floor = tolerance.floor * sum(size for _, size in norms) ** 0.5
    worst: tuple[int, float] | None = None
    for index, (apart, size) in enumerate(norms):
        distance = apart**0.5
        if distance > tolerance.parameter * size**0.5 + floor:
            relative = distance / size**0.5 if size else float("inf")
            worst = (index, relative) if worst is None or relative > worst[1] else worst
    return worst


def unequal_columns(
    expected: Sequence[Tensor | None], found: Sequence[Tensor | None], tolerance: Tolerance
) -> str | None:
    """The first column that differs between two lists of outputs of samples; None if all agree.

    Integers must be equal. Other columns are compared by their norm over all samples, as single parameters are.
    """
    a, b = (torch.cat([_in_columns(each) for each in outputs if each is not None]) for outputs in (expected, found))
    if not a.is_floating_point() and not a.is_complex():
        unequal = (a != b).any(0)
    else:
        apart, sizes = (_wide(a) - _wide(b)).norm(dim=0), _wide(a).norm(dim=0)
        unequal = ~(apart <= tolerance.parameter * sizes + tolerance.floor * COLUMN_FLOOR * sizes.norm())
    return f"column {int(unequal.int().argmax())}" if bool(unequal.any()) else None


def _in_columns(output: Tensor) -> Tensor:
    return output.reshape(-1, output.shape[-1] if output.dim() else 1)


def squared_norms(expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> SquaredNorms:
    """Squared distance and squared expected norm for every parameter, read with one synchronization."""
    places: list[int] = []
    norms: list[Tensor] = []
    for place, (a, b) in enumerate(zip(expected, found, strict=True)):
        for pair in _norms(a, b):
            places.append(place)
            norms.extend(pair)
    numbers = _numbers(norms)
    sums = [(0.0, 0.0)] * len(expected)
    for place, apart, size in zip(places, numbers[::2], numbers[1::2], strict=True):
        sums[place] = (sums[place][0] + apart * apart, sums[place][1] + size * size)
    return sums


def _norms(expected: Tensor | None, found: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The norms of the difference and of the expected gradient, for each piece; a few kernels per piece."""
    given = expected if expected is not None else found
    if given is None:
        return
    for a, b in zip(_or_zeros(expected, given), _or_zeros(found, given), strict=True):
        wide = _wide(a)
        yield _norm(wide - _wide(b)), _norm(wide)


def _norm(values: Tensor) -> Tensor:
    is_dense = values.layout is torch.strided
    return torch.linalg.vector_norm(values) if is_dense else values.abs().square().sum().sqrt()


def _numbers(scalars: list[Tensor]) -> list[float]:
    """The values of tensors, read together."""
    if not scalars:
        return []
    device = next((each.device for each in scalars if each.device.type != "cpu"), scalars[0].device)
    numbers: list[float] = torch.stack([each.to(device) for each in scalars]).tolist()
    return numbers


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.complex128) if values.is_complex() else values.double()


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Iterable[Tensor]:
    return in_pieces(gradient) if gradient is not None else (torch.zeros_like(each) for each in in_pieces(like))


def in_pieces(tensor: Tensor) -> Sequence[Tensor]:
    """A large tensor as several along its first dimension, so that what is computed from it takes little memory."""
    most = PIECE if tensor.device.type == "cpu" else DEVICE_PIECE
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.numel() <= most:
        return [tensor]
    rows = max(1, most * len(tensor) // tensor.numel())
    return [tensor[start : start + rows] for start in range(0, len(tensor), rows)]


def relative(expected: float, found: float) -> float:
    return abs(expected - found) / max(abs(expected), 1e-12)


def is_close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b))
