"""Comparisons take about as much memory as an update as written: at most one more set of gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import loopwright.pt.restoring.kept_weights as kept_weights
import loopwright.speed.planner.cost as cost
import loopwright.speed.planner.regions as regions
import loopwright.speed.proof.distance as distance
from loopwright import Trainer, TrainerCallback, TrainingArguments
from loopwright.pt.acceleration import Acceleration
from loopwright.pt.loss.probe import LossProbe
from loopwright.pt.restoring.kept_weights import KeptWeights
from loopwright.speed.cuda_graphs.recorder import GraphedStep
from loopwright.speed.fused_loss.cross_entropy import ALIGNED
from loopwright.speed.output_layer import PaddedHead, output_head
from loopwright.speed.planner.decision import SpeedPlan
from loopwright.speed.planner.heads import HeadChoice
from loopwright.speed.proof.audit import Verification
from loopwright.speed.proof.distance import SINGLE, squared_norms
from loopwright.speed.proof.gradients import GradientSum, share_equal
from loopwright.speed.proof.prober import Candidate, Prober, Setting
from loopwright.speed.proof.prover import Prover
from loopwright.speed.proof.region import RegionProver
from loopwright.speed.training_setup import TrainingSetup
from loopwright.speed.widening import WidenedUse
from tests.speed.live_bytes import LiveBytes
from tests.speed.test_graphing import Recorder

SMALL = 1 << 16
"""Bytes of what is neither activations nor gradients: losses, batches, numbers compared at a time."""


@pytest.fixture(autouse=True)
def _in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are as small beside these models as they usually are."""
    monkeypatch.setattr(distance, "PIECE", 512)


