"""DistributedDataParallel: every rank holds the full model, gradients are averaged once per update."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...core.update import MicroBatch
from ...errors import ModelError, some
from ..distributed.process_group import Processes
from ..precision import Precision
from .base import ManyProcesses

UNFINISHED = "Expected to have finished reduction in the prior iteration"


class DataParallel(ManyProcesses):
    """Runs updates on several ranks that each hold the full model."""

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        processes: Processes,
        *,
        options: dict[str, Any] | None = None,
        non_blocking: bool = False,
    ) -> None:
        super().__init__(device, precision, processes, non_blocking=non_blocking)
        self._options = dict(options or {})
        # A static graph is recorded during gradient reduction, so all micro-batches of the first update reduce
        # gradients.
        self.forward_is_collective = bool(self._options.get("static_graph"))
        self._recording = False
        self._wrapped: Any = None
        self._replaced: Any = None
        """The previous wrapper."""
        self._has_changed_inside = False
        """Whether something changed within the last update."""
        self._is_users_wrapper = False
        """Whether the user has wrapped the model."""
        self._shared: list[nn.Parameter] = []
        """The parameters whose gradients are reduced: those trainable when the model was wrapped."""
        self._seen: set[nn.Parameter] | None = set()
        """The parameters that got a gradient in the first update; None once all are known to get one."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as training calls it; one that is already wrapped is returned unchanged."""
        self._is_users_wrapper, self._replaced = isinstance(model, DistributedDataParallel), None
        self._shared = [p for p in model.parameters() if p.requires_grad]
        if self._is_users_wrapper or not self._shared:
            self._wrapped = model
            return model
        places = {p.device for p in model.parameters()}
        single = self.device.type != "cpu" and places == {self.device}
        self._wrapped = DistributedDataParallel(
            model, device_ids=[self.device.index] if single else None, gradient_as_bucket_view=True, **self._options
        )
        self._seen, self._recording = set(), self.forward_is_collective
        return self._wrapped

    def rewrap(self, model: nn.Module) -> nn.Module:
        """The model as training calls it, wrapped again if other parameters have become trainable."""
        if self._replaced is None or model is self._wrapped:
            return model
        if model is not self._replaced:
            raise ModelError(
                "the set of trainable parameters changed, but the model cannot be wrapped in DistributedDataParallel "
                "again because _wrap_model is overridden; freeze and unfreeze before train()"
            )
        return self._wrapped

    def follow(self) -> None:
        """Wrap again if other parameters are trainable: a wrapper reduces only the gradients it was created for."""
        super().follow()
        trained = self.contents.trained()
        if self._wrapped is None or list(map(id, trained)) == list(map(id, self._shared)):
            return
        if self._is_users_wrapper:
            raise ModelError(
                "the trainable parameters changed after you wrapped the model in DistributedDataParallel; pass the "
                "unwrapped model to the trainer, which wraps it again whenever they change"
            )
        if isinstance(self._wrapped, DistributedDataParallel):
            self._wrapped._remove_autograd_hooks()  # otherwise gradients are reduced twice
        former = self._wrapped
        self.wrap(self.model)
        self._replaced = former

    def detect_changes(self) -> bool:
        has_changed, self._has_changed_inside = self._has_changed_inside, False
        if has_changed:
            self.follow()
        return super().detect_changes() or has_changed

    def detect_changes_inside(self) -> None:
        """Raise if parameters became trainable within an update: the wrapper does not reduce their gradients."""
        if self._wrapped is None:
            super().detect_changes_inside()
        if self._wrapped is None or not self.contents.detect_changes():
            return
        super().follow()
        self._has_changed_inside = True
        known = set(self._shared)
        named = {p: name for name, p in self.model.named_parameters()}
        strangers = [named.get(p, "?") for p in self.contents.parameters if p.grad is not None and p not in known]
        if strangers:
            raise ModelError(
                f"these parameters became trainable in the middle of a step: {some(strangers, 10)}. A step "
                "reduces the gradients of those trainable at its start; change them in on_step_begin, on_step_end or "
                "between epochs, on every rank"
            )

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model without the wrapper, whose forward communicates with other ranks."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    # ---- one update -------------------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, micro: MicroBatch) -> Iterator[None]:
        """Gradients are all-reduced in the backward pass of the last micro-batch of this rank, once per update."""
        is_last = micro.is_last
        shares = is_last or self._recording or not isinstance(self._wrapped, DistributedDataParallel)
        watched = self._watching() if is_last and self._seen is not None else nullcontext()
        try:
            with super().micro_batch(micro), watched if shares else self._wrapped.no_sync():
                yield
        except RuntimeError as error:
            if UNFINISHED not in str(error):
                raise
            raise ModelError(unused_parameters(self._named_in(str(error)))) from error
        if is_last:
            self._recording = False

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Check in the first update that all parameters get a gradient: otherwise DDP would not finish reducing."""
        seen: set[nn.Parameter] = set()
        handles = [p.register_post_accumulate_grad_hook(seen.add) for p in self.contents.trained()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._seen = None
        if not self._options.get("find_unused_parameters") and not self._options.get("static_graph"):
            named = {p: name for name, p in self.model.named_parameters()}
            unused = [named.get(p, "?") for p in self.contents.trained() if p not in seen]
            if unused:
                raise ModelError(unused_parameters(unused))

    def _named_in(self, text: str) -> list[str]:
        """The parameters whose indices are in torch's error."""
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        numbers = [int(each) for each in found.group(1).split()] if found else []
        return [names[each] for each in numbers if each < len(names)]


def unused_parameters(names: list[str]) -> str:
    """The error for parameters without a gradient, with a remedy."""
    return (
        f"these parameters got no gradient; DDP would hang waiting for them: {some(names, 10)}. Set "
        "requires_grad=False on them, use them, or set ddp_find_unused_parameters=True"
    )
