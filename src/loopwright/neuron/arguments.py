"""NeuronTrainingArguments: the argument names of optimum-neuron, each supported or refused with a reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..args.field import Group, arg, positive
from ..errors import ArgumentsError
from ..pt.arguments import Seq2SeqTrainingArguments, TrainingArguments

if TYPE_CHECKING:
    import torch


@dataclass
class NeuronArgs(Group):
    """Arguments for Trainium, including the names of other Trainium trainers."""

    title = "Neuron"

    xla_spmd: str | None = arg(
        None, "On lazy XLA, one process drives all devices: data or fsdp.", choices=("data", "fsdp")
    )
    tensor_parallel_size: int = arg(1, "Number of devices each layer is split across.", check=positive)
    tensor_parallel_plan: dict[str, Any] | str | None = arg(
        None, "Which layers are split, by name pattern: colwise or rowwise; defaults to the model's own plan."
    )
    zero_1: bool = arg(True, "Shard the optimizer state across ranks (FSDP2 with unsharded weights).")
    use_autocast: bool = arg(False, "With bf16: keep the weights in fp32 and cast matmuls.")
    stochastic_rounding_enabled: bool = arg(
        True, "Round weights kept in bf16 stochastically, so that small updates are not lost."
    )
    optimizer_use_master_weights: bool = arg(True, "With bf16: keep the weights in fp32.")
    optimizer_use_fp32_grad_acc: bool = arg(True, "Accumulate gradients in fp32.")
    optimizer_save_master_weights_in_ckpt: bool | None = arg(None, "Save the weights in fp32 in checkpoints.")
    compile_cache_dir: str | None = arg(None, "Where compiled graphs are kept between runs.")
    pipeline_parallel_size: int = arg(1, "Number of pipeline stages.", check=positive)
    pipeline_parallel_num_microbatches: int | None = arg(None, "Micro-batches in a pipeline.")
    pipeline_parallel_use_zero1_optimizer: bool | None = arg(None, "ZeRO-1 inside a pipeline.")
    disable_sequence_parallel: bool | None = arg(None, "Disable sequence parallelism.")
    kv_size_multiplier: int | None = arg(None, "How often key and value heads are repeated.")
    fuse_qkv: bool | None = arg(None, "Fuse queries, keys and values into one matrix.")
    recompute_causal_mask: bool = arg(True, "The model builds its causal mask in every step.")
    use_xser: bool | None = arg(None, "Save the tensors of a checkpoint in separate files.")
    num_local_ranks_per_step: int | None = arg(None, "How many ranks of a node save at the same time.")
    skip_cache_push: bool = arg(True, "Do not push compiled graphs to the Hub.")
    hub_neuronx_cache: str | None = arg(None, "The Hub repository of compiled graphs.")
    dataloader_prefetch_size: int | None = arg(None, "Batches prefetched to the device.")


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "pipeline_parallel_size": (
        lambda value: value > 1,
        "pipeline parallelism is not available; use tensor_parallel_size, or shard across several ranks",
    ),
    "pipeline_parallel_num_microbatches": (lambda value: value is not None, "pipeline parallelism is not available"),
    "pipeline_parallel_use_zero1_optimizer": (lambda value: value is not None, "pipeline parallelism is not available"),
    "disable_sequence_parallel": (
        lambda value: value is False,
        "sequence parallelism is not available; remove it, or set it to True",
    ),
    "kv_size_multiplier": (
        lambda value: value not in (None, 1),
        "it applies to models rewritten for neuronx_distributed, but models are used unchanged; remove it",
    ),
    "fuse_qkv": (bool, "it applies to models rewritten for neuronx_distributed, but models are used unchanged"),
    "recompute_causal_mask": (lambda value: not value, "models build their mask in every step; leave it at True"),
    "use_xser": (lambda value: value is not None, "checkpoints are always safetensors files"),
    "num_local_ranks_per_step": (
        lambda value: value is not None,
        "each rank copies its shard to host memory and writes it in the background; remove it",
    ),
    "skip_cache_push": (lambda value: not value, "compiled graphs are not pushed to the Hub; use compile_cache_dir"),
    "hub_neuronx_cache": (
        lambda value: value is not None,
        (
            "compiled graphs are not downloaded from the Hub; compile_cache_dir may be a shared folder or, on Neuron, "
            "an S3 URL"
        ),
    ),
    "dataloader_prefetch_size": (
        lambda value: value is not None,
        (
            "batches are copied while the device runs the previous step; dataloader_prefetch_factor keeps more of them "
            "ready"
        ),
    ),
}
"""Unsupported arguments: which values are refused, and what to use instead."""


if TYPE_CHECKING:

    class _Mixed(NeuronArgs, TrainingArguments):
        """What NeuronRules is mixed into, for type checkers; at run time its fields would come a second time."""

else:
    _Mixed = object


class NeuronRules(_Mixed):
    """Derived values and checks of NeuronArgs."""

    def __post_init__(self) -> None:
        self._spread()
        super().__post_init__()
        problems = [
            f"{name}={getattr(self, name)!r}: {reason}"
            for name, (asks, reason) in REFUSED.items()
            if asks(getattr(self, name))
        ]
        problems += [text for text in (_rounding_problem(self), _master_problem(self)) if text]
        if problems:
            raise ArgumentsError(problems)

    def _spread(self) -> None:
        """Distributed options: ZeRO-1 is FSDP2 with unsharded weights, tensor parallelism is torch's."""
        several = self.world_size > 1
        if several and self.tensor_parallel_size > 1 and self.parallelism_config is None:
            sizes = {"tp_size": self.tensor_parallel_size}
            plan = self.tensor_parallel_plan
            self.parallelism_config = {**sizes, **({"tp_plan": plan} if plan else {})}
        if several and self.zero_1 and self.fsdp is None and not self.is_on_lazy_xla:
            self.fsdp = "shard_grad_op"

    @property
    def bf16_weights(self) -> bool:
        """Whether the weights are stored in bf16."""
        return bool(self.bf16 and not self.use_autocast and not self.optimizer_use_master_weights)

    def own_precision(self, device: torch.device) -> Any:
        """The rounding of bf16 weights on a device."""
        from .rounding import bf16_weights

        return bf16_weights(self, device)

    @property
    def spreads(self) -> bool:
        """Whether one process drives all devices of lazy XLA (SPMD)."""
        lazy = bool(os.environ.get("PJRT_DEVICE")) and self.world_size == 1
        return lazy and (self.xla_spmd is not None or self.tensor_parallel_size > 1)

    @property
    def is_on_lazy_xla(self) -> bool:
        """Whether torch_xla's device will be used; does not initialize it."""
        if self.use_cpu or not os.environ.get("PJRT_DEVICE"):
            return False
        import torch

        return find_spec("torch_xla") is not None and not torch.accelerator.is_available()

    @property
    def device(self) -> torch.device:
        """A native device (`neuron`, `tpu`, CUDA ...) if there is one, else the lazy XLA device, else the CPU."""
        from ..pt.devices import choose_device

        if self.spreads and not self.use_cpu:
            from ..xla.runtime import use_spmd

            use_spmd()  # only possible before the first operation
        return choose_device(self.use_cpu, self.local_process_index, native_first=True)


