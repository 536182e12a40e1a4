"""Forward and backward of a micro-batch as one CUDA graph, for small models that are bound by kernel launches.

The optimizer is not part of the graph: a fused step has few launches, which the host issues while the device still
replays. Capturing it would gain nothing and would not allow its settings to change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ...snapshot import restored
from ..attention.needless_masks import without_needless_masks
from ..proof.random_draws import draws_without_effect
from .capture import CudaRecorder
from .contexts import (
    HostStreams,
    any_wait_is_fine,
    as_if_recording,
    autocast_without_cache,
    buffers_of,
    draws_between,
    host_streams,
    no_wait,
    side_stream,
)
from .difference import gradient_or_zeros, relative_difference
from .graph import CHECKS, LATER_CHECKS, Graph, Inputs

MOST_SHAPES = 8
TOLERANCE = 1e-2
"""Allowed relative difference of loss and gradients: summation order in bf16, not a different computation."""

Run = Callable[[Inputs, Any], Tensor]
"""Forward, loss times weight, backward; returns the weighted loss, detached."""

Recorder = Callable[[Callable[[], Tensor]], tuple[Callable[[], Any], Tensor]]
"""Captures a function without executing it; returns a function to replay it and the tensor of its result."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Uncapturable(Exception):
    """The micro-batch cannot be captured; the message gives the reason."""


