"""`trainer.accelerator`: the members of accelerate's Accelerator that third-party code uses, over the strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ...args.groups.distributed import read_accelerator_config
from ...core.update import MicroBatch
from ...errors import NotAvailable
from ..arguments import TrainingArguments
from ..checkpoint.tensors import plain_module
from ..data.loaders import data_seed
from ..data.prepared import PreparedLoader, order_by_epoch, share_evenly
from ..data.shard import is_shared
from ..hooks import TorchHooks
from ..strategies.base import ManyProcesses
from ..strategies.single import SingleDevice
from .accelerator_saving import AcceleratorSaving
from .accelerator_values import combined, first_samples, has_tensors, part_of, scaled

INSTEAD = {
    "register_save_state_pre_hook": "a callback's on_save",
    "register_load_state_pre_hook": "an override of trainer._load_from_checkpoint",
    "init_trackers": "report_to in the arguments",
    "get_tracker": "a callback's on_log",
    "trackers": "report_to in the arguments",
    "skip_first_batches": "trainer.train(resume_from_checkpoint=...), which continues in the middle of an epoch",
    "save_model": "trainer.save_model()",
    "profile": "torch.profiler in a callback",
    "scaler": "the arguments fp16 and on_nonfinite",
    "deepspeed_engine_wrapped": "trainer.model_wrapped",
    "optimizer_step_was_skipped": "nonfinite_steps in the logs",
    "lomo_backward": "trainer.accelerator.backward",
    "join_uneven_inputs": "nothing: a rank without data still joins every step",
    "set_trigger": "trainer.control.should_training_stop = True",
    "check_trigger": "trainer.control.should_training_stop",
}
"""Members of accelerate's Accelerator that have no counterpart, and what to use."""


