"""DeepSpeed's ZeRO stages 1 to 3 through its own `initialize`; the optimizer state is in DeepSpeed's files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...args.base import BaseArguments
from ...args.nested.zero import filled_config
from ...args.reading import read_dict
from ...core.update import MicroBatch
from ...errors import ArgumentsError, CheckpointError, MissingPackage, NotAvailable
from ..checkpoint.weights import saved_weights
from ..distributed.process_group import Processes
from ..precision import Precision
from .base import ManyProcesses

FOLDER = "deepspeed"
TAG = "state"


class DeepSpeed(ManyProcesses):
    """Delegates forward, backward and step to DeepSpeed's engine."""

    is_sharded = True
    saves_whole = True
    saves_itself = True
    forward_is_collective = True

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        processes: Processes,
        *,
        args: BaseArguments,
        non_blocking: bool = False,
    ) -> None:
        # The engine converts the model to half precision and scales losses itself.
        super().__init__(device, Precision(), processes, non_blocking=non_blocking)
        self._args = args
        self.engine: Any = None
        self._groups = 0
        self._package = _imported()
        self.backward = self._engine_backward

    # ---- setting up -------------------------------------------------------------------------------------------------

    def setup_model(self, model: nn.Module, *, place: bool = True) -> nn.Module:
        self.engine = None
        return super().setup_model(model, place=True)

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Create the engine; the optimizer's groups are still those that the schedule uses."""
        width = getattr(getattr(self.model, "config", None), "hidden_size", None)
        try:
            config = filled_config(read_dict(self._args.deepspeed), self._args, self.world_size, width)
        except ValueError as error:
            raise ArgumentsError([f"deepspeed: {problem}" for problem in str(error).split("; ")]) from error
        self.engine, *_ = self._package.initialize(
            model=self.model, optimizer=optimizer, config=config, dist_init_required=False
        )
        self.optimizer, self._broken = optimizer, None
        self.contents.take(self.model, None)  # the groups hold the engine's versions of the parameters
        self._groups = len(optimizer.param_groups)
        return optimizer

    def change_optimizer(self, optimizer: Any) -> Any:
        self.follow()

    def detect_changes(self) -> bool:
        if self.engine is not None and len(self.optimizer.param_groups) != self._groups:
            self.follow()
        return super().detect_changes()

    def follow(self) -> None:
        """Raise: the engine keeps the parameters and the optimizer it was created with."""
        raise NotAvailable(
            "parameters, requires_grad or parameter groups changed during training, but DeepSpeed's engine keeps the "
            "original ones; change them before train(), or train without deepspeed="
        )

    def rewrap(self, model: nn.Module) -> nn.Module:
        return model if self.engine is None else self.engine

    def unwrap(self, model: nn.Module) -> nn.Module:
        return self.model

    # ---- one update -------------------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, micro: MicroBatch) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(micro.is_last)
        with super().micro_batch(micro):
            yield
        if not micro.is_last:
            self.engine.step()  # counts the micro-batch; the weights change only at the boundary

    def _engine_backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)  # the trainer has already divided the loss

    def scale_gradients(self, factor: Any) -> None:
        raise NotAvailable(
            "a loss that returns (sum, count) needs gradients divided after the backward pass, which DeepSpeed does "
            "not allow; return the mean, or divide by num_items_in_batch"
        )

    def clip_gradients(self, max_norm: float | None, *, want_norm: bool) -> Any:
        """Step, because the engine clips in its step and reports the norm only afterwards."""
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm)

    def optimizer_step(self, veto: Tensor | None = None) -> bool:
        """Whether the step of `clip_gradients` was applied, not skipped by the engine's loss scaling."""
        return bool(self.engine.was_step_applied())

    def zero_grad(self) -> None:
        if self.engine is not None:
            self.engine.zero_grad()

    # ---- full tensors to save and load -------------------------------------------------------------------------------

    def model_state(self, module: nn.Module) -> dict[str, Tensor]:
        """Weights (in full precision) and buffers, gathered from all ranks."""
        if self.engine is None:
            return dict(module.state_dict())
        from deepspeed.utils import safe_get_full_fp32_param

        found = dict(module.state_dict())
        for name, parameter in module.named_parameters(remove_duplicate=False):
            whole = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
            found[name] = parameter.detach() if whole is None else whole.reshape(_shape(parameter))
        return found

    def load_weights(self, module: nn.Module, folder: str | Path) -> None:
        if self.engine is None:
            super().load_weights(module, folder)
            return
        from deepspeed.utils import safe_set_full_fp32_param

        with saved_weights(module, folder) as reader:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    safe_set_full_fp32_param(parameter, reader.whole(name).to(parameter.device))

    # ---- optimizer state in DeepSpeed's files ------------------------------------------------------------------------

    def write_state(self, folder: Path) -> None:
        """Write the engine's state; every rank writes its own files."""
        self.engine.save_checkpoint(str(folder / FOLDER), tag=TAG, save_latest=False)

    def read_state(self, folder: Path) -> None:
        """The counterpart of `write_state`, for the same number of ranks."""
        if not (folder / FOLDER).is_dir():
            raise CheckpointError(
                f"{folder.name} has no {FOLDER} folder: it was saved without DeepSpeed, which keeps optimizer state "
                "in its own files. Resume without deepspeed=, or start a new run from its weights"
            )
        found, _ = self.engine.load_checkpoint(str(folder / FOLDER), tag=TAG, load_lr_scheduler_states=False)
        if found is None:
            raise CheckpointError(f"DeepSpeed could not read {folder / FOLDER}")


def _imported() -> Any:
    try:
        import deepspeed
    except ImportError as error:
        raise MissingPackage("deepspeed", needed_for="deepspeed=") from error
    return deepspeed


def _shape(parameter: Any) -> tuple[int, ...]:
    """The shape of the full parameter, also if a ZeRO stage holds only a shard."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
