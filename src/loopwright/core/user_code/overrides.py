"""Calling a user's method with the arguments it accepts, and refusing overrides that are never called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from ...errors import OverrideError

NEVER_CALLED = {
    "_inner_training_loop": "training_step or compute_loss for a step, a callback for what happens between steps",
    "_run_epoch": "training_step, compute_loss or a callback",
    "_maybe_log_save_evaluate": "log, evaluate, or a callback that sets should_log, should_evaluate or should_save",
    "_prepare_for_training": "create_optimizer_and_scheduler or _wrap_model",
    "_init_training_state": "a callback's on_train_begin",
    "_finalize_training": "a callback's on_train_end",
    "prediction_loop": "evaluation_loop",
    "_gather_and_numpify": "prediction_step",
    "_rotate_checkpoints": "save_total_limit, or _save_checkpoint",
    "_sorted_checkpoints": "save_total_limit, or _save_checkpoint",
    "create_accelerator_and_postprocess": "_wrap_model",
    "_save_tpu": "_save",
    "_update_auto_batch_size": "auto_find_batch_size in the arguments",
    "_prepare_context_parallel_inputs": "_prepare_inputs",
    "_save_optimizer_and_scheduler": "_save_checkpoint",
    "_save_rng_state": "_save_checkpoint",
    "_load_rng_state": "_load_from_checkpoint",
    "_save_scaler": "_save_checkpoint",
    "_load_scaler": "_load_from_checkpoint",
    "_clip_grad_norm": "max_grad_norm in the arguments, or a callback's on_pre_optimizer_step",
    "_get_grad_norm": "a callback's on_pre_optimizer_step",
    "_track_num_input_tokens": "include_num_input_tokens_seen in the arguments",
    "_load_callback_state": "state_dict and load_state_dict of the callback",
}
"""Methods of other trainers that this one does not have, and what to override instead."""


def refuse_dead_overrides(cls: type, base: type) -> None:
    """Raise if a subclass defines a method that this trainer would never call."""
    for name, instead in NEVER_CALLED.items():
        defined = getattr(cls, name, None)
        called = any(name in vars(each) for each in cls.__mro__ if each.__module__.startswith("loopwright."))
        if defined is not None and not called and getattr(base, name, None) is not defined:
            raise OverrideError(
                f"{cls.__name__} overrides {name}, which loopwright never calls. Override instead: {instead}."
            )


def is_overridden(instance: Any, name: str) -> bool:
    """Whether a user's subclass, or the instance itself, overrides a method."""
    if name in vars(instance):
        return True
    method = getattr(type(instance), name, None)
    return not (getattr(method, "__module__", None) or "").startswith("loopwright.")


def reaches_ours(instance: Any, name: str) -> bool:
    """Whether all of the user's versions of a method call the one they override, judged by the names in their code."""
    found = [vars(instance)[name]] if name in vars(instance) else []
    for cls in type(instance).__mro__:
        method = vars(cls).get(name)
        if method is None:
            continue
        if (getattr(method, "__module__", None) or "").startswith("loopwright."):
            break
        found.append(method)
    codes = [getattr(inspect.unwrap(method), "__code__", None) for method in found]
    return all(code is not None and name in code.co_names for code in codes)


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a call may pass `name=` to the function."""
    parameters = _parameters(function)
    if parameters is None:
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def names_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether the function has a parameter of this name (`**kwargs` does not count)."""
    parameters = _parameters(function)
    return parameters is not None and name in parameters


def adapt(function: Callable[..., Any], *optional: str) -> Callable[..., Any]:
    """The function, without the optional keyword arguments that it does not accept.

    Keeps old overrides such as `compute_loss(self, model, inputs)` working.
    """
    missing = frozenset(name for name in optional if not accepts(function, name))
    if not missing:
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name not in missing})

    return call


def takes(function: Callable[..., Any], *values: Any) -> bool:
    """Whether a call may pass these values by position."""
    try:
        inspect.signature(function).bind(*values)
    except TypeError:
        return False
    except ValueError:  # a function of C, which has no signature
        return True
    return True


Parameters = dict[str, inspect.Parameter]
_known: WeakKeyDictionary[FunctionType, dict[tuple[bool, CodeType], Parameters]] = WeakKeyDictionary()
"""Parameters already read, by whether the function is bound: every trainer reads those of the same functions."""


def _parameters(function: Callable[..., Any]) -> Parameters | None:
    plain = function.__func__ if isinstance(function, MethodType) else function
    if type(plain) is not FunctionType or vars(plain):  # attributes may hold another signature
        return _read_parameters(function)
    found = _known.setdefault(plain, {})
    key = (plain is not function, plain.__code__)
    if key not in found:
        read = _read_parameters(function)
        if read is None:
            return None
        found[key] = read
    return found[key]


def _read_parameters(function: Callable[..., Any]) -> Parameters | None:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
