"""Model options of the arguments, applied before training: checkpointed activations, compiled blocks, fp8."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.checkpoint import checkpoint

from ...args.field import nearest
from ...core.user_code.overrides import accepts, adapt
from ...errors import ModelError
from ...notices import Notices
from ...speed.compile.blocks import Compiled, compile_blocks, repeated_blocks
from ...speed.compile.cache import cache_key, load_compile_cache
from ...speed.device.fp8 import Fp8Layers, measured_on, use_fp8
from ...speed.memory.recompute import checkpoint_selectively
from ..arguments import TrainingArguments
from ..device_traits import kind_of

TOKENS_PER_SAMPLE = 512
"""Tokens per sample assumed for measuring layers if there is no token budget."""

POLICIES = ("full", "selective")
"""What gradient checkpointing recomputes: everything inside a block, or all but matmuls and attention."""


def checkpoint_activations(model: nn.Module, options: dict[str, Any] | None) -> Callable[[], Any]:
    """Recompute activations in the backward pass instead of keeping them: all of them, or the cheap ones.

    Returns a function that undoes it.
    """
    options = dict(options or {})
    policy = options.pop("policy", "full")
    if policy not in POLICIES:
        raise ModelError(
            f"gradient_checkpointing_kwargs={{'policy': {policy!r}}}: must be one of {', '.join(POLICIES)}"
        )
    if policy == "selective":
        return _checkpoint_selectively(model, options)
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ModelError(
            f"gradient_checkpointing=True, but {type(model).__name__} has no gradient_checkpointing_enable(); wrap "
            "its blocks with torch.utils.checkpoint yourself, or remove the argument"
        )
    extra: dict[str, Any] = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
    _check_layers(enable, extra, type(model).__name__)
    if getattr(enable, "__module__", "").startswith("transformers."):  # a model's own method may have other options
        _check_known(options)
    options.setdefault("use_reentrant", False)
    before = {module: set(module._forward_hooks) for module in model.modules()}
    adapt(enable, "gradient_checkpointing_kwargs", *extra)(gradient_checkpointing_kwargs=options, **extra)
    added = [(module, hook) for module, hooks in before.items() for hook in set(module._forward_hooks) - hooks]

    def undo() -> None:
        getattr(model, "gradient_checkpointing_disable", lambda: None)()
        for module, hook in added:  # with adapters, transformers leaves one on the embeddings
            module._forward_hooks.pop(hook, None)

    return undo


def _check_known(options: dict[str, Any]) -> None:
    """Raise for options that torch does not have: it would pass them to the layers, which ignore them."""
    named = [each.name for each in inspect.signature(checkpoint).parameters.values() if each.kind is each.KEYWORD_ONLY]
    known = [*named, "preserve_rng_state", "policy", "every_n_layers", "offload"]
    for name in options:
        if name not in known:
            raise ModelError(
                f"gradient_checkpointing_kwargs has no option {name!r}{nearest(name, known)}; there are "
                f"{', '.join(known)}"
            )


def _check_layers(enable: Callable[..., Any], given: dict[str, Any], model: str) -> None:
    """Raise for options of recomputation that are wrong, or that the model's own method does not have."""
    for name, value in given.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not (is_whole if name == "every_n_layers" else isinstance(value, bool)):
            wanted = "an integer of at least 1" if name == "every_n_layers" else "True or False"
            raise ModelError(f"gradient_checkpointing_kwargs={{{name!r}: {value!r}}}: must be {wanted}")
        if name == "offload" and value and not torch.accelerator.is_available():
            raise ModelError(
                "gradient_checkpointing_kwargs={'offload': True} needs an accelerator: without one, activations are in "
                "host memory already; remove it"
            )
        if not accepts(enable, name):
            raise ModelError(
                f"gradient_checkpointing_kwargs={{{name!r}: {value!r}}}: gradient_checkpointing_enable() of {model} "
                "has no such option; remove it, or use a newer version of transformers"
            )


def recomputing_policies(model: nn.Module) -> tuple[str, ...]:
    """Policies of recomputation that can be applied to a model automatically, including none."""
    knows_how = all(hasattr(model, f"gradient_checkpointing_{word}") for word in ("enable", "disable"))
    full = ("full",) if knows_how and getattr(model, "supports_gradient_checkpointing", False) else ()
    selective = ("selective",) if repeated_blocks(model) else ()
    return ("none", *selective, *full)