class Layers(nn.Module):
    """A stack of layers whose activations, or whose weights, take most of the memory."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


CASES = {"activations": (16, 8, 2048), "parameters": (256, 8, 2)}
"""By what takes most of the memory: the width and depth of the layers, and the rows of a micro-batch."""


def made(case: str, micro_batches: int) -> tuple[Layers, list[Tensor]]:
    width, depth, rows = CASES[case]
    draws = torch.Generator().manual_seed(1)
    return Layers(width, depth), [torch.randn(rows, width, generator=draws) for _ in range(micro_batches)]


def bytes_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def as_written(model: nn.Module, batches: list[Tensor]) -> int:
    """The most bytes of an update, besides the weights."""
    with LiveBytes([*model.parameters(), *batches]) as live:
        for batch in batches:
            (model(batch) / len(batches)).backward()
    for parameter in model.parameters():
        parameter.grad = None
    return live.added


def prober_of(model: nn.Module) -> Prober:
    def loss_of(batches: list[Any], prepare: Any, backward: Any = None) -> Tensor:
        total: Any = 0.0
        for batch in batches:
            loss = model(prepare(batch)) / len(batches)
            if backward is not None:
                backward(loss)
            total = total + loss.detach()
        return torch.as_tensor(total)

    return Prober(model, loss_of, sandbox=nullcontext)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_reference_takes_the_memory_of_an_update(case: str, micro_batches: int) -> None:
    model, batches = made(case, micro_batches)
    written = as_written(model, batches)
    with LiveBytes([*model.parameters(), *batches]) as live:
        prober_of(model).reference(None, list(batches), Setting(SINGLE, train=True), repeats=False)
    assert live.added <= written + SMALL + bytes_of(model.layers[0])  # training adds to a gradient in place


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_candidate_takes_one_set_of_gradients_more(case: str, micro_batches: int) -> None:
    model, batches = made(case, micro_batches)
    written, prober = as_written(model, batches), prober_of(model)
    candidate = Candidate.on_batches("same")
    with LiveBytes([*model.parameters(), *batches]) as live:
        reference = prober.reference(None, list(batches), Setting(SINGLE, train=True), repeats=False)
        proof = prober.prove(candidate, reference, divided=False)
    assert proof.accepted, proof.reason
    assert live.added <= written + bytes_of(model) + SMALL + bytes_of(model.layers[0])


@pytest.mark.parametrize("message", ["CUDA error: out of memory", "DefaultCPUAllocator: can't allocate memory"])
def test_a_comparison_that_runs_out_of_memory_is_not_taken_for_a_difference(message: str) -> None:
    model, batches = made("activations", 1)

    @contextmanager
    def too_large() -> Iterator[None]:
        raise RuntimeError(message)
        yield

    prober = prober_of(model)
    reference = prober.reference(None, list(batches), Setting(SINGLE, train=True), repeats=False)
    assert prober.prove(Candidate.on_batches("too large", too_large), reference, divided=False).ran_out


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_check_of_a_replay_takes_one_set_of_gradients_more(case: str, micro_batches: int) -> None:
    model, batches = made(case, micro_batches)
    written, largest = as_written(model, batches), []

    def run(inputs: dict[str, Any], weight: Any) -> Tensor:
        loss = model(inputs["x"]) * weight
        loss.backward()
        return loss.detach()

    def recorder(function: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        loss = torch.zeros(())
        return lambda: loss.copy_(function()), loss

    told: list[str] = []
    step = GraphedStep(run, model, tell=told.append, recorder=recorder)
    for batch in batches:
        inputs, graph = {"x": batch}, step._graph_for({"x": batch})
        assert graph is not None
        static = [*graph.inputs.values(), *(place for _, place in graph.gradients)]
        with LiveBytes([*model.parameters(), batch, *static]) as live:
            assert step._checked(graph, inputs, 1.0) is not None, told
        largest.append(live.added)
        step.step(inputs, 1.0)
    # A replay on a CPU has activations, unlike that of a graph. What was accumulated before it is copied.
    assert largest[0] <= written + bytes_of(model) + SMALL
    assert largest[-1] <= written + 2 * bytes_of(model) + SMALL


def test_gradients_are_added_while_the_backward_pass_runs() -> None:
    model, batches = made("parameters", 1)
    gradients = GradientSum(list(model.parameters()))
    gradients.add(model(batches[0]))
    loss = model(batches[0])
    with LiveBytes([*model.parameters(), *gradients.values]) as live:
        gradients.add(loss)
    assert live.added <= 3 * bytes_of(model.layers[0])
    model(batches[0]).backward()
    for parameter, value in zip(model.parameters(), gradients.values, strict=True):
        assert value is not None and parameter.grad is not None
        torch.testing.assert_close(value, 2 * parameter.grad, rtol=0.0, atol=0.0)


def test_adding_gradients_leaves_no_hook_and_calls_those_of_training_only_once() -> None:
    model, batches = made("parameters", 1)
    first, second = model.layers[0].weight, model.layers[1].weight
    first.register_hook(lambda gradient: 2 * gradient)
    called: list[Any] = []
    second.register_post_accumulate_grad_hook(called.append)
    expected = torch.autograd.grad(model(batches[0]), list(model.parameters()))
    gradients = GradientSum(list(model.parameters()))
    gradients.add(model(batches[0]))
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients.values, strict=True) if b is not None)
    assert len(first._backward_hooks) == 1 and second._backward_hooks is None and not called


class Inside(torch.autograd.Function):
    """A matrix product whose backward pass runs another one, with the parameter itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(x @ weight, [x, weight], 3 * gradient)


def test_gradients_of_unusual_functions_and_parameters_are_added_too() -> None:
    torch.manual_seed(0)
    table, weight = nn.Embedding(5, 3, sparse=True), nn.Parameter(torch.randn(3, 4))
    parameters = [table.weight, weight, nn.Parameter(torch.ones(2))]

    def loss() -> Tensor:
        return Inside.apply(table(torch.tensor([0, 1, 1])), weight).square().sum()  # type: ignore[no-untyped-call]

    expected = torch.autograd.grad(loss(), parameters, allow_unused=True)
    gradients = GradientSum(parameters)
    for _ in range(2):
        gradients.add(loss())
    gradients.scale(0.5)
    assert gradients.values[2] is None
    for a, b in zip(expected[:2], gradients.values[:2], strict=True):
        torch.testing.assert_close(a.to_dense(), b.to_dense())  # type: ignore[union-attr]


