"""Graphs of micro-batches: everything around the recording itself, with a recorder that runs the function again.

The real recorder is CUDA's: tests/gpu/test_speed_parts.py.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from loopwright.snapshot import restored
from loopwright.speed.cuda_graphs.capture import CudaRecorder
from loopwright.speed.cuda_graphs.contexts import host_streams
from loopwright.speed.cuda_graphs.difference import relative_difference
from loopwright.speed.cuda_graphs.graph import Graph
from loopwright.speed.cuda_graphs.recorder import GraphedStep, cannot_capture, shape_key

CPU = torch.device("cpu")


class Tiny(nn.Module):
    """Dropout, a buffer that every forward changes, and a parameter that no loss reaches."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.unused = nn.Parameter(torch.ones(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.dropout(self.norm(self.first(x)).relu())
        return (self.second(hidden).squeeze(-1) - labels).square().mean()


def replaying(function: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
    """A recorder without a graph: a replay is another run on the same tensors."""
    loss = torch.zeros(())
    return lambda: loss.copy_(function()), loss


def runner(model: nn.Module) -> Any:
    def run(inputs: dict[str, Any], weight: Any) -> Tensor:
        loss = model(**inputs) * weight
        loss.backward()
        return loss.detach()

    return run


def batch(size: int, number: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(number)
    return {"x": torch.randn(size, 4, generator=draws), "labels": torch.randn(size, generator=draws)}


def graphed(model: nn.Module, told: list[str], recorder: Any = replaying, **options: Any) -> GraphedStep:
    return GraphedStep(runner(model), model, tell=told.append, recorder=recorder, **options)


def test_losses_gradients_buffers_and_random_numbers_are_those_of_eager_runs() -> None:
    torch.manual_seed(0)
    model, told = Tiny(), []
    other = copy.deepcopy(model)
    eager, step = runner(other), graphed(model, told)
    for update in range(4):
        for index, size in enumerate((6, 3, 6)):  # three micro-batches, two shapes
            inputs, weight = batch(size, 10 * update + index), (0.5, torch.tensor(0.3), 1.0)[index]
            state = torch.get_rng_state()
            mine = step.step(inputs, weight)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            assert torch.equal(mine, eager(inputs, weight))
            assert torch.equal(torch.get_rng_state(), after)
        for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None) == (name == "unused")
            assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7), name
        for a, b in zip(model.buffers(), other.buffers(), strict=True):
            assert torch.equal(a, b)
        for parameter in [*model.parameters(), *other.parameters()]:
            parameter.grad = None
    assert told == [] and step.reason is None and len(step._graphs) == 2


