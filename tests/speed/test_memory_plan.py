"""Selective checkpointing changes no bit; the planner's measure is the model's own and its choice repeats."""

from __future__ import annotations

import copy
import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import loopwright
from loopwright.speed.compile.blocks import repeated_blocks
from loopwright.speed.memory.estimate import (
    POLICIES,
    ActivationBytes,
    MemoryEstimate,
    estimate_memory,
    measure_activations,
    measure_twice,
    model_bytes,
    tokens_that_fit,
    usable_bytes,
)
from loopwright.speed.memory.recompute import checkpoint_selectively, is_kept, is_recomputing, keep_matmuls
from tests import models
from tests.models import Tokens, made, samples, trainer_of

WIDTH, HEADS = 8, 2


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.dropout = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, WIDTH)
        x = x + self.dropout(self.out(attended)) * scale
        return x + self.dropout(self.down(F.silu(self.up(x)) * 2))


class Model(nn.Module):
    def __init__(self, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def ids(rows: int = 2, length: int = 6) -> Tensor:
    return torch.arange(rows * length).reshape(rows, length) % 11


def gradients(model: nn.Module, steps: int = 1) -> list[Tensor]:
    torch.manual_seed(7)
    for _ in range(steps):
        model(ids()).backward()
    return [parameter.grad for parameter in model.parameters()]


# ---- recomputing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_selective_checkpointing_changes_no_bit(dropout: float) -> None:
    plain = Model(dropout=dropout)
    saving = copy.deepcopy(plain)
    checkpoint_selectively(repeated_blocks(saving))
    for mine, theirs in zip(gradients(saving, 2), gradients(plain, 2), strict=True):
        assert torch.equal(mine, theirs)


def test_matmuls_and_attention_are_not_computed_again() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: dict[str, int] = {}

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = function.overloadpacket.__name__
            self.calls[name] = self.calls.get(name, 0) + 1
            return function(*args, **(kwargs or {}))

    def calls(model: nn.Module) -> dict[str, int]:
        with Count() as count:
            model(ids()).backward()
        return count.calls

    model = Model()
    plain = calls(model)
    checkpoint_selectively(repeated_blocks(model))
    selective = calls(model)
    assert selective["silu"] == 2 * plain["silu"] and selective["native_layer_norm"] == 2 * plain["native_layer_norm"]
    kept = {name for name in plain if is_kept(getattr(torch.ops.aten, name))}
    assert {"addmm", "mm"} <= kept and any("attention" in name for name in kept)
    assert {name: selective[name] for name in kept} == {name: plain[name] for name in kept}


def test_names_copies_and_evaluation_are_as_before() -> None:
    model = Model()
    keys = list(model.state_dict())
    recomputing = checkpoint_selectively(repeated_blocks(model))
    assert recomputing.blocks == list(model.layers)
    assert checkpoint_selectively(repeated_blocks(model)).blocks == []
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = twin(ids())
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(twin(ids()), before)  # the copy calls its own blocks
        assert not torch.equal(model(ids()), before)
    assert list(model.state_dict()) == list(twin.state_dict()) == keys
    recomputing.remove()
    assert not any(is_recomputing(block) or "forward" in block.__dict__ for block in model.layers)


def test_a_forward_of_the_users_own_is_wrapped_and_put_back() -> None:
    block = Block()
    own = block.forward
    block.forward = lambda x: own(x) * 3  # type: ignore[method-assign]
    mine = block.forward
    x = torch.ones(1, 2, WIDTH)
    expected = block(x)
    recomputing = checkpoint_selectively([block])
    assert torch.equal(block(x), expected)
    recomputing.remove()
    assert block.forward is mine


def test_compiled_blocks_recompute_too() -> None:
    from loopwright.notices import Notices
    from loopwright.speed.compile.blocks import compile_blocks

    torch._dynamo.reset()
    model = Model(layers=2)
    expected = [each.clone() for each in gradients(model)]
    model.zero_grad()
    checkpoint_selectively(repeated_blocks(model))
    session = compile_blocks(model, backend="aot_eager", dynamic=True, notices=Notices(strict=True))
    found = gradients(model)
    session.finish()
    torch._dynamo.reset()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert session.counter.compilations == 1


def test_the_arguments_ask_for_it(tmp_path: Any) -> None:
    brief = {"per_device_train_batch_size": 2, "num_train_epochs": 1}
    data = samples((5, 8, 3, 9))
    plain = trainer_of(models.llama(), data, tmp_path / "a", **brief)
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"policy": "selective"}, **brief}
    saving = trainer_of(models.llama(), data, tmp_path / "b", **options)
    plain.train(), saving.train()
    assert not saving.model.is_gradient_checkpointing
    assert all(is_recomputing(block) for block in repeated_blocks(saving.model))
    for mine, theirs in zip(saving.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "selectiv"}, "must be one of full, selective"),
        ({"policy": "selective", "use_reentrant": True}, "accepts no option besides"),
        ({"policy": "selective"}, "has no list of blocks of one class"),
    ],
)
def test_what_cannot_be_is_refused(options: Any, message: str, tmp_path: Any) -> None:
    trainer = trainer_of(made(Tokens), samples((3, 3)), tmp_path, gradient_checkpointing=True,
                         gradient_checkpointing_kwargs=options, num_train_epochs=1)  # fmt: skip
    with pytest.raises(loopwright.ModelError, match=message):
        trainer.train()


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure(model: nn.Module, rows: int = 2, length: int = 6) -> ActivationBytes:
    def forward() -> int:
        model(ids(rows, length))
        return rows * length

    return measure_activations(forward, model=model, blocks=repeated_blocks(model))