def test_norms_in_pieces_are_those_of_whole_gradients() -> None:
    torch.manual_seed(0)
    shapes = [(40, 50), (), (3,), (2, 3000), (0, 4)]
    a, b = ([torch.randn(shape) for shape in shapes] for _ in range(2))
    a[0], b[0] = a[0].t(), b[0].t()
    for (apart, size), x, y in zip(squared_norms(a, b), a, b, strict=True):
        assert apart == pytest.approx(float((x.double() - y.double()).square().sum()), rel=1e-12)
        assert size == pytest.approx(float(x.double().square().sum()), rel=1e-12)
    (alone,) = squared_norms([None], [a[0]])
    assert alone == (pytest.approx(float(a[0].double().square().sum())), 0.0)


def test_norms_of_tiny_sparse_complex_and_missing_gradients() -> None:
    tiny, other = torch.full((700, 2), 1e-30), torch.full((700, 2), 2e-30)
    ((apart, size),) = squared_norms([tiny], [other])
    assert apart == pytest.approx(1400e-60) and size == pytest.approx(1400e-60), "squares are beyond single precision"
    table = torch.eye(3).to_sparse()
    assert squared_norms([table], [table * 3]) == [(pytest.approx(12.0), pytest.approx(3.0))]
    assert squared_norms([torch.tensor([3 + 4j])], [None]) == [(pytest.approx(25.0), pytest.approx(25.0))]
    assert squared_norms([None, tiny], [None, tiny])[0] == (0.0, 0.0) and squared_norms([], []) == []
    kept = torch.ones(3, dtype=torch.float64)
    squared_norms([kept], [kept * 2])
    assert kept.tolist() == [1.0, 1.0, 1.0]


def test_norms_take_a_few_operations_per_piece() -> None:
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    a, b = ([torch.randn(512) for _ in range(100)] for _ in range(2))
    with Count() as count:
        squared_norms(a, b)
    assert count.calls <= 8 * 100


def test_equal_gradients_are_kept_once() -> None:
    known = [torch.ones(3), torch.ones(2), None, torch.ones(1)]
    values: list[Tensor | None] = [torch.ones(3), torch.zeros(2), None, None]
    share_equal(values, known)
    assert values[0] is known[0] and values[1] is not known[1] and values[2:] == [None, None]


# ---- in training ----------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """Bytes of tensors before a call, and by how many it raised them."""

    before: int
    added: int


@contextmanager
def watched(kind: type, name: str, live: LiveBytes, found: list[Call]) -> Iterator[None]:
    """Append the memory of each call of a method to `found`."""
    method = getattr(kind, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        gc.collect()  # watching can keep tensors alive that are freed at once otherwise
        before, start = live.peak, live.now
        live.peak = start
        try:
            return method(*args, **kwargs)
        finally:
            found.append(Call(start, live.peak - start))
            live.peak = max(before, live.peak)

    setattr(kind, name, call)
    try:
        yield
    finally:
        setattr(kind, name, method)


def run(model: nn.Module, data: Any, folder: Any, kind: type, name: str, **options: Any) -> list[Call]:
    """Train, and return the memory of each call of a method."""
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 16, "max_steps": 4, "report_to": "none", "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, **options,
    }  # fmt: skip
    live = LiveBytes(model.parameters())
    found: list[Call] = []
    with live, watched(kind, name, live, found):
        Trainer(model, TrainingArguments(str(folder), **arguments), train_dataset=data).train()
    assert found
    return found


def most(calls: list[Call]) -> int:
    return max(call.added for call in calls)


