"""The step of torch's fused Adam and AdamW with a fraction of its calls: the same kernel on the same tensors.

torch's `step` collects the tensors of each parameter group one by one, and calls the kernel once per group. Groups with
the same settings are one call here, such as those with and without weight decay where it is 0.
"""

from __future__ import annotations

from functools import cache
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer, adam, optimizer as common


def _plain(step: Any) -> Any:
    """A step without the wrapper that torch adds when the first optimizer of a class is made."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


STEP = _plain(Adam.step)
"""torch's own; an optimizer with another one is stepped by that."""
DEVICES = ("cpu", "cuda")
PLACE = attrgetter("device", "dtype", "layout")
SPECIAL = itemgetter("amsgrad", "capturable", "differentiable")
SETTINGS = itemgetter("lr", "betas", "eps", "weight_decay", "maximize", "decoupled_weight_decay")

Tensors = tuple[list[nn.Parameter], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
"""Parameters, gradients, both averages, and counts of steps."""


def step_(optimizer: Optimizer) -> None:
    """Like `optimizer.step()`, with fewer calls where no other code is called in it."""
    hooks = _hooks(optimizer)
    if hooks is None or torch.autograd._profiler_enabled():  # a profile shows the step by its name
        optimizer.step()
        return
    for hook in hooks:
        hook(optimizer, (optimizer,), {})
    calls = _calls(optimizer)
    if calls is None:
        optimizer.step()  # hooks of loopwright may be called twice
        return
    with torch.no_grad():
        for settings, tensors in calls.items():
            _call_kernel(optimizer, settings, *tensors)
    optimizer._opt_called = True  # which torch's schedules check


def _hooks(optimizer: Optimizer) -> list[Any] | None:
    """loopwright's hooks of the step, which read no gradients; None if the step calls other code."""
    step = type(optimizer).step
    if type(optimizer) not in (Adam, AdamW) or _plain(step) is not STEP or STEP.__globals__ is not vars(common):
        return None
    called = (type(optimizer)._init_group, adam.adam, adam._fused_adam)
    if "_init_group" in vars(optimizer) or not all(map(_is_torchs, called)):
        return None
    replaced = vars(optimizer).get("step")  # by a schedule of torch, to see that it is called
    if replaced is not None and not (hasattr(replaced, "_wrapped_by_lr_sched") and replaced.__wrapped__ is step):
        return None
    if (
        optimizer._optimizer_step_post_hooks
        or common._global_optimizer_post_hooks
        or common._global_optimizer_pre_hooks
    ):
        return None
    found = list(optimizer._optimizer_step_pre_hooks.values())
    is_ours = all((getattr(hook, "__module__", None) or "").startswith("loopwright.") for hook in found)
    return found if is_ours else None


@cache
def _is_torchs(function: Any) -> bool:
    """Whether a function, and what it wraps, is of torch, whose compiler wraps some."""
    module = getattr(function, "__globals__", {}).get("__name__", "")
    inside = getattr(function, "__wrapped__", None)
    return module.startswith("torch.") and (inside is None or _is_torchs(inside))


def _calls(optimizer: Optimizer) -> dict[Any, Tensors] | None:
    """The tensors of all groups by their settings; None if torch has to make the step."""
    found: dict[Any, Tensors] = {}
    state = optimizer.state
    for group in optimizer.param_groups:
        settings = SETTINGS(group)
        rate, betas, *_ = settings
        if not group.get("fused") or any(SPECIAL(group)) or type(betas) is not tuple:
            return None
        if Tensor in map(type, (rate, *betas)):
            return None
        if settings not in found:
            found[settings] = ([], [], [], [], [])
        parameters, gradients, averages, squares, steps = found[settings]
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            own = state[parameter]
            if not own or type(gradient) is not Tensor or type(parameter) is not nn.Parameter:
                return None
            parameters.append(parameter)
            gradients.append(gradient)
            averages.append(own["exp_avg"])
            squares.append(own["exp_avg_sq"])
            steps.append(own["step"])
    counts = [id(step) for tensors in found.values() for step in tensors[4]]
    if len(set(counts)) < len(counts):  # a parameter in two groups, which torch updates one after the other
        return None
    places = {place for tensors in found.values() for place in map(PLACE, tensors[1])}
    if len(places) > 1 or not all(map(_is_simple, places)):
        return None
    return {settings: tensors for settings, tensors in found.items() if tensors[0]}


def _is_simple(place: tuple[torch.device, torch.dtype, torch.layout]) -> bool:
    device, _, layout = place
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # torch refuses settings that are constants
        return False
    return device.type in DEVICES and layout is torch.strided


def _call_kernel(
    optimizer: Optimizer,
    settings: Any,
    parameters: list[nn.Parameter],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
) -> None:
    rate, (beta1, beta2), eps, weight_decay, maximize, is_decoupled = settings
    scale, veto = (_moved(getattr(optimizer, name, None), gradients[0]) for name in ("grad_scale", "found_inf"))
    torch._foreach_add_(steps, 1)
    kernel = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
    kernel(
        parameters, gradients, averages, squares, [], steps, amsgrad=False, lr=rate, beta1=beta1, beta2=beta2,
        weight_decay=weight_decay, eps=eps, maximize=maximize, grad_scale=scale, found_inf=veto,
    )  # fmt: skip
    if veto is not None:
        torch._foreach_sub_(steps, [veto] * len(steps))


def _moved(value: Tensor | None, other: Tensor) -> Tensor | None:
    return value if value is None else value.to(other.device, non_blocking=True)