def test_what_is_measured_is_what_autograd_keeps() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().sum()

    model, rows = Twice(), 5
    kept = measure_activations(
        lambda: (model(torch.ones(rows, 4)), rows)[1], model=model, blocks=repeated_blocks(model)
    )
    floats = 4 * rows
    # Each block: its input and the result of tanh. Outside: the input of the square.
    assert kept == ActivationBytes(
        tokens=rows, outside=4 * floats, blocks=2 * (4 + 16) * floats, matmuls=2 * (16 + 4) * floats,
        inputs=2 * 4 * floats, largest_block=(4 + 16) * floats,
    )  # fmt: skip


def test_measuring_leaves_no_trace_and_grows_with_the_tokens() -> None:
    model = Model()
    one, two = measure(model, rows=2), measure(model, rows=4)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.layers)
    assert (two.blocks, two.matmuls, two.inputs) == (2 * one.blocks, 2 * one.matmuls, 2 * one.inputs)
    assert one.inputs < one.matmuls < one.blocks


def test_nothing_of_what_was_measured_stays_alive() -> None:
    """What a graph keeps of itself is never let go: memory lost, and nodes that belong to no stream of a recording."""
    model = Model()
    kept: list[Any] = []

    def forward(rows: int) -> int:
        loss = model(torch.zeros(rows, 5, dtype=torch.long)).sum()
        kept.extend(weakref.ref(each) for each in (loss, model.head(model.embed(torch.zeros(1, dtype=torch.long)))))
        for parameter in model.parameters():
            parameter.view_as(parameter).grad_fn.next_functions[0][0].metadata["measured"] = True
        return rows * 5

    measure_twice(forward, sizes=(1, 2), model=model, blocks=repeated_blocks(model))
    assert kept and not any(each() is not None for each in kept)
    fresh = [parameter.view_as(parameter).grad_fn.next_functions[0][0] for parameter in model.parameters()]
    assert not any(node.metadata for node in fresh)


def test_copies_of_weights_are_not_taken_for_activations() -> None:
    """Autocast keeps a half-precision copy of each weight: it is there once, however many tokens there are."""
    model = Model()

    def forward(rows: int) -> int:
        with torch.autocast("cpu", torch.bfloat16):
            model(ids(rows))
        return rows * 6

    small, large = measure_twice(forward, sizes=(2, 4), model=model, blocks=repeated_blocks(model))
    estimate = estimate_memory(small, large, model=0)
    copies = sum(2 * each.weight.numel() for each in model.modules() if isinstance(each, nn.Linear))
    assert copies <= estimate.fixed <= 2.5 * copies
    third = measure_twice(forward, sizes=(8, 16), model=model, blocks=repeated_blocks(model))[1]
    assert estimate.at(96) == pytest.approx(3 * third.outside + third.blocks, rel=0.02)