class Convolutions(nn.Module):
    """Convolutions of images, whose activations are large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Conv2d(3 if not i else 16, 16, 3, padding=1) for i in range(4))
        self.last = nn.Linear(16, 5)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = pixel_values
        for layer in self.layers:
            x = torch.relu(layer(x))
        logits = self.last(x.mean((2, 3)))
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


def images(count: int = 128) -> list[dict[str, Tensor]]:
    made = torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(2))
    return [{"pixel_values": image, "labels": torch.tensor(i % 5)} for i, image in enumerate(made)]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("bf16", [False, True])
def test_inferring_the_loss_takes_no_more_than_training(
    bf16: bool, accumulation: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"bf16": bf16, "gradient_accumulation_steps": accumulation}
    written = run(Convolutions(), images(), tmp_path / "off", Trainer, "training_step", speed="off", **options)
    monkeypatch.setattr(regions, "COMPILING_DEVICES", ("cpu",))
    monkeypatch.setattr(cost, "MARGIN", 0.0)
    monkeypatch.setattr(Acceleration, "region_backend", "aot_eager")
    found = run(Convolutions(), images(), tmp_path / "max", LossProbe, "measure", speed="max", **options)
    assert most(found) <= most(written)


def test_the_whole_update_is_compared_without_the_gradients_of_a_few_samples(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")

    def gpt2() -> Any:
        torch.manual_seed(3)
        config = transformers.GPT2Config(
            vocab_size=2000, n_embd=64, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config)

    ids = torch.randint(0, 2000, (128, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids]
    written = run(gpt2(), data, tmp_path / "off", Trainer, "training_step", speed="off")
    found = run(gpt2(), data, tmp_path / "max", Prover, "update", speed="max")
    weights = bytes_of(gpt2())
    assert found[0].before < 1.5 * weights
    # The gradients of the reference; and the sandbox of so small a model has a copy of its weights.
    assert most(found) <= most(written) + 2 * weights + SMALL


# ---- later in training ----------------------------------------------------------------------------------------------


@pytest.fixture
def _compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of compiled blocks, on a CPU, of a model that is too large for copies of its weights."""
    torch._dynamo.reset()
    monkeypatch.setattr(regions, "COMPILING_DEVICES", ("cpu",))
    monkeypatch.setattr(cost, "MARGIN", 0.0)
    monkeypatch.setattr(Acceleration, "region_backend", "aot_eager")
    monkeypatch.setattr(Acceleration, "graph_recorder", Recorder())
    monkeypatch.setattr(kept_weights, "ON_HOST", 0)


def highest(calls: list[Call]) -> int:
    return max(call.before + call.added for call in calls)


