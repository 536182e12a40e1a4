"""The members of `self.accelerator` that overrides use, implemented by the strategy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..core.update import MicroBatch, whole_batch
from ..errors import NotAvailable
from .checkpoint.tensors import plain_module
from .strategies.single import SingleDevice


class AcceleratorFace:
    """`trainer.accelerator` for code written against other trainers."""

    def __init__(
        self,
        strategy: SingleDevice,
        micro_batches: Callable[[], int] = lambda: 1,
        micro_batch: Callable[[], MicroBatch] = whole_batch,
    ) -> None:
        self._strategy, self._micro_batches, self._micro_batch = strategy, micro_batches, micro_batch

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._micro_batches()

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        raise NotAvailable(
            f"trainer.accelerator.gradient_accumulation_steps={steps} has no effect; set "
            f"trainer.args.gradient_accumulation_steps={steps}, which applies from the next update on"
        )

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
    def is_main_process(self) -> bool:
        return self._strategy.rank == 0

    is_local_main_process = is_main_process

    def backward(self, loss: Tensor, **ignored: Any) -> None:
        self._strategy.backward(self._strategy.without_dummy(loss, self._micro_batch()))

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return plain_module(model)

    def autocast(self) -> AbstractContextManager[Any]:
        return self._strategy.forward_context()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return model.no_sync() if hasattr(model, "no_sync") else nullcontext()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        if self._strategy.is_sharded:
            return self._strategy.clip_gradients(max_norm, want_norm=True)
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def gather(self, values: Any) -> Any:
        return self._strategy.gather(values)

    gather_for_metrics = gather

    def wait_for_everyone(self) -> None:
        self._strategy.barrier()