def test_what_is_passed_in_is_entered_around_the_measure() -> None:
    model, seen = Model(), []

    @contextmanager
    def sandbox() -> Any:
        seen.append("in")
        yield
        seen.append("out")

    measure_twice(lambda rows: seen.append(rows) or rows, sizes=(1, 2), model=model, blocks=[], sandbox=sandbox)
    assert seen == ["in", 1, 2, "out"]


def test_what_selective_checkpointing_keeps_is_what_was_measured() -> None:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    model = Model(layers=2)
    x = torch.ones(2, 6, WIDTH, requires_grad=True)
    caching, _ = create_selective_checkpoint_contexts(keep_matmuls)
    with caching:
        model.layers[0](x)
    outputs = torch.utils._pytree.tree_leaves([list(each.values()) for each in caching.storage.values()])
    leaves = [getattr(each, "val", each) for each in outputs]
    stored = sum(each.numel() * each.element_size() for each in leaves if isinstance(each, Tensor))
    assert 2 * stored == measure(model).matmuls


def test_weights_gradients_and_states_are_counted() -> None:
    frozen, free = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    frozen.weight.requires_grad_(False)
    weights = [frozen.weight, free.weight]
    assert model_bytes(weights) == 64 + 64 * 4
    assert model_bytes(weights, states=0) == 64 + 64 * 2
    assert model_bytes([free.weight.bfloat16().detach()]) == 32


# ---- deciding -------------------------------------------------------------------------------------------------------

@given(
    fixed=st.integers(0, 10**11),
    usable=st.integers(0, 2 * 10**11),
    per_token=st.floats(1, 10**7),
    policy=st.sampled_from(POLICIES),
)
def test_the_largest_power_of_two_that_fits(fixed: int, usable: int, per_token: float, policy: str) -> None:
    estimate = MemoryEstimate(fixed, dict.fromkeys(POLICIES, per_token))
    tokens = tokens_that_fit(estimate, usable, policy)
    assert tokens & (tokens - 1) == 0
    if tokens:
        assert estimate.at(tokens, policy) <= usable < fixed + (2 * tokens + 1) * per_token
    else:
        assert usable < fixed + per_token + 1


def test_a_part_of_the_device_is_left_alone() -> None:
    assert 0.85 * 1000 < usable_bytes(1000) < 1000


@pytest.mark.parametrize("vocabulary", [32, 1000])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_estimate_is_near_the_peak(policy: str, vocabulary: int) -> None:
    """Measured with 64 and 128 tokens, foretold for 1,024: what a forward and backward pass really hold at most."""
    transformers = pytest.importorskip("transformers")
    from torch.distributed._tools.mem_tracker import MemTracker

    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()

    def loss(rows: int) -> Tensor:
        given = ids(rows, 32)
        return model(input_ids=given, labels=given).loss

    small, large = measure_twice(
        lambda rows: loss(rows).numel() * rows * 32, sizes=(2, 4), model=model, blocks=repeated_blocks(model)
    )
    estimate = estimate_memory(small, large, model=model_bytes(model.parameters(), states=0))
    if policy == "selective":
        checkpoint_selectively(repeated_blocks(model))
    if policy == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        loss(32).backward()
    (peak,) = (figures["Total"] for figures in tracker.get_tracker_snapshot("peak").values())
    assert 0.98 < estimate.at(1024, policy) / peak < 1.3


def test_more_recomputing_takes_less_memory_per_token() -> None:
    model = Model(layers=12)
    small, large = measure(model, 2), measure(model, 4)
    per_token = estimate_memory(small, large, model=model_bytes(model.parameters())).per_token
    assert per_token["full"] < per_token["selective"] < per_token["none"]
    single = estimate_memory(large, model=0).per_token
    assert single["none"] == pytest.approx(per_token["none"], rel=0.05)
