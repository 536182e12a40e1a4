"""Shared arguments that are not supported with Keras, with the reason or an alternative."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..args.groups.distributed import AcceleratorConfig
from ..args.problems import Problems, shown

if TYPE_CHECKING:
    from .arguments import KerasTrainingArguments


@dataclass(frozen=True)
class Refusal:
    """Why a value is refused."""

    why: str
    asked: Callable[[Any], bool] = bool


def _is(*names: str) -> Callable[[Any], bool]:
    return lambda value: str(getattr(value, "value", value)) in names


def _is_set(value: Any) -> bool:
    return value is not None


TORCH_ONLY = "it configures PyTorch; args.strategy distributes the work over devices"

REFUSED: dict[str, Refusal] = {
    "torch_compile": Refusal("every step is a compiled tf.function already; xla=True compiles it with XLA"),
    "torch_compile_scope": Refusal("every step is a compiled tf.function already", lambda value: value != "blocks"),
    "fp8": Refusal("use Keras' own float8 layers: model.quantize('float8')"),
    "auto_find_batch_size": Refusal("a compiled step cannot be split; lower per_device_train_batch_size and "
                                    "raise gradient_accumulation_steps"),
    "neftune_noise_alpha": Refusal("Keras has no forward hooks; add keras.layers.GaussianNoise after the embedding",
                                   _is_set),
    "bf16_full_eval": Refusal("Keras weights keep their dtype; bf16=True computes in bfloat16"),
    "fp16_full_eval": Refusal("Keras weights keep their dtype; fp16=True computes in float16"),
    "half_precision_backend": Refusal("mixed precision is Keras' own", _is("apex", "cuda_amp", "cpu_amp")),
    "fp16_opt_level": Refusal("Apex works with PyTorch only", lambda value: value != "O1"),
    "gradient_checkpointing": Refusal("build the layers under keras.RematScope instead"),
    "gradient_checkpointing_kwargs": Refusal("build the layers under keras.RematScope instead"),
    "torch_empty_cache_steps": Refusal("TensorFlow and JAX do not release cached memory"),
    "dataloader_num_workers": Refusal("there are no worker processes; use map(..., num_parallel_calls=) in a "
                                      "tf.data pipeline"),
    "optim_target_modules": Refusal("Keras has no low-rank optimizers"),
    "lr_scheduler_type": Refusal("greedy works with PyTorch only; use reduce_lr_on_plateau", _is("greedy")),
    "checkpoint_format": Refusal("transformers no longer has TensorFlow checkpoints; use native",
                                 _is("transformers")),
    "average_tokens_across_devices": Refusal("losses are always divided by the items of all replicas",
                                             lambda value: value is False),
    "fsdp": Refusal(TORCH_ONLY),
    "fsdp_config": Refusal(TORCH_ONLY),
    "deepspeed": Refusal(TORCH_ONLY),
    "parallelism_config": Refusal(TORCH_ONLY, _is_set),
    "use_liger_kernel": Refusal("Liger kernels work with PyTorch only"),
    "liger_kernel_config": Refusal("Liger kernels work with PyTorch only"),
    "debug": Refusal("it inspects modules of PyTorch; use tf.debugging.enable_check_numerics() or jax_debug_nans"),
    "param_groups": Refusal("it configures optimizers of PyTorch; set layer.trainable, or pass optimizers=", _is_set),
    "measure_matmul": Refusal("it measures matrix products of PyTorch"),
    "max_recompiles": Refusal("it counts recompilations of torch.compile", _is_set),
    "static_lengths": Refusal("use padded_batch(padded_shapes=...) in the tf.data pipeline", _is_set),
    "batch_packing": Refusal("packing works with PyTorch only; pack in the tf.data pipeline"),
    "per_device_train_batch_tokens": Refusal("use bucket_by_sequence_length in the tf.data pipeline", _is_set),
    "train_dataset_weights": Refusal("PyTorch only; use tf.data.Dataset.sample_from_datasets", _is_set),
    "train_sampling_strategy": Refusal("batch_rebalance works with PyTorch only", _is("batch_rebalance")),
    "eval_use_gather_object": Refusal("outputs of a compiled step are tensors, which are always gathered"),
    "ddp_find_unused_parameters": Refusal(TORCH_ONLY, _is_set),
    "ddp_bucket_cap_mb": Refusal(TORCH_ONLY, _is_set),
    "ddp_broadcast_buffers": Refusal(TORCH_ONLY, _is_set),
    "ddp_static_graph": Refusal(TORCH_ONLY, _is_set),
    "ddp_backend": Refusal(TORCH_ONLY, _is_set),
    "accelerator_config": Refusal("it configures Accelerate; args.strategy distributes batches",
                                  lambda config: config != AcceleratorConfig()),
}  # fmt: skip
"""Fields whose values are refused."""

IDLE = (
    "dataloader_pin_memory",
    "speed",
    "dataloader_multiprocessing_context",
    "dataloader_in_order",
    "logging_source_losses",
)
"""Fields without effect: backends copy batches in their own way; accelerations and mixing work with PyTorch only."""


def refusals_table() -> str:
    """What is refused and why, as Markdown."""
    rows = "".join(f"| `{name}` | {refusal.why} |\n" for name, refusal in REFUSED.items())
    return f"## Refused\n\nValues that enable one of these raise an error.\n\n| argument | why |\n|---|---|\n{rows}"


def apply_refusals(
    args: KerasTrainingArguments, problems: Problems, *, trainer: str, more: Mapping[str, Refusal]
) -> None:
    """Add a problem for every unsupported argument; `more` are the refusals of the backend."""
    for name, refusal in {**REFUSED, **more}.items():
        if name not in problems.broken and refusal.asked(getattr(args, name)):
            problems.add(f"{shown(name, getattr(args, name))}: not with {trainer}: {refusal.why}", name)
    if args.poly_power != 1.0 and str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)) not in (
        "linear", "polynomial",
    ):  # fmt: skip
        problems.add(f"poly_power={args.poly_power} needs lr_scheduler_type='linear' or 'polynomial'")