def _rounding_problem(args: NeuronRules) -> str | None:
    if not (args.bf16 and not args.use_autocast and not args.optimizer_use_master_weights):
        return None
    if args.optimizer_use_fp32_grad_acc and args.gradient_accumulation_steps > 1:
        return (
            "optimizer_use_fp32_grad_acc=True, but gradients of bf16 weights are bf16; keep the weights in fp32 "
            "(optimizer_use_master_weights=True), or set it to False"
        )
    return None


def _master_problem(args: NeuronRules) -> str | None:
    wanted = args.optimizer_save_master_weights_in_ckpt
    if wanted is None or not args.bf16:
        return None
    kept = args.use_autocast or args.optimizer_use_master_weights
    if wanted and not kept:
        return (
            "optimizer_save_master_weights_in_ckpt=True, but the weights are bf16 and there are no fp32 copies to save"
        )
    if not wanted and kept:
        return "optimizer_save_master_weights_in_ckpt=False, but the fp32 weights are the model, so they are saved"
    return None


# As in Seq2SeqTrainingArguments, the last base comes first: output_dir is the first positional argument.
@dataclass
class NeuronTrainingArguments(NeuronRules, NeuronArgs, TrainingArguments):
    """All arguments of a run, and those of Trainium."""


@dataclass
class Seq2SeqNeuronTrainingArguments(NeuronRules, NeuronArgs, Seq2SeqTrainingArguments):
    """All arguments of a run that generates text in evaluation, and those of Trainium."""