class GraphedStep:
    """Runs micro-batches as graphs, one for each of a few shapes, and all others eagerly.

    Each graph is compared with an eager run on the same batch, including random numbers, before it is used. Gradients
    may be None between updates, as after `zero_grad`: they are then zeroed in the tensors of the graph.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        *,
        tell: Callable[[str], None],
        key_of_batch: Callable[[Inputs], Hashable | None] | None = None,
        recorder: Recorder | None = None,
        most_shapes: int = MOST_SHAPES,
    ) -> None:
        self._run, self._model, self._tell = run, model, tell
        self._key_of_batch = key_of_batch or shape_key
        self.most = most_shapes
        self.from_time = 1
        """The occurrence of a shape at which it is captured: shapes that occur once may not be worth it."""
        self.overwrites = False
        """Whether the first graph may write gradients instead of adding them: updates have one micro-batch."""
        self._all = list(model.parameters())
        self.device = self._all[0].device
        self._recorder = recorder
        self._graphs: dict[Hashable, Graph] = {}
        self.times: Counter[str] = Counter()
        """Occurrences of each shape before it was captured, by description; saved, so that a resumed run continues."""
        self._look_at_parameters()
        self.reason = cannot_capture(model, self.device) if recorder is None else None
        if self.reason is not None:
            tell(f"no CUDA graph: {self.reason}")
        elif recorder is None:
            self._recorder = CudaRecorder(self.device)

    def step(self, inputs: Inputs, weight: Any = 1.0) -> Tensor:
        """Forward and backward of a micro-batch; returns its weighted loss, as a new tensor."""
        graph = self._graph_for(inputs) if self.reason is None else None
        if graph is not None and graph.checks:
            graph = self._checked(graph, inputs, weight)
        if graph is None:
            return self._run(inputs, weight)
        graph.load(inputs, weight)
        graph.run()
        if graph.draws:
            torch.rand(graph.draws)
        return graph.loss.clone()

    def divide(self) -> None:
        """To be called between forward and backward: while they are captured, each becomes a graph of its own."""
        if isinstance(self._recorder, CudaRecorder):
            self._recorder.divide()

    def forget(self) -> None:
        """Discard all graphs and the counts of shapes."""
        self._graphs.clear()
        self._places: dict[int, Tensor] = {}
        self.times.clear()
        if isinstance(self._recorder, CudaRecorder):
            self._recorder.take_new_memory()  # torch frees a pool with its last graph

    def close(self) -> None:
        """Discard all graphs and their memory; steps are eager from now on."""
        self.reason = self.reason or "closed"
        self.forget()
        self._recorder = None

    def _look_at_parameters(self) -> None:
        """Discard all graphs and read the parameters again: a graph depends on their addresses and requires_grad."""
        self._stamp = [(p.data_ptr(), p.requires_grad) for p in self._all]
        self._parameters = [p for p in self._all if p.requires_grad]
        self.forget()

    # ---- capturing --------------------------------------------------------------------------------------------------

    def _graph_for(self, inputs: Inputs) -> Graph | None:
        if self._stamp != [(p.data_ptr(), p.requires_grad) for p in self._all]:
            self._look_at_parameters()
        shapes = self._key_of_batch(inputs)
        if shapes is None:
            return None
        key = (shapes, self._model.training)
        if key in self._graphs:
            return self._graphs[key]
        try:
            if self._is_due(repr(key)):
                self._graphs[key] = self._record(inputs)
        except Exception as error:  # anything a graph does not support: eager training still works
            self._give_up(error)
        return self._graphs.get(key)

    def _is_due(self, shape: str) -> bool:
        """Whether a shape has occurred often enough to be captured, within the limit on shapes; uses counts only."""
        due = sum(times >= self.from_time for times in self.times.values())
        if self.times[shape] < self.from_time and due == self.most:
            self._tell(f"CUDA graphs are kept for {self.most} shapes; micro-batches of other shapes run eagerly")
            return False
        self.times[shape] += 1
        if len(self.times) > 2 * self.most:
            raise Uncapturable(f"micro-batches have more than {2 * self.most} shapes")
        return self.times[shape] >= self.from_time

    def _record(self, inputs: Inputs) -> Graph:
        static = {
            name: value.to(self.device, copy=True) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        weight = torch.ones((), device=self.device)
        with restored(self._model, self._parameters), autocast_without_cache(), any_wait_is_fine():
            reached, draws = self._warm_up(static, weight)
            overwrites = self._makes_places
            for parameter in reached:
                parameter.grad = None if overwrites else self._place_of(parameter)
            assert self._recorder is not None
            with without_needless_masks():
                replay, loss = self._recorder(lambda: self._run(static, weight))
            if overwrites:
                self._places = {id(p): p.grad for p in reached if p.grad is not None}
            gradients = [(p, self._place_of(p)) for p in reached]
            if any(parameter.grad is not place for parameter, place in gradients):
                raise Uncapturable("the backward pass replaces gradients instead of accumulating them")
        checks = LATER_CHECKS if self._graphs else CHECKS
        return Graph(static, weight, loss, replay, gradients, checks, draws, overwrites)

    @property
    def _makes_places(self) -> bool:
        """Whether the next graph allocates the gradients itself, which saves a kernel for each parameter."""
        return self.overwrites and not self._places and isinstance(self._recorder, CudaRecorder)

    def _warm_up(self, inputs: Inputs, weight: Tensor) -> tuple[list[nn.Parameter], int]:
        """Run eagerly until all one-time initialization is done; returns the parameters with gradients, and draws."""
        with side_stream(self.device), as_if_recording(self.device):
            before = host_streams(self.device)
            self._run_alone(inputs, weight)
            draws = self._draws_since(before)
            with no_wait(self.device):  # an error here is harmless; during a capture it would break torch's state
                self._run_alone(inputs, weight)
            if not self._graphs:
                self._run_alone(inputs, weight)
        reached = [p for p in self._parameters if p.grad is not None]
        if any(p.grad.layout is not torch.strided for p in reached if p.grad is not None):
            raise Uncapturable("a gradient is sparse")
        return reached, draws

    def _draws_since(self, before: HostStreams) -> int:
        """Random numbers drawn on the host; raises unless they are known to have no effect."""
        after = host_streams(self.device)
        if after == before:
            return 0
        draws, idle = draws_between(before, after), draws_without_effect(self._model)
        if draws != idle:
            raise Uncapturable("the forward pass draws random numbers on the host")
        return idle

    def _run_alone(self, inputs: Inputs, weight: Any) -> Tensor:
        for parameter in self._parameters:
            parameter.grad = None
        return self._run(inputs, weight)

    def _place_of(self, parameter: nn.Parameter) -> Tensor:
        """The tensor that holds this parameter's gradient in every graph."""
        if id(parameter) not in self._places:
            self._places[id(parameter)] = torch.zeros_like(parameter, requires_grad=False)
        return self._places[id(parameter)]

    # ---- proving ----------------------------------------------------------------------------------------------------

    def _checked(self, graph: Graph, inputs: Inputs, weight: Any) -> Graph | None:
        """The graph if a replay on this batch equals an eager run; otherwise None, and graphs are disabled."""
        graph.checks -= 1
        try:
            with any_wait_is_fine():
                error = self._difference(graph, inputs, weight)
            if not error <= TOLERANCE:
                raise Uncapturable(f"a replay differs from the eager run by {error:.1e}")
        except Exception as error:  # any error disables graphs, and the log gives the reason
            self._give_up(error)
            return None
        return graph

    def _difference(self, graph: Graph, inputs: Inputs, weight: Any) -> float:
        """The largest relative difference between replay and eager run: loss, gradients, buffers."""
        # Models that use other kernels during a capture, and so other dropout, must use them here too.
        with self._restored(()), as_if_recording(self.device), autocast_without_cache():
            loss = self._run_alone(dict(inputs), weight)
            eager = [gradient_or_zeros(p) for p, _ in graph.gradients]  # new tensors, which only this list refers to
            buffers = [place[name].clone() for place, name in buffers_of(self._model)]
        with self._restored([place for _, place in graph.gradients]):
            graph.load(inputs, weight)
            for parameter, _ in graph.gradients:
                parameter.grad = None
            graph.place_gradients()
            graph.replay()
            after = [place[name] for place, name in buffers_of(self._model)]
            replayed = [place for _, place in graph.gradients]
            parts = [([graph.loss], [loss]), (replayed, eager), (after, buffers)]
            return max(relative_difference(mine, expected) for mine, expected in parts)

    def _restored(self, written: Sequence[Tensor]) -> AbstractContextManager[None]:
        """A context after which everything is as before; of gradients, only those in `written` may be written to."""
        places = {id(place) for place in written}
        return restored(self._model, self._parameters, copies=lambda gradient: id(gradient) in places)

    def _give_up(self, error: Exception) -> None:
        """Disable graphs and log the reason."""
        text = str(error).strip().splitlines()
        self.reason = text[0] if text else type(error).__name__
        self.close()
        self._tell(f"no CUDA graph: {self.reason}")


