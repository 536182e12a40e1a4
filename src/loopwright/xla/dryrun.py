"""A trainer's training step, compiled for TPUs without a TPU: whether it fits, and what it contains.

torchax converts torch's operations to JAX, and libtpu's compiler compiles the traced step for a given topology.
Nothing is computed, neither here nor on a TPU: only the shapes of weights and batches are needed.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ArgumentsError, LoopwrightError, NotAvailable, first_line
from ..pt.arguments import TrainingArguments
from ..pt.loss.targets import check_loss
from ..pt.optim.optimizers.decay import check_trainable
from .topologies import CHIPS, PACKAGES, Topology
from .tracing import noting

GIB = 2**30
SHORTER = {torch.int64: torch.int32, torch.float64: torch.float32, torch.complex128: torch.complex64}
"""TPUs have no 64-bit dtypes; JAX uses the 32-bit ones."""
UNSPLIT: dict[str, tuple[Any, ...]] = {
    "fsdp": (None, "", False, []),
    "deepspeed": (None,),
    "parallelism_config": (None,),
    "xla_spmd": (None, "data"),
    "tensor_parallel_size": (1,),
}
"""Arguments with the values that do not shard weights."""
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
}
"""Environment: libtpu does not search for a TPU, several processes may compile, and JAX runs on the CPU."""


class Step(NamedTuple):
    """A training step as a JAX function, and the shapes of its arguments."""

    function: Callable[..., Any]
    weights: dict[str, Any]
    frozen: dict[str, Any]
    moments: dict[str, dict[str, Any]]
    batch: dict[str, Any]
    """Inputs with one row per sample, sharded across chips."""
    shared: dict[str, Any]


# ---- torchax --------------------------------------------------------------------------------------------------------


def import_torchax() -> Any:
    """Import torchax once. Call it after the trainer was created, since it registers a device in torch."""
    os.environ.update(QUIET)
    with _removed_overloads():
        import torchax

        torchax.default_env()  # loads its tables of operations
    _mend_autocast(torchax.amp)
    return torchax


def _mend_autocast(amp: Any) -> None:
    """Make autocast apply to functions that torchax 0.0.13 converts as a whole, such as linear layers.

    Its rule for operations on lists (torch.cat) fails; JAX uses the wider of two dtypes there.
    """
    policy, rules = amp.autocast_policy, amp.CastPolicy
    for operation in [each for each, rule in policy.items() if rule is rules.PROMOTE]:
        del policy[operation]
    for function in (functional.linear, functional.scaled_dot_product_attention, torch.einsum):
        policy[function] = rules.LOWER_PRECISION_FP


@contextmanager
def _removed_overloads() -> Iterator[None]:
    """Context manager: access to overloads that torch no longer has does not fail.

    The tables of torchax 0.0.13 contain operations of named tensors, which torch 2.13 has removed; they are never
    called.
    """
    packet = torch._ops.OpOverloadPacket
    original = packet.__getattr__

    def found_or_named(self: Any, key: str) -> Any:
        try:
            return original(self, key)
        except AttributeError:
            if "dimname" in key.lower() or "names" in key:
                return f"{self}.{key}"
            raise

    packet.__getattr__ = found_or_named  # type: ignore[method-assign]
    try:
        yield
    finally:
        packet.__getattr__ = original  # type: ignore[method-assign]


# ---- the step -------------------------------------------------------------------------------------------------------


class _Loss(nn.Module):
    """The trainer's loss as a module, so that all tensors of the model can be replaced while it is computed."""

    def __init__(self, model: nn.Module, compute: Callable[..., Any], items: int | None) -> None:
        super().__init__()
        self.model, self._compute, self._items = model, compute, items

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        loss = self._compute(self.model, inputs, num_items_in_batch=self._items)
        return check_loss(loss[0] / loss[1] if type(loss) in (tuple, list) else loss)


def first_batch(trainer: Any) -> dict[str, Any]:
    """The first training batch, from the trainer's data loader."""
    batch = next(iter(trainer.get_train_dataloader()), None)
    if not isinstance(batch, Mapping):
        raise ArgumentsError(
            f"the dry run needs batches that are dicts, but the loader returned {type(batch).__name__}"
        )
    return dict(batch)


def left_out(args: TrainingArguments) -> list[str]:
    """Notes on arguments that the dry run ignores; raises if the step cannot be compiled."""
    if args.fp16:
        raise ArgumentsError("fp16=True: loss scaling is not compiled for TPUs; use bf16=True")
    notes = []
    if args.gradient_checkpointing:
        notes.append("gradient_checkpointing is ignored: training would need fewer temporaries than shown")
    if args.gradient_accumulation_steps > 1:
        notes.append(
            f"one of {args.gradient_accumulation_steps} micro-batches is compiled, with the optimizer step; "
            "accumulating gradients needs one more copy of the trained weights than shown"
        )
    if args.fp8:
        notes.append("fp8 is ignored: layers are compiled in the dtype of the rest")
    split = [name for name, plain in UNSPLIT.items() if getattr(args, name, plain[0]) not in plain]
    if split:
        notes.append(f"weights are replicated on every chip here; splitting them ({', '.join(split)}) is ignored")
    return notes


