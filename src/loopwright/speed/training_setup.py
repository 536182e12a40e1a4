"""What planner, proofs and engine get from the trainer, which this package must not import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .proof.prober import LossOf


@dataclass
class TrainingSetup:
    """The model that is trained, its loss, its device, and the user's settings."""

    model: nn.Module
    """The trained model, without the wrappers of compilation and parallelism."""
    device: torch.device
    level: str
    """"off", "auto" or "max"."""
    loss_of: LossOf
    to_device: Callable[[Any], Any]
    """Copies a batch to the device."""
    sandbox: Callable[[], AbstractContextManager[Any]]
    """Context that restores random states and buffers at exit."""
    as_trained: Callable[[], AbstractContextManager[Any]]
    """Context around a forward as in training: autocast."""
    computes_half: bool
    """Whether matrix products are computed in half precision."""
    learn: Callable[[Any], bool]
    """Determines the form of the loss from the micro-batches of an update; returns whether it is known and additive."""
    targets_in: Callable[[Any], Any]
    """Number of targets the loss of a batch counts; None if the batch has no labels."""
    shifts: Callable[[], bool]
    """Whether the loss omits the first target of each row."""
    updates_left: Callable[[], int]
    compile: Callable[[bool], None]
    """Compiles the model's blocks for dynamic lengths; the argument is whether rows are short."""
    why_not_compile: str | None
    operations_per_token: float
    token_budget: int | None = None
    """Tokens per micro-batch, if set by the user."""
    why_unchanged: str | None = None
    """Why the collator's micro-batches and the model must not be changed; None if they may be."""
    packs: bool = False
    """Whether updates take as many samples as fit, so that one may consist of a single sample."""
    why_only_grouped: str | None = None
    """Why only grouping by length is allowed; None if all layouts are."""
    is_shared: bool = False
    """Whether each update is split across ranks, so that one plan is made for all of them."""
    is_pair: bool = False
    """Whether samples are pairs of source and target."""
    device_memory: Callable[[], int | None] = lambda: None
    """Total bytes of device memory; None if memory is not planned."""
    model_bytes: Callable[[], int] = lambda: 0
    """Bytes of weights, gradients and optimizer states."""
    recompute: Callable[[str], Callable[[], None]] = lambda policy: lambda: None
    """Makes the model recompute activations according to a policy; returns a function that undoes it."""
    policies: tuple[str, ...] = ("none",)
    """Recomputation policies that the model supports, from none to full."""
    free_memory: Callable[[], None] = lambda: None
    """Releases cached device memory."""
    identity: Callable[[], str] = lambda: ""
    """Identifies the code that computes the loss: model, loss, collator and attention; changes with that code."""
    why_not_additive: Callable[[], str | None] = lambda: None
    """Why the loss of an update is not composed of the losses of its samples; None if it is."""
    recount: Callable[[Any], None] = lambda update: None
    """Counts the targets of an update again after its micro-batches were replaced."""
    user_hook: Callable[[], str | None] = lambda: None
    """Name of a module with a hook of the user; None if there is none."""
    wants_test: Callable[[list[Any]], bool] = lambda batches: False
    """Whether to test the loss on these batches, because they may show more about it than earlier ones."""
    recomputes: bool = False
    """Whether the user has already enabled activation recomputation."""
    graph: Callable[[], Any] | None = None
    """Switches to CUDA graphs for micro-batches; returns the training step that replays them."""
    why_not_graph: str | None = "CUDA graphs were not requested"
    region: Callable[[], Any] = lambda: None
    """Compiles the repeated blocks, or a model without any, for a few shapes."""
    why_not_region: str | None = "regions were not requested"
    sandbox_compiled: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The sandbox, with compiled code."""
    may_measure: bool = True
    """Whether a choice may depend on measured times."""
    plan_key: Callable[[], str | None] = lambda: None
    """Identifies model, code, device and settings for which a plan is kept for later runs; None if it is not kept."""
    code_key: Callable[[], str | None] = lambda: None
    """Identifies the code that computes the loss, as far as it is imported now."""
    is_warm: Callable[[], bool] = lambda: False
    """Whether compiled code of an earlier run of this model is in the cache."""

    @property
    def insists(self) -> bool:
        """Whether everything possible is to be enabled, without estimating the benefit."""
        return self.level == "max" or self.token_budget is not None

    @property
    def on_gpu(self) -> bool:
        is_other: bool = self.device.type != "cpu"
        return is_other

    @contextmanager
    def sparing(self) -> Iterator[None]:
        """Recompute whole blocks on GPUs, if the model supports that and training does not do it already.

        A comparison computes what training does not: the update as written, without compiled code, or in wider batches.
        """
        undo = self.recompute("full") if self.can_spare and not self.recomputes else None
        try:
            yield
        finally:
            if undo is not None:
                undo()

    @property
    def can_spare(self) -> bool:
        """Whether a comparison on a GPU can do without the memory of activations."""
        return self.on_gpu and ("full" in self.policies or self.recomputes)

    @property
    def modules(self) -> int:
        """Number of modules without children."""
        return sum(1 for module in self.model.modules() if next(module.children(), None) is None)

    def described(self) -> str:
        """Device, versions and code for which a plan is proved; the plan is not valid for others."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        libraries = [sys.modules.get(library) for library in ("torch", "transformers")]
        versions = [f"{library.__name__} {library.__version__}" for library in libraries if library is not None]
        # A new override of the user may depend on the collator's batches, so it invalidates the plan.
        overrides = [self.why_only_grouped] if self.why_only_grouped else []
        return ", ".join([name, *versions, *overrides, self.identity()])
