"""The token budget: from the size of the device alone, never above what fits, the same after resuming."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import loopwright.pt.acceleration as speeding
from loopwright import Trainer
from loopwright.pt.distributed.sync import SharedLoss
from loopwright.pt.internals import TorchInternals
from loopwright.speed.compile.blocks import repeated_blocks
from loopwright.speed.layouts.samples import take_apart
from loopwright.speed.memory.estimate import POLICIES, USABLE, ActivationBytes, MemoryEstimate, usable_bytes
from loopwright.speed.memory.recompute import is_recomputing
from loopwright.speed.memory.token_budget import Demand, at_length, choose_budget, demand_of
from loopwright.speed.planner.decision import COLLATED, FLAT, GROUPED, ROW_TOKENS, UNPADDED, SpeedPlan
from tests.speed.architectures import build, collate, config, samples
from tests.speed.training import Run, gradients_of, train

pytest.importorskip("transformers")
DATA = samples(48, "causal")
ESTIMATE = MemoryEstimate(fixed=1000, per_token={"none": 10.0, "selective": 5.0, "full": 2.0})
ENOUGH = 64 * 2**30


def with_memory(monkeypatch: pytest.MonkeyPatch, total: int | None) -> None:
    monkeypatch.setattr(speeding, "total_memory", lambda device: total)


# ---- choosing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usable", "tokens", "policy", "fits"),
    [
        (1000 + 10 * 4096, 4096, "none", True),  # all there is to gain
        (1000 + 10 * 600, 512, "none", True),  # a power of two that fits
        (1000 + 10 * 130, 128, "none", True),
        (1000 + 10 * 100, 100, "none", True),  # never below what the collator made
        (1000 + 10 * 100 - 1, 128, "selective", True),
        (1000 + 5 * 100 - 1, 128, "full", True),
        (1000 + 2 * 100 - 1, 64, "full", True),  # less than the collator made: nothing else is left
        (1000 + 2 * 40, 40, "full", True),
        (1000 + 2 * 39, 40, "full", False),  # the longest sample cannot be cut
        (10, 40, "full", False),
    ],
)
def test_as_many_tokens_as_fit_and_no_more_recomputed_than_needed(
    usable: int, tokens: int, policy: str, fits: bool
) -> None:
    budget = choose_budget(ESTIMATE, usable, Demand(least=100, most=4096, longest=40), POLICIES)
    assert (budget.tokens, budget.policy, budget.fits) == (tokens, policy, fits), budget
    assert ("may not fit" in budget.reason) == (not fits)


def test_a_model_that_cannot_recompute_gets_smaller_micro_batches() -> None:
    budget = choose_budget(ESTIMATE, 1000 + 10 * 70, Demand(least=100, most=4096, longest=40), ["none"])
    assert (budget.tokens, budget.policy, budget.fits) == (64, "none", True)


@given(
    fixed=st.integers(0, 10**10),
    room=st.integers(0, 10**11),
    least=st.integers(1, 10**5),
    more=st.integers(0, 10**5),
    slope=st.floats(100, 10**6),
)
def test_what_is_chosen_fits_whenever_anything_does(fixed: int, room: int, least: int, more: int, slope: float) -> None:
    estimate = MemoryEstimate(fixed, {"none": slope, "selective": slope / 2, "full": slope / 5})
    demand = Demand(least=least, most=least + more, longest=max(1, least // 2))
    budget = choose_budget(estimate, fixed + room, demand, POLICIES)
    assert budget.tokens <= demand.most
    if estimate.at(demand.longest, "full") <= fixed + room:
        assert budget.fits
    if estimate.at(least) <= fixed + room:
        assert budget.policy == "none" and budget.tokens >= least


def test_what_a_layout_would_like() -> None:
    batches = [collate(DATA[start : start + 6]) for start in (0, 6, 12)]
    apart = take_apart(batches, is_pair=False)
    lengths = apart.axes["source"].lengths
    padded = max(batch["input_ids"].numel() for batch in batches)
    real = max(int(lengths[start : start + 6].sum()) for start in (0, 6, 12))
    longest = int(lengths.max())
    assert demand_of(SpeedPlan(), apart, batches) == Demand(padded, padded, longest)
    for layout in (FLAT, UNPADDED):
        assert demand_of(SpeedPlan(layout=layout), apart, batches) == Demand(real, ROW_TOKENS, longest)
    wide = -(-longest // 8) * 8
    assert demand_of(SpeedPlan(layout=GROUPED, round_to=8), apart, batches) == Demand(padded, 18 * wide, longest)


@given(
    constant=st.integers(0, 10**6),
    per_token=st.integers(1, 10**4),
    per_pair=st.integers(0, 100),
    whole=st.integers(600, 40_000),
)
def test_scores_of_attention_are_reckoned_by_the_length(
    constant: int, per_token: int, per_pair: int, whole: int
) -> None:
    def kept(rows: int, length: int) -> ActivationBytes:
        return ActivationBytes(tokens=rows * length, blocks=constant + rows * length * (per_token + per_pair * length))

    found = at_length(whole, kept(1, 512), kept(2, 512), kept(1, 256))
    for mine, theirs in zip(found, (kept(1, whole), kept(2, whole)), strict=True):
        assert mine.tokens == theirs.tokens and mine.blocks == pytest.approx(theirs.blocks, rel=1e-6, abs=2)


# ---- in training -----------------------------------------------------------------------------------------------------


def test_a_cpu_has_no_budget_of_its_own(tmp_path: Any) -> None:
    run = train(build("llama", "causal", layers=2), DATA, tmp_path, speed="max")
    assert run.plan.layout == FLAT and run.plan.budget == 0 and run.plan.activations == "none"


def test_a_large_device_takes_long_rows(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, ENOUGH)
    run = train(build("llama", "causal", layers=2), DATA, tmp_path, speed="max", gradient_accumulation_steps=4)
    assert run.plan.budget == ROW_TOKENS and run.plan.activations == "none", run.plan.lines()
    assert len(run.shapes[0]) == 1, "all micro-batches in one row"
    wanted = f"on   token budget: micro-batches of up to {ROW_TOKENS:,} tokens"
    assert any(line.startswith(wanted) for line in run.plan.lines())


@pytest.mark.parametrize("kind", ["t5", pytest.param("bart", marks=pytest.mark.grid)])
def test_groups_are_larger_than_the_collators_batches_where_they_fit(
    kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, only_groups: None
) -> None:
    data = samples(64, "pair")
    many = {"gradient_accumulation_steps": 8, "per_device_train_batch_size": 4, "speed": "max"}
    plain = gradients_of(build(kind, "pair", layers=2), data, tmp_path, **{**many, "speed": "off"})
    small = gradients_of(build(kind, "pair", layers=2), data, tmp_path, **many)
    with_memory(monkeypatch, ENOUGH)
    large = gradients_of(build(kind, "pair", layers=2), data, tmp_path, **many)
    assert large.plan.layout == GROUPED and len(plain.shapes[0]) == 8
    assert len(large.shapes[0]) < len(small.shapes[0]) and len(large.shapes[0]) <= 3
    assert large.loss == pytest.approx(plain.loss, rel=1e-9)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(large.gradients[name], gradient, rtol=1e-7, atol=1e-10)


def test_the_users_budget_wins(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, ENOUGH)
    run = train(build("llama", "causal", layers=2), DATA, tmp_path, speed="max", per_device_train_batch_tokens=64)
    assert run.plan.budget == 0 and all(rows * width <= 64 for rows, width in run.shapes[0])


def deep() -> nn.Module:
    """Enough blocks that recomputing one of them at a time saves something."""
    import transformers

    torch.manual_seed(0)
    settings = config("llama", {"num_key_value_heads": 2, "num_hidden_layers": 4, "intermediate_size": 256})
    return transformers.AutoModelForCausalLM.from_config(settings).double()


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Those of four updates of the deep model without any acceleration."""
    return train(deep(), DATA, tmp_path_factory.mktemp("plain"), speed="off", max_steps=4).losses


