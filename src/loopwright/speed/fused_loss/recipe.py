"""How logits are computed, and which operations on them can be recorded instead of run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cross_entropy import StandIn, linear_cross_entropy, without_autocast
from .loss_kernel import IDENTITY, LogitMap


@dataclass(frozen=True)
class Recipe:
    """The definition of logits: a linear map of hidden states, an elementwise map, and a dtype."""

    hidden: Tensor  # [..., width], already in the dtype of the head's product
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    logit_map: LogitMap = IDENTITY
    count: int | None = None  # number of counted targets, from the host

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.hidden.shape[:-1], self.weight.shape[0])

    def compute(self) -> Tensor:
        """Compute the logits."""
        kind = self.hidden.dtype
        bias = None if self.bias is None else self.bias.to(kind)
        with without_autocast(self.hidden.device.type):  # the dtype was determined when the head was called
            logits = F.linear(self.hidden, self.weight.to(kind), bias)
        return self.logit_map.apply(logits)[0].to(self.dtype)


# A recorder returns the recipe after an operation; None if the operation cannot be recorded and has to run.
Recorder = Callable[[Recipe, Any, tuple[Any, ...], dict[str, Any]], Recipe | None]


def _same(recipe: Recipe, func: Any, args: tuple[Any, ...], kwargs: Any) -> Recipe | None:
    return recipe


def _cast(recipe: Recipe, func: Any, args: tuple[Any, ...], kwargs: Any) -> Recipe | None:
    """`.float()`, `.to(...)`, `.type_as(...)`: to another dtype on the same device."""
    empty = torch.empty(0, dtype=recipe.dtype, device=recipe.hidden.device)
    found = func(empty, *args, **kwargs)
    if not isinstance(found, Tensor) or found.device != empty.device or not found.is_floating_point():
        return None
    return replace(recipe, dtype=found.dtype)


def _reshape(recipe: Recipe, func: Any, args: tuple[Any, ...], kwargs: Any) -> Recipe | None:
    """`.view(-1, classes)` and similar: shapes that keep the rows of logits."""
    if any(isinstance(each, torch.dtype) for each in (*args, *kwargs.values())):
        return None
    shape = func(torch.empty(recipe.shape, device="meta"), *args, **kwargs).shape
    if not shape or shape[-1] != recipe.weight.shape[0]:
        return None
    return replace(recipe, hidden=recipe.hidden.reshape(*shape[:-1], recipe.hidden.shape[-1]))


def _cut(recipe: Recipe, func: Any, args: tuple[Any, ...], kwargs: Any) -> Recipe | None:
    """`logits[:, :-1]`, `logits[..., -n:, :]`, `logits[mask]`: the hidden states are indexed the same way."""
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if not spares_last(index, recipe.hidden.dim()):
        return None
    return replace(recipe, hidden=recipe.hidden[args[0]])


def spares_last(index: tuple[Any, ...], dimensions: int) -> bool:
    """Whether an index keeps the last dimension unchanged and last."""
    known = (int, slice, Tensor, type(None), type(Ellipsis))
    if any(isinstance(each, bool) or not isinstance(each, known) for each in index):
        return False
    used = sum(_dimensions_used(each) for each in index)
    if used < dimensions and (not index or index[-1] is Ellipsis or not any(each is Ellipsis for each in index)):
        return True
    return isinstance(index[-1], slice) and index[-1] == slice(None)


def _dimensions_used(index: Any) -> int:
    if index is None or index is Ellipsis:
        return 0
    return index.dim() if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) else 1


def _multiply(recipe: Recipe, func: Any, args: tuple[Any, ...], kwargs: Any) -> Recipe | None:
    return None if kwargs or len(args) != 1 else _scale(recipe, args[0], lambda number: number)


def _divide(recipe: Recipe, func: Any, args: tuple[Any, ...], kwargs: Any) -> Recipe | None:
    return None if kwargs or len(args) != 1 else _scale(recipe, args[0], lambda number: 1 / number)


def _scale(recipe: Recipe, by: Any, factor: Callable[[Any], Any]) -> Recipe | None:
    """Times a number; one on the device, or with a gradient, multiplies the hidden states: no synchronization."""
    if type(by) in (Tensor, nn.Parameter) and by.dim() == 0 and by.is_floating_point():
        if by.device.type == "cpu" and not by.requires_grad:
            by = by.item()
        elif not recipe.logit_map.tanh and by.device == recipe.hidden.device:
            number = factor(by)
            bias = None if recipe.bias is None else recipe.bias * number
            return replace(recipe, hidden=recipe.hidden * number, bias=bias)
    if isinstance(by, bool) or not isinstance(by, (int, float)) or by == 0:
        return None
    return replace(recipe, logit_map=recipe.logit_map.times(factor(by)))


def _tanh(recipe: Recipe, func: Any, args: tuple[Any, ...], kwargs: Any) -> Recipe | None:
    capped = recipe.logit_map.capped()
    return None if capped is None or kwargs else replace(recipe, logit_map=capped)


def _add(recipe: Recipe, func: Any, args: tuple[Any, ...], kwargs: Any) -> Recipe | None:
    """Plus one number per class, as BART adds `final_logits_bias`: a bias of the head."""
    if kwargs or len(args) != 1 or type(args[0]) not in (Tensor, nn.Parameter) or recipe.logit_map != IDENTITY:
        return None
    shift, classes = args[0], recipe.weight.shape[0]
    is_row = shift.shape[-1:] == (classes,) and shift.numel() == classes and shift.dim() <= recipe.hidden.dim()
    if not is_row or shift.dtype != recipe.weight.dtype or shift.device != recipe.hidden.device:
        return None
    flat = shift.reshape(classes)
    dtype = torch.promote_types(recipe.dtype, shift.dtype)
    return replace(recipe, bias=flat if recipe.bias is None else recipe.bias + flat, dtype=dtype)


def _table() -> dict[Any, Recorder]:
    groups: dict[Recorder, tuple[Any, ...]] = {
        _same: (Tensor.contiguous,),
        _cast: (Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type, Tensor.type_as),
        _reshape: (
            *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten),
            *(Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze),
        ),
        _cut: (Tensor.__getitem__,),
        _multiply: (Tensor.mul, torch.mul, Tensor.multiply, torch.multiply, Tensor.__mul__, Tensor.__rmul__),
        _divide: (Tensor.div, torch.div, Tensor.true_divide, torch.true_divide, Tensor.__truediv__),
        _tanh: (Tensor.tanh, torch.tanh),
        _add: (Tensor.add, torch.add, Tensor.__add__, Tensor.__radd__),
    }
    return {func: record for record, functions in groups.items() for func in functions}


RECORDERS = _table()
_LOSS_ARGUMENTS = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def loss_of(recipe: Recipe, logits: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """`F.cross_entropy(logits, *args, **kwargs)` without the logits; None if the options require real logits."""
    options = {**dict(zip(_LOSS_ARGUMENTS, args, strict=False)), **kwargs}
    target = options.pop("target", None)
    plain = all(options.pop(name, None) is None for name in ("weight", "size_average", "reduce"))
    if not plain or options.get("reduction", "mean") not in ("mean", "sum") or not _are_classes(target, recipe):
        return None
    hidden = recipe.hidden
    loss = linear_cross_entropy(
        hidden,
        recipe.weight,
        recipe.bias,
        target,
        logit_map=recipe.logit_map,
        count=None if counts_by_itself(hidden.device) else recipe.count,
        dtype=hidden.dtype,
        logits=logits,
        **options,
    )
    return loss if torch.is_autocast_enabled(hidden.device.type) else loss.to(recipe.dtype)


def counts_by_itself(device: torch.device) -> bool:
    """Whether targets are counted where the loss is computed, without a synchronization."""
    on_host: bool = device.type == "cpu"
    return on_host


def _are_classes(target: Any, recipe: Recipe) -> bool:
    if not isinstance(target, Tensor) or target.dtype != torch.int64 or target.device != recipe.hidden.device:
        return False
    one_each: bool = recipe.hidden.dim() == 2 and target.shape == recipe.hidden.shape[:1]
    return one_each