def adamw_options(trainer: Any) -> dict[str, dict[str, Any]]:
    """The options of each trained parameter, from the trainer's optimizer; only AdamW is supported."""
    check_trainable(trainer.model)
    optimizer = trainer.create_optimizer()
    optimizer = trainer.optimizer if optimizer is None else optimizer
    if not isinstance(optimizer, torch.optim.AdamW) or any(group["amsgrad"] for group in optimizer.param_groups):
        raise ArgumentsError(
            "the dry run compiles AdamW only, without amsgrad, but the trainer's optimizer is "
            f'{type(optimizer).__name__}. Use optim="adamw_torch" for the dry run; few optimizers need more than its '
            "two values per weight"
        )
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    return {
        names[id(parameter)]: group
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in names
    }


def build_step(trainer: Any, batch: dict[str, Any], chips: int) -> Step:
    """Forward, loss, backward, clipping and AdamW for a batch of this size on each chip."""
    import jax
    from torchax.ops.mappings import t2j_dtype

    args, model = trainer.args, trainer.model.train()
    options, narrow = adamw_options(trainer), _bf16_weights(args)

    def shape(tensor: Tensor, times: int = 1) -> Any:
        sizes = tuple(tensor.shape)
        kind = t2j_dtype(SHORTER.get(tensor.dtype, tensor.dtype))
        return jax.ShapeDtypeStruct((sizes[0] * times, *sizes[1:]) if times > 1 else sizes, kind)

    def held(tensor: Tensor) -> Any:
        """A tensor of the model, in its training dtype."""
        return shape(tensor.to("meta", torch.bfloat16) if narrow and tensor.is_floating_point() else tensor)

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    weights = {name: held(tensor) for name, tensor in tensors.items() if name in options}
    rows = rows_of(batch)
    arrays = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in batch.items() if name not in arrays}
    accounting = trainer._loopwright.run.accounting
    items = accounting.items_in(batch) if accounting.wants_items else None
    loss = _Loss(model, trainer._loopwright.loss.called_compute_loss, None if items is None else int(items) * chips)
    return Step(
        _training_step(_loss_function(loss, others, args), options, float(args.max_grad_norm or 0)),
        weights,
        {name: held(tensor) for name, tensor in tensors.items() if name not in options},
        {name: {"first": array, "second": array} for name, array in weights.items()},
        {name: shape(value, chips) for name, value in arrays.items() if _is_per_row(value, rows)},
        {name: shape(value) for name, value in arrays.items() if not _is_per_row(value, rows)},
    )


def rows_of(batch: Mapping[str, Any]) -> int:
    """The number of rows of a batch: the first dimension of its first tensor."""
    return next((value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.dim()), 0)


def _is_per_row(value: Tensor, rows: int) -> bool:
    return value.dim() > 0 and value.shape[0] == rows


def _loss_function(loss: _Loss, others: dict[str, Any], args: TrainingArguments) -> Callable[..., Any]:
    """The loss as a JAX function of weights, frozen tensors, inputs and a random key; returns loss and buffers."""
    import torchax
    from torchax.interop import torch_view

    env = torchax.default_env()
    half = torch.bfloat16 if args.bf16 and not _bf16_weights(args) else None

    def compute(weights: Any, frozen: Any, inputs: Any, key: Any) -> tuple[Any, Any]:
        tensors = torch_view({f"model.{name}": array for name, array in {**weights, **frozen}.items()})
        # The default device makes JAX trace tensors that the loss creates (class weights, positions).
        with env, env.override_property(prng=key, autocast_dtype=half), torch.device("jax"), noting(nullcontext()):
            found = torch.func.functional_call(loss, tensors, ({**others, **torch_view(inputs)},))
            number = found.float().jax()
        return number, {name: tensors[f"model.{name}"].jax() for name in frozen}

    return compute


def _training_step(loss_of: Callable[..., Any], options: dict[str, dict[str, Any]], max_norm: float) -> Callable:
    """The whole update; the learning rate is an argument, because schedules change it."""
    import jax
    import jax.numpy as jnp

    def step(weights: Any, frozen: Any, moments: Any, inputs: Any, count: Any, rate: Any, key: Any) -> Any:
        (loss, frozen), grads = jax.value_and_grad(loss_of, has_aux=True)(weights, frozen, inputs, key)
        if max_norm:
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in grads.values()))
            scale = jnp.minimum(1.0, max_norm / (norm + 1e-6))
            grads = {name: (g * scale).astype(g.dtype) for name, g in grads.items()}
        count = count + 1
        new = {n: _adamw(w, grads[n], moments[n], count, rate, options[n]) for n, w in weights.items()}
        return {n: each[0] for n, each in new.items()}, frozen, {n: each[1] for n, each in new.items()}, count, loss

    return step