class Blocks(nn.Module):
    """Equal blocks, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(2, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": (x.mean((1, 2)) - labels).square().mean()}


@pytest.mark.usefixtures("_compiled_graphs")
def test_a_later_comparison_takes_one_set_of_gradients_more(tmp_path: Any) -> None:
    """Not also those in the memory of graphs, which are recorded again afterwards."""
    data = [{"x": torch.randn(32, 2), "labels": torch.zeros(())} for _ in range(128)]
    written = run(Blocks(), data, tmp_path / "off", Trainer, "training_step", speed="off")
    found = run(Blocks(), data, tmp_path / "max", RegionProver, "prove", speed="max", max_steps=8)
    assert len(found) == 2, "for the plan, and in the eighth update"
    assert highest(found) <= highest(written) + bytes_of(Blocks()) + SMALL // 2


@contextmanager
def recomputing(setup: TrainingSetup) -> Iterator[None]:
    """As on GPUs."""
    undo = setup.recompute("full")
    try:
        yield
    finally:
        undo()


@pytest.mark.usefixtures("_compiled_graphs")
def test_an_update_as_written_is_compared_with_recomputed_activations(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(TrainingSetup, "sparing", recomputing)

    def vit() -> Any:
        torch.manual_seed(5)
        config = transformers.ViTConfig(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, image_size=24,
            patch_size=6, num_labels=5, hidden_dropout_prob=0.1,
        )  # fmt: skip
        return transformers.ViTForImageClassification(config)

    written = run(vit(), images(), tmp_path / "off", Trainer, "training_step", speed="off")
    model = vit()
    found = run(model, images(), tmp_path / "max", Prober, "reference", speed="max", max_steps=2)
    assert most(found) < 0.7 * most(written)
    assert not model.is_gradient_checkpointing


@pytest.mark.usefixtures("_compiled_graphs")
def test_running_statistics_are_not_updated_twice(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Normed(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(32)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return super().forward(torch.utils.checkpoint.checkpoint(self.norm, x, use_reentrant=False), labels)

    called: list[Any] = []
    monkeypatch.setattr(TrainingSetup, "sparing", lambda setup: called.append(setup) or nullcontext())
    data = [{"x": torch.randn(32, 2), "labels": torch.zeros(())} for _ in range(32)]
    run(Normed(), data, tmp_path, RegionProver, "prove", speed="max", max_steps=1)
    assert not called


@pytest.mark.usefixtures("_compiled_graphs")
def test_weights_are_kept_on_the_host_while_compiled_code_is_compared(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[bool] = []
    make, run_once = KeptWeights.__init__, Prober._run

    def noted(self: Any, modules: Any, *, on_host: bool = False) -> None:
        places.append(on_host)
        make(self, modules, on_host=on_host)

    def with_places(self: Any, *given: Any) -> Any:
        places.clear()
        try:
            return run_once(self, *given)
        finally:
            found.append(set(places))

    found: list[set[bool]] = []
    monkeypatch.setattr(KeptWeights, "__init__", noted)
    monkeypatch.setattr(Prober, "_run", with_places)
    data = [{"x": torch.randn(32, 2), "labels": torch.zeros(())} for _ in range(32)]
    run(Blocks(), data, tmp_path, RegionProver, "prove", speed="max", max_steps=1)
    assert found == [{True}, {True}], "as written and compiled"


def whisper() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.WhisperConfig(
        vocab_size=30, num_mel_bins=4, d_model=16, encoder_layers=3, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=60,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def padded_targets(setup: TrainingSetup, batches: list[Any]) -> Any:
    return WidenedUse(setup).prove(batches)


def padded_classes(setup: TrainingSetup, batches: list[Any]) -> Any:
    head = output_head(setup.model)
    assert head is not None
    return HeadChoice(setup)._proved(SpeedPlan(), PaddedHead(head), batches)


def later_padded_classes(setup: TrainingSetup, batches: list[Any]) -> Any:
    head = output_head(setup.model)
    assert head is not None
    verification = Verification(setup, SpeedPlan(), None, PaddedHead(head), tell=print)
    return verification.prove(batches, None, None, covers=False)


@pytest.mark.parametrize("compare", [padded_targets, padded_classes, later_padded_classes])
def test_accelerations_of_whole_updates_are_compared_with_recomputed_activations(
    compare: Callable[[TrainingSetup, list[Any]], Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALIGNED, "cpu", 8)
    added: list[int] = []

    class Comparing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            setup = trainer._loopwright.acceleration.training_setup()
            trainer._loopwright.loss.learn_loss([batch])
            for sparing in (lambda setup: nullcontext(), recomputing):
                monkeypatch.setattr(TrainingSetup, "sparing", sparing)
                gc.collect()
                with LiveBytes([*model.parameters(), *batch.values()]) as live:
                    assert compare(setup, [batch]).accepted
                added.append(live.added)

    rows = [{"input_features": torch.randn(4, 120), "labels": torch.randint(2, 30, (9,))} for _ in range(8)]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, max_steps=1, report_to="none", save_strategy="no", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(whisper(), arguments, train_dataset=rows, callbacks=[Comparing()])
    trainer.train()
    as_written, spared = added
    assert spared < 0.7 * as_written
    assert not trainer.model.is_gradient_checkpointing
