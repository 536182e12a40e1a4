"""Inputs of the planner; this package must not import the trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .proof.prober import LossOf


@dataclass
class PlannerInputs:
    """A model, its loss, its device, and what the user asked for."""

    model: nn.Module
    """What is trained, without the wrappers of compile and parallelism."""
    device: torch.device
    level: str
    """off, auto or max."""
    loss_of: LossOf
    put: Callable[[Any], Any]
    """A batch to the device."""
    sandbox: Callable[[], AbstractContextManager[Any]]
    """Random states and buffers put back afterwards."""
    as_trained: Callable[[], AbstractContextManager[Any]]
    """Around a forward as training runs it: autocast."""
    computes_half: bool
    """Whether matrix products are computed in half precision."""
    learn: Callable[[Any], bool]
    """Find out what the loss is, from the micro-batches of an update; returns whether it is known, and additive."""
    targets_in: Callable[[Any], Any]
    """How many targets the loss of a batch counts; None if it has no labels."""
    shifts: Callable[[], bool]
    """Whether the loss leaves out the first target of each row."""
    updates_left: Callable[[], int]
    compile: Callable[[bool], None]
    """Compile the model's blocks for changing lengths; the argument says whether rows are short."""
    why_not_compile: str | None
    operations_per_token: float
    token_budget: int | None = None
    """Tokens per micro-batch, if the user said so."""
    packs: bool = False
    """Whether updates take as many samples as fit, so that one may consist of a single sample."""
    only_grouped: str | None = None
    """Why nothing but grouping by length is allowed, if so."""
    is_shared: bool = False
    """Whether other processes hold a part of each update, so that the plan is made for all of them."""
    is_pair: bool = False
    """Whether samples are pairs of source and target."""
    device_memory: Callable[[], int | None] = lambda: None
    """Bytes the device has in all; None where nothing is planned with them."""
    model_bytes: Callable[[], int] = lambda: 0
    """Bytes of weights, gradients and optimizer states."""
    recompute: Callable[[str], Callable[[], None]] = lambda policy: lambda: None
    """Have the model recompute activations by a policy; returns what undoes it."""
    policies: tuple[str, ...] = ("none",)
    """What the model can do about its activations, from nothing recomputed to all."""
    free_memory: Callable[[], None] = lambda: None
    """Give cached memory of the device back."""
    identity: Callable[[], str] = lambda: ""
    """Who computes the loss of what: model, loss, collator and attention, as text that changes with their code."""
    why_not_additive: Callable[[], str | None] = lambda: None
    """Why the loss of an update is not made of those of its samples, if so."""
    recount: Callable[[Any], None] = lambda update: None
    """Count the targets of an update again, after its micro-batches were exchanged."""
    user_hook: Callable[[], str | None] = lambda: None
    """The module that has a hook of the user's, if any."""
    wants_look: Callable[[list[Any]], bool] = lambda batches: False
    """Whether these batches may show more about the loss than those before."""
    recomputes: bool = False
    """Whether the user has activations recomputed already."""
    graph: Callable[[], Any] | None = None
    """Run micro-batches as graphs from here on; returns the training step that does."""
    why_not_graph: str | None = "CUDA graphs were not requested"

    @property
    def insists(self) -> bool:
        """Whether the user wants what is possible, whether or not it pays."""
        return self.level == "max" or self.token_budget is not None

    @property
    def on_gpu(self) -> bool:
        is_other: bool = self.device.type != "cpu"
        return is_other

    @property
    def modules(self) -> int:
        """The modules that compute something themselves."""
        return sum(1 for module in self.model.modules() if next(module.children(), None) is None)

    def described(self) -> str:
        """Where and for whom a plan is proved; elsewhere it is proved again."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        libraries = [sys.modules.get(library) for library in ("torch", "transformers")]
        versions = [f"{library.__name__} {library.__version__}" for library in libraries if library is not None]
        # An override that was not there before sees what only the plain path may change.
        return ", ".join([name, *versions, *([self.only_grouped] if self.only_grouped else []), self.identity()])