def _adamw(weight: Any, grad: Any, moments: Any, count: Any, rate: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """The AdamW update of one weight, as in torch."""
    import jax.numpy as jnp

    one, two = options["betas"]
    first = one * moments["first"] + (1 - one) * grad
    second = two * moments["second"] + (1 - two) * jnp.square(grad)
    size = jnp.sqrt(second / (1 - two**count)) + options["eps"]
    new = weight * (1 - rate * options["weight_decay"]) - rate * (first / (1 - one**count)) / size
    kind = weight.dtype
    return new.astype(kind), {"first": first.astype(kind), "second": second.astype(kind)}


# ---- the report -----------------------------------------------------------------------------------------------------


def dry_run(trainer: Any, topologies: Sequence[Topology]) -> dict[str, Any]:
    """The report: what was compiled, and the result for each topology."""
    args, model = trainer.args, trainer.model
    notes = left_out(args)
    batch = first_batch(trainer)
    import_torchax()
    formats = sorted({str(each.dtype).removeprefix("torch.") for each in model.parameters()})
    return {
        "model": type(model).__name__,
        "parameters": sum(each.numel() for each in model.parameters()),
        "trained": sum(each.numel() for each in model.parameters() if each.requires_grad),
        "precision": "bf16 weights" if _bf16_weights(args) else "/".join(formats) + " and bf16" * bool(args.bf16),
        "batch": {name: list(value.shape) for name, value in batch.items() if isinstance(value, Tensor)},
        "versions": {name: version(name) for name in ("torch", *PACKAGES)},
        "notes": notes,
        "topologies": [compile_for(trainer, batch, topology) for topology in topologies],
    }


def _bf16_weights(args: TrainingArguments) -> bool:
    return bool(getattr(args, "bf16_weights", False))


# ---- compiling ------------------------------------------------------------------------------------------------------


def compile_for(trainer: Any, batch: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Compile the step for a topology; returns memory and operations, or the error."""
    started = time.perf_counter()
    lowered = _lower(trainer, batch, topology)
    report: dict[str, Any] = {
        "topology": topology.name, "chips": topology.chips, "hbm_bytes": CHIPS[topology.kind].gib * GIB
    }  # fmt: skip
    try:
        compiled = lowered.compile()
    except Exception as error:  # out of memory or any other compiler error is part of the report
        return {**report, **_failure(error), "seconds": time.perf_counter() - started}
    return {**report, **_contents(compiled, report["hbm_bytes"]), "seconds": time.perf_counter() - started}


def _lower(trainer: Any, batch: dict[str, Any], topology: Topology) -> Any:
    """The lowered step: weights are replicated on every chip, rows are sharded."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    try:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=topology.name, chips_per_host_bounds=topology.host_bounds
        )
    except Exception as error:  # JAX has no public exception class for this in every version
        kind = ArgumentsError if "INVALID_ARGUMENT" in str(error) else NotAvailable
        raise kind(f"--topology {topology.name}: libtpu cannot describe it: {first_line(error).rstrip('.')}") from error
    step = build_step(trainer, batch, len(found.devices))
    mesh = Mesh(np.array(found.devices), ("data",))
    whole, spread = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    def placed(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding), tree)

    numbers = [jax.ShapeDtypeStruct(*each) for each in (((), "int32"), ((), "float32"), ((2,), "uint32"))]
    inputs = {**placed(step.batch, spread), **placed(step.shared, whole)}
    jitted = jax.jit(step.function, donate_argnums=(0, 1, 2), out_shardings=whole)
    try:
        return jitted.lower(
            placed(step.weights, whole), placed(step.frozen, whole), placed(step.moments, whole), inputs,
            *placed(numbers, whole),
        )  # fmt: skip
    except LoopwrightError:
        raise
    except Exception as error:  # tracing runs the user's model in two other libraries
        raise NotAvailable(
            f"the dry run cannot trace {type(trainer.model).__name__}{_place_of(error)}: {type(error).__name__}: "
            f"{first_line(error).rstrip('.')}. It traces the model through torchax and JAX, as shapes without values; "
            "this does not affect training"
        ) from error


def _contents(compiled: Any, hbm: int) -> dict[str, Any]:
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis() or {}
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    # Weights and moments are updated in place: the only new results are a loss and a counter.
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    program = memory.generated_code_size_in_bytes
    total = arguments + temporaries + results + program
    text = compiled.as_text()
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return {
        "argument_bytes": arguments, "temporary_bytes": temporaries, "result_bytes": results, "program_bytes": program,
        "total_bytes": total, "fits": total <= hbm, "operations": costs.get("flops"),
        "collectives": {name: count for name, count in counts.items() if count},
    }  # fmt: skip


def _failure(error: Exception) -> dict[str, Any]:
    """The result of a failed compilation: out of memory, or an unsupported operation."""
    text = str(error)
    return {"fits": False, "too_large": "RESOURCE_EXHAUSTED" in text or "Ran out of memory" in text, "error": text}


def _place_of(error: Exception) -> str:
    """The place of the error in code outside the compilers."""
    packages = tuple(os.path.dirname(sys.modules[name].__file__ or "") for name in ("jax", "torch", "torchax"))
    own = os.path.dirname(os.path.dirname(__file__))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*packages, own)) and "contextlib" not in frame.filename
    ]
    return f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