class Accelerator(AcceleratorSaving):
    """`trainer.accelerator` for code written against accelerate: what it offers is done by the strategy."""

    def __init__(self, strategy: SingleDevice, args: TrainingArguments, trainer: TorchHooks) -> None:
        self._strategy, self._args, self._trainer = strategy, args, trainer
        self.step_scheduler_with_optimizer = False
        self.project_dir = self.logging_dir = None
        self.log_with: list[Any] = []
        self.parallelism_config = None
        config = read_accelerator_config(args.accelerator_config)
        self.split_batches, self.dispatch_batches = config.split_batches, config.dispatch_batches
        self.even_batches, self.use_seedable_sampler = config.even_batches, config.use_seedable_sampler
        self.dataloader_config = SimpleNamespace(
            split_batches=self.split_batches,
            dispatch_batches=self.dispatch_batches,
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            non_blocking=config.non_blocking,
        )
        self._accumulation_options = dict(config.gradient_accumulation_kwargs or {})
        self._active_loaders: list[PreparedLoader] = []
        """The prepared loaders that are being iterated, the innermost last."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        instead = f"; use {INSTEAD[name]}" if name in INSTEAD else ""
        raise NotAvailable(f"trainer.accelerator.{name} is not available{instead}")

    # ---- processes and device ----------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._strategy.device

    @property
    def num_processes(self) -> int:
        return self._strategy.world_size

    @property
    def process_index(self) -> int:
        return self._strategy.rank

    @property
    def local_process_index(self) -> int:
        return self._args.local_process_index

    @property
    def is_main_process(self) -> bool:
        return self._strategy.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        return self._strategy.rank == self._strategy.world_size - 1

    @property
    def use_distributed(self) -> bool:
        return self._strategy.world_size > 1

    @property
    def multi_device(self) -> bool:
        return self.use_distributed

    @property
    def distributed_type(self) -> Any:
        """accelerate's DistributedType if it is installed, else its value as a string."""
        return self._distributed_type()

    def _distributed_type(self) -> Any:
        word = "NO"
        if self._strategy.is_sharded:
            word = "FSDP"
        if self._strategy.saves_itself:
            word = "DEEPSPEED"
        elif self.use_distributed and word == "NO":
            word = "MULTI_CPU" if self.device.type == "cpu" else f"MULTI_{_type_in_accelerate(self.device.type)}"
        try:
            from accelerate.utils import DistributedType
        except ModuleNotFoundError:
            return word
        return DistributedType(word)

    @property
    def state(self) -> Any:
        """What code reads of accelerate's AcceleratorState."""
        return SimpleNamespace(
            device=self.device,
            num_processes=self.num_processes,
            process_index=self.process_index,
            local_process_index=self.local_process_index,
            is_main_process=self.is_main_process,
            is_local_main_process=self.is_local_main_process,
            distributed_type=self.distributed_type,
            mixed_precision=self.mixed_precision,
            deepspeed_plugin=None,
            fsdp_plugin=None,
            parallelism_config=None,
        )

    @property
    def is_fsdp2(self) -> bool:
        return bool(self._strategy.is_sharded)

    @property
    def mixed_precision(self) -> str:
        return self._args.mixed_precision

    @property
    def native_amp(self) -> bool:
        return self.mixed_precision != "no"

    def wait_for_everyone(self) -> None:
        self._strategy.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        with self._args.main_process_first(local=False):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        with self._args.main_process_first(local=True):
            yield

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function that only rank 0 runs."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.is_main_process and function is not None else None

        return call

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 of each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's part of a list, tuple, dict of them, or tensor; padding repeats the last element."""
        yield part_of(inputs, self.process_index, self.num_processes, apply_padding)

    # ---- collectives -------------------------------------------------------------------------------------------------

    def gather(self, values: Any) -> Any:
        return self._strategy.gather(values)

    def gather_for_metrics(self, values: Any, use_gather_object: bool = False) -> Any:
        """All-gather; of the last batch of a prepared loader, without the samples that fill it."""
        if not self.use_distributed:
            return values
        if use_gather_object or not has_tensors(values):
            found: Any = [each for part in self._of_ranks(values, objects=True) for each in part]
            return found if self._surplus is None else found[: self._surplus]
        found = self._strategy.gather(values)
        return found if self._surplus is None else first_samples(found, self._surplus)

    @property
    def _surplus(self) -> int | None:
        """How many samples to keep of the batch in use; None for all."""
        loader = self._active_loaders[-1] if self._active_loaders else None
        return loader.remainder if loader is not None and loader.is_at_end and loader.remainder > 0 else None

    def _of_ranks(self, values: Any, *, objects: bool = False) -> list[Any]:
        ranks = self._strategy
        return ranks.gather_each(values, objects=objects) if isinstance(ranks, ManyProcesses) else [values]

    def reduce(self, values: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean of tensors over the ranks, each multiplied by `scale`; "none" returns the scaled values."""
        each = [scaled(value, scale) for value in self._of_ranks(values)]
        if reduction == "none":
            return each[self.process_index]
        return combined(each, 1 / len(each) if reduction == "mean" else 1)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors padded along a dimension to the largest size of all ranks."""
        if isinstance(tensor, dict):
            return {k: self.pad_across_processes(v, dim, pad_index, pad_first) for k, v in tensor.items()}
        if isinstance(tensor, list | tuple):
            return type(tensor)(self.pad_across_processes(v, dim, pad_index, pad_first) for v in tensor)
        if not isinstance(tensor, Tensor) or dim >= tensor.dim():
            return tensor
        sizes = self._of_ranks([float(tensor.shape[dim])], objects=True)
        missing = int(max(size[0] for size in sizes)) - tensor.shape[dim]
        if not missing:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = missing
        filling = tensor.new_full(shape, pad_index)
        return torch.cat([filling, tensor] if pad_first else [tensor, filling], dim=dim)

    # ---- forward, backward, update -----------------------------------------------------------------------------------

    @property
    def gradient_accumulation_steps(self) -> int:
        """What `backward` divides a loss by: 1, because the trainer weights every micro-batch itself."""
        return 1

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        raise NotAvailable(
            f"trainer.accelerator.gradient_accumulation_steps={steps} has no effect; set "
            f"trainer.args.gradient_accumulation_steps={steps}, which applies from the next step on"
        )

    @property
    def _micro_batch(self) -> MicroBatch:
        return self._trainer._loopwright.run.micro_batch

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last of its update."""
        return self._micro_batch.is_last

    @property
    def gradient_state(self) -> Any:
        return SimpleNamespace(
            sync_gradients=self.sync_gradients,
            num_steps=self._trainer.current_gradient_accumulation_steps,
            plugin_kwargs=self._accumulation_options,
            active_dataloader=self._active_loaders[-1] if self._active_loaders else None,
            in_dataloader=bool(self._active_loaders),
            end_of_dataloader=bool(self._active_loaders) and self._active_loaders[-1].is_at_end,
            remainder=self._active_loaders[-1].remainder if self._active_loaders else -1,
        )

    def backward(self, loss: Tensor, **ignored: Any) -> None:
        self._strategy.backward(self._strategy.without_dummy(loss, self._micro_batch))

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        return self._strategy.forward_context()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return model.no_sync() if hasattr(model, "no_sync") else nullcontext()

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[Any]:
        """The trainer accumulates gradients itself."""
        return nullcontext()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        if self._strategy.is_sharded:
            return self._strategy.clip_gradients(max_norm, want_norm=True)
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        nn.utils.clip_grad_value_(parameters, clip_value)

    # ---- models and data ---------------------------------------------------------------------------------------------

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return plain_module(model.module if isinstance(model, nn.DataParallel) else model)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """A further model (a reference model, a value head) on the device; models that train need the trainer."""
        if device_placement is not False and not _is_placed(model):
            model.to(self.device)
        return model.eval() if evaluation_mode else model

    def prepare_data_loader(self, loader: Any, device_placement: bool | None = None, **ignored: Any) -> Any:
        """A loader of this rank's batches on its device, in an order by seed and epoch.

        Returned to the trainer, it is shared between the ranks like any other loader.
        """
        if not isinstance(loader, DataLoader) or isinstance(loader, PreparedLoader):
            return loader
        order_by_epoch(loader, data_seed(self._args))
        return self.share_prepared(loader, places=device_placement is not False)

    def share_prepared(self, loader: Any, *, places: bool = True) -> PreparedLoader:
        """This rank's batches of a loader, for code that iterates it by itself."""
        data = self._trainer._loopwright.data
        share, own = data.share(), loader
        if share.world > 1 and not is_shared(loader):
            own = share_evenly(
                loader,
                share,
                self._strategy.broadcast,
                even=self.even_batches,
                dispatch=self.dispatch_batches is not False,
            )
        place = self._strategy.put if places else None
        return PreparedLoader(loader, own, share.world, self._active_loaders, place)

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer

    prepare_scheduler = prepare_optimizer

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Models are moved to the device; optimizers and schedules are returned unchanged."""
        prepared = tuple(map(self._prepared, objects))
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepared(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self.prepare_model(value)
        return self.prepare_data_loader(value) if isinstance(value, DataLoader) else value

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        return plain_module(model).state_dict()

    def save(self, value: Any, path: Any, **kwargs: Any) -> None:
        """torch.save on rank 0."""
        if self.is_main_process:
            torch.save(value, path)

    def free_memory(self, *objects: Any) -> Any:
        return [None] * len(objects)

    clear = free_memory

    @property
    def _models(self) -> list[Any]:
        return [self._strategy.model]


def _type_in_accelerate(kind: str) -> str:
    return {"cuda": "GPU"}.get(kind, kind.upper())


def _is_placed(model: nn.Module) -> bool:
    """Whether a model must stay where it is: quantized, split over devices, or without weights."""
    devices = {parameter.device for parameter in model.parameters()}
    is_fixed = getattr(model, "hf_device_map", None) is not None or getattr(model, "is_quantized", False)
    return bool(is_fixed) or len(devices) > 1 or any(each.type == "meta" for each in devices)
