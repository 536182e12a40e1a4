"""TrainingArguments and Seq2SeqTrainingArguments: all arguments, plus those derived with PyTorch.

torch is imported when a device is first needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..args.base import BaseArguments
from ..args.field import nearest
from ..args.groups.distributed import read_accelerator_config
from ..args.groups.generation import GenerationArgs
from ..args.problems import Problems, shown

if TYPE_CHECKING:
    import torch


@dataclass
class TrainingArguments(BaseArguments):
    """All arguments of a run with PyTorch."""

    shares_state: ClassVar[bool] = False
    """Whether accelerate's state is created with the arguments; set by `loopwright.compat`."""
    usual_format: ClassVar[str] = "native"
    """What `checkpoint_format="auto"` means; set by `loopwright.compat`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if read_accelerator_config(self.accelerator_config).use_configured_state:
            from .accelerate.accelerate_state import check_configured_state

            check_configured_state()
        if self.shares_state:
            from .accelerate.accelerate_state import initialize_accelerate

            initialize_accelerate(self)

    @property
    def distributed_state(self) -> Any:
        """accelerate's PartialState of this process; None if accelerate is not installed."""
        try:
            import accelerate.state  # noqa: F401
        except ModuleNotFoundError:
            return None
        from .accelerate.accelerate_state import initialize_accelerate

        return initialize_accelerate(self)

    @property
    def _n_gpu(self) -> int:
        return self.n_gpu

    @property
    def device(self) -> torch.device:
        """The device this process computes on."""
        from .devices import choose_device

        return choose_device(self.use_cpu, self.local_process_index)

    @property
    def n_gpu(self) -> int:
        """Accelerators this process uses: one, or 0 on the CPU. DataParallel is not supported."""
        return 0 if self.device.type == "cpu" else 1

    def settle_framework(self, problems: Problems) -> None:
        super().settle_framework(problems)
        if self.torch_compile and not problems.concern(("torch_compile_backend", "torch_compile_mode")):
            wrong = _problem_of_compilation(self.torch_compile_backend or "inductor", self.torch_compile_mode)
            if wrong is not None:
                problems.add(wrong)

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Let rank 0 (of each machine, or of all) run the block before the others."""
        if self.world_size == 1:
            yield
            return
        from .distributed.process_group import open_processes

        processes = open_processes(self.device, backend=self.ddp_backend, timeout=self.ddp_timeout_delta)
        is_first = (self.local_process_index if local else self.process_index) == 0
        if not is_first:
            processes.host.barrier()
        try:
            yield
        finally:
            if is_first:
                processes.host.barrier()

    @property
    def place_model_on_device(self) -> bool | None:
        """Whether the trainer moves the model to the device; a subclass may return False."""
        return True


# GenerationArgs comes first so that output_dir stays the first positional argument.
@dataclass
class Seq2SeqTrainingArguments(GenerationArgs, TrainingArguments):
    """All arguments of a run that generates text in evaluation."""


def _problem_of_compilation(backend: str, mode: str | None) -> str | None:
    """What is wrong with a backend and a mode of torch.compile, or None. Imports torch's compiler if it is needed."""
    if backend != "inductor":
        from torch._dynamo import list_backends

        known = list_backends(exclude_tags=())
        if backend not in known:
            return (
                f"{shown('torch_compile_backend', backend)}: must be one of {', '.join(known)}{nearest(backend, known)}"
            )
    if mode is not None:
        from torch._inductor import list_mode_options

        modes = list(list_mode_options())
        if mode not in modes:
            return f"{shown('torch_compile_mode', mode)}: must be one of {', '.join(modes)}{nearest(mode, modes)}"
    return None