# ---- what may be captured -------------------------------------------------------------------------------------------


def shape_key(batch: Any) -> Hashable | None:
    """Shapes and dtypes of the tensors, and plain values, by name; None if a batch is or holds anything else."""
    if not isinstance(batch, Mapping):
        return None
    parts: list[Hashable] = []
    for name, value in batch.items():
        if isinstance(value, Tensor):
            parts.append((name, tuple(value.shape), value.dtype))
        elif value is None or isinstance(value, (bool, int, float, str)):
            parts.append((name, value))
        else:
            return None
    return tuple(parts)


def cannot_capture(model: nn.Module, device: torch.device) -> str | None:
    """Why micro-batches of this model cannot be captured, by inspection of the model; None if no reason is found.

    Overrides of `training_step` and `compute_loss` must be checked by the caller.
    """
    if device.type != "cuda":
        return f"{device.type} has none"
    if {tensor.device for tensor in [*model.parameters(), *model.buffers()]} != {device}:
        return "the model is on several devices"
    for name, module in model.named_modules():
        if any(getattr(module, hooks, None) for hooks in HOOKS):
            return f"{name or 'the model'} has hooks, which a replay would not call"
        if getattr(module, "gradient_checkpointing", False):
            return "activations are checkpointed"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"{name} has hooks, which a replay would not call"
    return None