@pytest.fixture(scope="module")
def estimated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The estimate and the demand of a run of the deep model with plenty of memory."""
    import loopwright.speed.memory.token_budget as budget

    seen: list[Any] = []
    choose = budget.choose_budget

    def watched(estimate: Any, usable: int, demand: Any, policies: Any) -> Any:
        seen.append((estimate, demand))
        return choose(estimate, usable, demand, policies)

    with pytest.MonkeyPatch.context() as patch:
        with_memory(patch, ENOUGH)
        patch.setattr(budget, "choose_budget", watched)
        train(deep(), DATA, tmp_path_factory.mktemp("estimated"), speed="max")
    return seen[0]


def memory_for(estimate: Any, demand: Any, policy: str) -> int:
    """A device on which exactly this policy is needed."""
    before = POLICIES[POLICIES.index(policy) - 1]
    low, high = estimate.at(demand.least, policy), estimate.at(demand.least, before)
    assert low < high, "each policy saves something here"
    total = int((low + high) / 2 / USABLE)
    assert low < usable_bytes(total) < high
    return total


def recomputing(run: Run) -> bool:
    return any(is_recomputing(block) for block in repeated_blocks(run.trainer.model)) or bool(
        run.trainer.model.is_gradient_checkpointing
    )


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_what_does_not_fit_is_recomputed_and_a_resumed_run_does_the_same(
    policy: str, plain_losses: list[float], estimated: tuple[Any, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_memory(monkeypatch, memory_for(*estimated, policy))
    options = {"speed": "max", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    seen: list[bool] = []

    class Looking(SharedLoss):
        def micro_batch(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(recomputing(Run(self.trainer, 0.0, [], {}, [])))
            return super().micro_batch(*args, **kwargs)

    class LookingInternals(TorchInternals):
        loss_class = Looking

    class Looks(Trainer):
        _loopwright_class = LookingInternals

    run = train(deep(), DATA, tmp_path / "run", **options)
    assert run.plan.activations == policy and run.plan.budget > 0, run.plan.lines()
    assert any(choice.is_on and "recomputing" in choice.name and choice.numbers for choice in run.plan.choices)
    assert run.losses == pytest.approx(plain_losses, rel=1e-6)
    assert not recomputing(run), "undone at the end"
    monkeypatch.setattr("loopwright.speed.planner.planner.plan_memory", lambda *a, **k: pytest.fail("measured again"))
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    rest = train(deep(), DATA, tmp_path / "run", kind=Looks, resume=checkpoint, **options)
    assert rest.plan == run.plan and rest.shapes == run.shapes[2:] and not recomputing(rest)
    for name, value in run.trainer.model.state_dict().items():
        assert torch.equal(value, rest.trainer.model.state_dict()[name])
    assert seen and all(seen), "on a resumed run the policy is in place from the first update on"


def test_measuring_leaves_random_numbers_and_the_run_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def dropping() -> nn.Module:
        model = build("bert", "class", layers=2)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        return model

    data = samples(48, "class")
    options = {"speed": "max", "max_steps": 3, "per_device_train_batch_tokens": None}
    without = train(dropping(), data, tmp_path, gradient_accumulation_steps=1, **options)
    with_memory(monkeypatch, ENOUGH)
    measured = train(dropping(), data, tmp_path, gradient_accumulation_steps=1, **options)
    assert measured.plan.layout == UNPADDED and measured.plan.budget == ROW_TOKENS and without.plan.budget == 0
    assert measured.losses == without.losses, "one row either way"


def test_a_model_that_cannot_be_measured_trains_as_before(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no hooks here")

    with_memory(monkeypatch, ENOUGH)
    monkeypatch.setattr("loopwright.speed.memory.token_budget.measure_twice", fails)
    run = train(build("llama", "causal", layers=2), DATA, tmp_path, speed="max")
    assert run.plan.layout == FLAT and run.plan.budget == 0
    assert any("could not be measured: RuntimeError: no hooks here" in line for line in run.plan.lines())


def test_checkpointing_of_the_users_own_is_left_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 2**20)
    run = train(build("llama", "causal", layers=2), DATA, tmp_path, speed="max", gradient_checkpointing=True)
    assert run.plan.budget == 0 and run.plan.activations == "none"
    assert run.trainer.model.is_gradient_checkpointing


def test_even_batches_that_do_not_fit_are_recomputed_too(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 2**10)
    even = [{name: value[:3] for name, value in sample.items()} for sample in DATA]
    run = train(build("llama", "causal", layers=2), even, tmp_path, speed="max", gradient_accumulation_steps=1)
    assert run.plan.layout == COLLATED and run.plan.activations == "full" and run.plan.budget == 0
    assert any("may not fit" in line for line in run.plan.lines())
