"""Updates on a lazy device: operations are recorded and run as one compiled graph per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..args.base import BaseArguments
from ..core.update import MicroBatch
from ..pt.precision import Precision
from ..pt.strategies.single import SingleDevice
from . import runtime
from .guard import ShapeGuard
from .mesh import MeshLayout
from .tracing import noting, stepwise

ADAM = (torch.optim.Adam, torch.optim.AdamW)


class XlaDevice(SingleDevice):
    """Runs updates on lazy torch_xla: on one device, or on all of them (SPMD)."""

    logs_later = True
    guard: ShapeGuard

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        *,
        accumulates: bool = False,
        allowed: int | None = None,
        layout: MeshLayout | None = None,
    ) -> None:
        super().__init__(device, precision)
        self._note(accumulates=accumulates, allowed=allowed, layout=layout)

    def _note(self, *, accumulates: bool, allowed: int | None, layout: MeshLayout | None) -> None:
        self.guard = ShapeGuard(runtime.graphs, allowed=allowed)
        self.layout = layout
        self._accumulates = accumulates
        context = self.precision.context
        self.forward_context = lambda: noting(context())

    @classmethod
    def of(cls, args: BaseArguments, device: torch.device, precision: Precision) -> Self:
        """The strategy of these arguments."""
        return cls(
            device,
            precision,
            accumulates=args.gradient_accumulation_steps > 1,
            allowed=args.max_recompiles,
            layout=MeshLayout.of(args),
        )

    # ---- setting up -------------------------------------------------------------------------------------------------

    def setup_model(self, model: nn.Module, *, place: bool = True) -> nn.Module:
        model = super().setup_model(model, place=place)
        runtime.end_step()  # computes weights that were created on the device
        begin_weights(model)
        if self.layout is not None:
            self.layout.spread(model)
        return model

    def setup_optimizer(self, optimizer: Any) -> Any:
        optimizer = super().setup_optimizer(optimizer)
        if type(optimizer) in ADAM:
            begin_state(optimizer)  # otherwise the first step, which creates it, is a separate graph
        if self.layout is not None:
            self.layout.spread_state(optimizer)
        self.boundary()
        return optimizer

    # ---- one update -------------------------------------------------------------------------------------------------

    def put(self, batch: Any) -> Any:
        self.guard.saw(batch)
        moved = super().put(batch)
        if self.layout is not None:
            self.layout.spread_batch(moved)
        return moved

    @contextmanager
    def micro_batch(self, micro: MicroBatch) -> Iterator[None]:
        """With several micro-batches, each one is a step, so that the graph does not depend on their number."""
        with super().micro_batch(micro):
            yield
        if self._accumulates:
            self.boundary()

    def boundary(self) -> None:
        runtime.end_step()
        self.guard.check()

    def zero_grad(self) -> None:
        """Drop gradients before the step is run, so that they are not outputs of the graph."""
        super().zero_grad()
        self.boundary()

    def free_memory(self) -> None:
        """No-op: the runtime has no cache to release."""

    def generating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context manager: each forward pass of the model or its encoder is a separate step."""
        return stepwise(model, self.device, self.boundary)

    # ---- undoing ----------------------------------------------------------------------------------------------------

    def restore(self, held: Any) -> None:
        super().restore(held)
        self.boundary()

    # ---- numbers ----------------------------------------------------------------------------------------------------

    def read(self, scalars: list[Any]) -> list[float]:
        """Copy numbers of finished steps to the host; no computation, so nothing is compiled."""
        lazy = [each for each in scalars if isinstance(each, Tensor) and each.device.type == "xla"]
        found = iter(runtime.to_host(lazy)) if lazy else iter(())
        return [float(next(found)) if isinstance(each, Tensor) and each.device.type == "xla" else float(each)
                for each in scalars]  # fmt: skip

    def defer(self, function: Callable[[], None]) -> None:
        """Call a function after the next recorded step was submitted to the device."""
        runtime.at_step_end(function)


@torch.no_grad()
def begin_weights(model: nn.Module) -> None:
    """Write to all weights in place, as an optimizer does.

    Views of a tensor that was never written to are recorded differently, so the first step would be a separate graph.
    The written values are replaced at once and never computed.
    """
    for parameter in model.parameters():
        if parameter.device.type == "xla" and parameter.is_floating_point():
            value = parameter.cpu()
            parameter.addcdiv_(parameter, parameter)
            parameter.copy_(value)


def begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer state that Adam creates in its first step: zeros, and step 0."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state or not parameter.requires_grad:
                continue
            at = parameter.device if group["capturable"] or group["fused"] else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=at)
            names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
            for name in names:
                # Copied from the host: creating zeros on the device would be a graph.
                state[name] = torch.zeros(parameter.shape, dtype=parameter.dtype).to(parameter.device)