def _checkpoint_selectively(model: nn.Module, others: dict[str, Any]) -> Callable[[], Any]:
    blocks = repeated_blocks(model)
    if others.pop("use_reentrant", False) or others:
        raise ModelError(
            "gradient_checkpointing_kwargs: the policy 'selective' accepts no option besides use_reentrant=False"
        )
    if not blocks:
        raise ModelError(
            f"gradient_checkpointing_kwargs={{'policy': 'selective'}} works per block, but {type(model).__name__} "
            "has no list of blocks of one class; remove the policy"
        )
    return checkpoint_selectively(blocks).remove


def compile_as_asked(
    model: nn.Module,
    args: TrainingArguments,
    notices: Notices,
    *,
    dynamic: bool | None = None,
    short_rows: bool = False,
) -> Compiled:
    """Compile as the arguments specify, with the compile cache of an earlier run."""
    key = compile_key(model, args)
    load_compile_cache(key)
    session = compile_blocks(
        model,
        backend=_compile_backend(args),
        mode=args.torch_compile_mode,
        dynamic=False if kind_of(args.device).static_shapes else dynamic,
        scope=args.torch_compile_scope,
        max_recompiles=args.max_recompiles,
        short_rows=short_rows,
        notices=notices,
    )
    session.cache_key = key
    return session


def compile_key(model: nn.Module, args: TrainingArguments) -> str:
    """The key of a model's compiled code in the cache: with what determines precision and shapes."""
    compiler = (args.torch_compile_backend, args.torch_compile_mode, args.torch_compile_scope)
    return cache_key(model, args.device, args.bf16, args.fp16, args.train_batch_size, compiler)


def _compile_backend(args: TrainingArguments) -> str | None:
    """The requested backend; on a device with its own, that one unless another was requested."""
    own = kind_of(args.device).compile_backend
    return own if own is not None and args.torch_compile_backend in (None, "inductor") else args.torch_compile_backend


def convert_to_fp8(model: nn.Module, args: TrainingArguments, notices: Notices) -> Fp8Layers:
    """Convert the linear layers that are faster in fp8 at about the tokens of a micro-batch."""
    tokens = args.per_device_train_batch_tokens or args.train_batch_size * TOKENS_PER_SAMPLE
    weights = Counter(p.dtype for module in model.modules() if isinstance(module, nn.Linear) for p in [module.weight])
    weight = weights.most_common(1)[0][0] if weights else torch.float32
    found = use_fp8(
        model, measured_on(args.device, tokens, weight=weight, compute=torch.bfloat16 if args.bf16 else weight)
    )
    if not found.layers:
        notices.warn_once(f"fp8=True has no effect here: {found.summary()}, measured with {tokens:,} tokens")
    return found


def set_use_cache(model: nn.Module, wanted: bool) -> None:
    """Set `use_cache` in the model's config; switched off, also in those of its parts, such as a decoder.

    Switched on, each part keeps its own value: an encoder refuses to have a cache.
    """
    for module in [model] if wanted else model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "use_cache"):
            config.use_cache = wanted


def check_has_values(model: Any, *, may_be_empty: bool) -> None:
    """Raise for models whose parameters have no values yet: lazy modules, and the meta device."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ModelError(
                f"the parameter {name} of a lazy module has no shape yet; call the model once on a batch before it is "
                "given to the trainer"
            )
        if parameter.is_meta and not may_be_empty:
            raise ModelError(
                f"the parameter {name} is on the meta device and has no values; create the model on a real device, or "
                "load its weights first"
            )


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move the model; if the device makes torch replace parameters, tied weights stay tied."""
    before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    model.to(device)
    first: dict[int, str] = {}
    for name, key in before.items():
        keeper = model.get_parameter(first.setdefault(key, name))
        if model.get_parameter(name) is not keeper:
            home, _, own = name.rpartition(".")
            setattr(model.get_submodule(home), own, keeper)


def buffers_and_parameters_on(model: nn.Module) -> set[torch.device]:
    """All devices on which the model has tensors."""
    return {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