class Capturing(CudaRecorder):
    """Like CUDA's, it runs the function once while it records, and replays write to the gradients of that run."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())

    def take_new_memory(self) -> None:
        pass

    def __call__(self, function: Callable[[], Tensor]) -> Any:
        adds = {p for p in self._parameters if p.grad is not None}
        with restored_state():
            loss = function()
        places = {p: p.grad for p in self._parameters}
        assert all(place is None or p in adds or place.shape == p.shape for p, place in places.items())

        def replay() -> None:
            for parameter in self._parameters:
                if parameter not in adds:
                    parameter.grad = None
            loss.copy_(function())
            for parameter, place in places.items():
                if place is not None and parameter not in adds:
                    place.copy_(parameter.grad)
                    parameter.grad = place

        return replay, loss


@contextmanager
def restored_state() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_graph_that_overwrites_gradients_leaves_the_sum_of_the_update(micro_batches: int) -> None:
    torch.manual_seed(0)
    model, told = Tiny(0.0), []
    other = copy.deepcopy(model)
    eager, step = runner(other), graphed(model, told, Capturing(model))
    step.overwrites = True
    for update in range(4):
        for index in range(micro_batches):
            inputs = batch(6 if index < 2 else 3, 10 * update + index)
            assert torch.allclose(step.step(inputs, 0.5), eager(inputs, 0.5))
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7)
        for parameter in [*model.parameters(), *other.parameters()]:
            if update == 1 and parameter.grad is not None:
                parameter.grad.zero_()  # a user may keep the tensors
            else:
                parameter.grad = None
    graphs = list(step._graphs.values())
    assert told == [] and [graph.overwrites for graph in graphs] == [True, False][: len(graphs)]
    assert len({id(place) for graph in graphs for _, place in graph.gradients}) == 6, "one tensor for each parameter"


def test_a_capture_is_divided_into_graphs_that_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Part:
        def capture_begin(self, **options: Any) -> None:
            done.append("begin")

        def capture_end(self) -> None:
            done.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Part)
    recorder = CudaRecorder.__new__(CudaRecorder)
    recorder.divide()
    assert done == [], "nothing is being captured"
    recorder._pool, recorder._parts = None, []
    recorder._begin_part()
    recorder.divide()
    assert done == ["begin", "end", "begin"] and len(recorder._parts) == 2
    assert CudaRecorder._parts == []


def test_the_loss_returned_is_not_overwritten_by_the_next() -> None:
    step = graphed(Tiny(), [])
    first = step.step(batch(6, 0))
    kept = first.clone()
    step.step(batch(6, 1))
    assert torch.equal(first, kept)


def test_gradients_of_an_eager_micro_batch_are_added_to() -> None:
    model = Tiny(0.0)
    other, step = copy.deepcopy(model), graphed(model, [], most_shapes=1)
    eager = runner(other)
    for number, size in enumerate((6, 5, 6)):  # the second shape is one too many and runs without a graph
        step.step(batch(size, number)), eager(batch(size, number), 1.0)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7)


def test_more_shapes_than_allowed_run_without_and_that_is_told_once() -> None:
    told: list[str] = []
    step = graphed(Tiny(), told, most_shapes=3)
    for size in range(2, 9):
        step.step(batch(size, size))
    assert len(step._graphs) == 3 and len(set(told)) == 1 and "3 shapes" in told[0]


def _ignores_new_inputs(function: Callable[[], Tensor]) -> Any:
    replay, loss = replaying(function)
    state: list[Any] = []

    def once() -> None:
        if not state:
            replay()
            state.append(loss.clone())
        loss.copy_(state[0])

    return once, loss


def _repeats_its_random_numbers(function: Callable[[], Tensor]) -> Any:
    replay, loss = replaying(function)
    frozen = torch.Generator().manual_seed(123).get_state()

    def again() -> None:
        torch.set_rng_state(frozen)
        replay()

    return again, loss


def _forgets_the_backward(function: Callable[[], Tensor]) -> Any:
    loss = torch.zeros(())

    def forward_only() -> None:
        inputs = dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__), strict=True))
        with torch.no_grad():
            loss.copy_(inputs["self"]._model(**inputs["static"]))

    return forward_only, loss


@pytest.mark.parametrize("recorder", [_ignores_new_inputs, _repeats_its_random_numbers, _forgets_the_backward])
def test_a_recording_that_computes_something_else_is_found_and_not_used(recorder: Any) -> None:
    torch.manual_seed(0)
    model, told = Tiny(), []
    other, step = copy.deepcopy(model), graphed(model, told, recorder)
    eager = runner(other)
    for number in range(3):
        state = torch.get_rng_state()
        mine = step.step(batch(6, number))
        torch.set_rng_state(state)
        assert number == 0 or torch.allclose(mine, eager(batch(6, number), 1.0))
        for parameter in [*model.parameters(), *other.parameters()]:
            parameter.grad = None
        other.load_state_dict(model.state_dict())
    assert len(told) == 1 and "differs from the eager run" in told[0] and not step._graphs


class DrawsOnTheHost(Tiny):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scale = random.random() if self.training else 1.0
        return super().forward(x, labels) * scale * np.random.rand()


def test_a_model_that_draws_on_the_host_is_refused_and_trains_eagerly() -> None:
    told: list[str] = []
    step = graphed(DrawsOnTheHost(), told)
    before = random.getstate(), np.random.get_state()[2]
    assert step.step(batch(6, 0)).isfinite() and step.step(batch(5, 0)).isfinite()
    assert len(told) == 1 and "draws random numbers on the host" in told[0]
    assert (random.getstate(), np.random.get_state()[2]) != before  # the two eager steps did draw


def test_a_recorder_that_fails_leaves_no_trace_and_training_goes_on() -> None:
    def fails(function: Any) -> Any:
        function()
        raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors ...")

    torch.manual_seed(0)
    model, told = Tiny(), []
    other, step = copy.deepcopy(model), graphed(model, told, fails)
    state = torch.get_rng_state()
    mine = step.step(batch(6, 0))
    torch.set_rng_state(state)
    assert torch.equal(mine, runner(other)(batch(6, 0), 1.0))
    for a, b in zip([*model.parameters(), *model.buffers()], [*other.parameters(), *other.buffers()], strict=True):
        assert torch.equal(a, b) and (a.grad is None or torch.equal(a.grad, b.grad))
    assert told == ["no CUDA graph: operation not permitted when stream is capturing"]


def test_an_error_of_the_model_is_raised_by_the_eager_run() -> None:
    step = graphed(Tiny(), [])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step.step({"x": torch.ones(2, 5), "labels": torch.ones(2)})


def test_parameters_that_moved_are_recorded_again() -> None:
    model = Tiny(0.0)
    step = graphed(model, [])
    step.step(batch(6, 0))
    (old,) = step._graphs.values()
    model.first.weight.data = model.first.weight.data.clone()
    step.step(batch(6, 1))
    assert old not in step._graphs.values()
    model.first.weight.requires_grad_(False)
    model.zero_grad()
    step.step(batch(6, 1))
    assert model.first.weight.grad is None


def test_whatever_was_there_before_is_there_after() -> None:
    model = Tiny()
    runner(model)(batch(6, 0), 1.0)
    gradients = [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in gradients]
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    streams = host_streams(torch.device("cuda"))
    with restored(model, list(model.parameters())):
        runner(model)(batch(6, 1), 1.0)
        model.first.weight.grad = None
        random.random(), np.random.rand(), torch.rand(1)
        assert host_streams(torch.device("cuda")) != streams
    assert host_streams(torch.device("cuda")) == streams
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    for parameter, gradient, value in zip(model.parameters(), gradients, values, strict=True):
        assert parameter.grad is gradient and (value is None or torch.equal(gradient, value))


def test_keys_tell_shapes_and_constants_apart() -> None:
    one = {"x": torch.ones(2, 3), "n": 4, "nothing": None}
    assert shape_key(one) == shape_key({**one, "x": torch.zeros(2, 3)})
    for other in ({**one, "x": torch.ones(3, 2)}, {**one, "n": 5}, {**one, "x": torch.ones(2, 3).long()}):
        assert shape_key(one) != shape_key(other)
    assert shape_key({**one, "deep": {"x": torch.ones(1)}}) is None


def test_nested_batches_run_eagerly() -> None:
    model = nn.Linear(2, 1)
    step = GraphedStep(
        lambda inputs, weight: model(inputs["deep"][0]).sum().detach(), model, tell=print, recorder=replaying
    )
    assert step.step({"deep": [torch.ones(1, 2)]}).isfinite() and not step._graphs


def test_what_cannot_be_a_graph_is_seen_by_looking() -> None:
    told: list[str] = []
    assert "cpu has none" in str(cannot_capture(Tiny(), CPU))
    step = GraphedStep(runner(model := Tiny()), model, tell=told.append)
    assert step.step(batch(4, 0)).isfinite() and told == ["no CUDA graph: cpu has none"]
    with torch.device("meta"):
        whole, hooked, checkpointed, watched = Tiny(), Tiny(), Tiny(), Tiny()
    hooked.first.register_forward_hook(lambda *_: None)
    checkpointed.second.gradient_checkpointing = True
    watched.first.weight.register_hook(lambda g: g)
    for model, words in ((hooked, "first has hooks"), (checkpointed, "checkpointed"), (watched, "first.weight has")):
        assert words in str(_seen(model))
    assert _seen(whole) is None


def _seen(model: nn.Module) -> str | None:
    """The answer for a model as if its device were a GPU."""

    class Gpu:
        type = "cuda"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return hash(torch.device("meta"))

    return cannot_capture(model, Gpu())  # type: ignore[arg-type]


def test_differences_are_relative_and_what_is_not_finite_counts() -> None:
    a = [torch.tensor([3.0, 4.0])]
    assert relative_difference(a, a) == 0 and relative_difference([], []) == 0
    assert relative_difference([torch.tensor([3.0, 4.5])], a) == pytest.approx(0.1)
    assert relative_difference([torch.tensor([3.0, float("nan")])], a) == float("inf")
    both = [torch.tensor([3.0, float("nan")])]
    assert relative_difference(both, both) == 0


def test_weights_and_inputs_go_where_the_graph_reads_them() -> None:
    graph = Graph({"x": torch.zeros(2), "n": 3}, torch.ones(()), torch.zeros(()), lambda: None, [])
    graph.load({"x": torch.tensor([1.0, 2.0]), "n": 3}, 0.25)
    assert graph.inputs["x"].tolist() == [1, 2] and graph.weight.item() == 0.25
    graph.load({"x": torch.tensor([1.0, 2.0]), "n": 3}, torch.tensor(2))
    assert graph.weight.item() == 2
    graph.load({"x": torch.tensor([1.0, 2.0]), "n": 3}, 0.25)
    assert graph.weight.item() == 0.25
    version = graph.weight._version
    graph.load({"x": torch.tensor([1.0, 2.0]), "n": 3}, 0.25)
    assert graph.weight._version == version, "the same number is not written again"
