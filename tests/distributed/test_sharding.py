"""FSDP2's options, tensor-parallel plans, whole weights from parts, and optimizers that were made before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.pt.checkpoint.tensors import read_tensors

from .pool import Pool
from .test_contract import assert_same_run

WRAPPED: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["", "blocks.0", "blocks.1"]),
    ({"transformer_layer_cls_to_wrap": "Linear"},
     ["", "blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2", "head"]),
    ({"transformer_layer_cls_to_wrap": ["Linear", "Sequential"]},
     ["", "blocks.0", "blocks.0.0", "blocks.0.2", "blocks.1", "blocks.1.0", "blocks.1.2", "head"]),
    ({"auto_wrap_policy": "NO_WRAP"}, [""]),
    ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 90}, ["", "blocks.0", "blocks.1", "embed", "head"]),
    ({"reshard_after_forward": False, "cpu_offload": True}, ["", "blocks.0", "blocks.1"]),
]  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), WRAPPED)
def test_fsdp_config_decides_what_is_wrapped(pool: Pool, tmp_path: Path, config: Any, expected: list[str]) -> None:
    found = pool.run(2, "sharded", folder=str(tmp_path), fsdp_config=config)
    for each in found:
        assert sorted(each["wrapped"]) == sorted(expected)
    assert sum(each["held"] for each in found) == found[0]["whole"], "each number is held once"


def test_a_layer_class_that_does_not_exist_is_named(pool: Pool, tmp_path: Path) -> None:
    outcomes = pool.outcomes(2, "sharded", folder=str(tmp_path), fsdp_config={"transformer_layer_cls_to_wrap": "Blok"})
    assert all(each.kind == "raised" and "no such module" in each.value for each in outcomes)


def test_parameters_of_two_dtypes_in_one_unit_are_refused_with_their_names(pool: Pool, tmp_path: Path) -> None:
    for each in pool.outcomes(2, "trained", folder=str(tmp_path), fsdp=True, model="two-dtypes"):
        assert each.kind == "raised" and "embed.weight is float64, head.bias is float32" in each.value


@pytest.mark.parametrize(
    "config",
    [{"activation_checkpointing": True}, {"reshard_after_forward": False}, {"cpu_offload": True},
     {"auto_wrap_policy": "NO_WRAP"}],
    ids=str,
)  # fmt: skip
def test_options_of_fsdp_do_not_change_the_result(pool: Pool, tmp_path: Path, config: Any) -> None:
    one = pool.run(1, "clipped", folder=str(tmp_path / "one"), gradient_accumulation_steps=2)[0]
    many = pool.run(2, "clipped", folder=str(tmp_path / "two"), fsdp=True, fsdp_config=config)
    assert_same_run(many[0], one)


@pytest.mark.parametrize(
    "given",
    [{}, {"fsdp": True}, {"parallelism_config": {"tp_size": 2, "tp_plan": {"blocks.*.0": "colwise"}}}],
    ids=["ddp", "fsdp", "tensor"],
)  # fmt: skip
def test_clipping_uses_the_norm_of_whole_gradients(pool: Pool, tmp_path: Path, given: Any) -> None:
    if "parallelism_config" in given:
        given["parallelism_config"]["tp_plan"] = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}
    parts = 1 if "parallelism_config" in given else 2
    one = pool.run(1, "clipped", folder=str(tmp_path / "one"), gradient_accumulation_steps=2)[0]
    many = pool.run(2, "clipped", folder=str(tmp_path / "two"), gradient_accumulation_steps=2 // parts, **given)
    assert one["logs"][0]["grad_norm"] > 0.05, "this run would not be clipped"
    for each in many:
        assert_same_run(each, one)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("model", ["blocks", "llama-tied"])
def test_save_model_holds_whole_weights(pool: Pool, tmp_path: Path, world: int, model: str) -> None:
    whole = pool.run(world, "saved_model", folder=str(tmp_path), model=model, fsdp=True)[0]
    found = read_tensors(tmp_path / "model" / "model.safetensors")
    stored = {name: value for name, value in whole.items() if name in found}
    assert stored and all(torch.equal(found[name], value) for name, value in stored.items())
    assert set(whole) - set(found) <= {"lm_head.weight"}, "only a tied name may be left to its other one"


def test_an_optimizer_made_before_goes_over_to_the_parts(pool: Pool, tmp_path: Path) -> None:
    one = pool.run(1, "own_optimizer", folder=str(tmp_path / "one"), gradient_accumulation_steps=2)[0]
    for each in pool.run(2, "own_optimizer", folder=str(tmp_path / "two"), fsdp=True, optim="adamw_torch"):
        assert_same_run(each, one)


def test_an_optimizer_with_state_of_its_own_is_refused_with_what_to_pass(pool: Pool, tmp_path: Path) -> None:
    outcomes = pool.outcomes(
        2, "own_optimizer", folder=str(tmp_path), started=True, fsdp=True, optim="adamw_torch", ddp_timeout=20
    )
    assert all(each.kind == "raised" and "optimizer_cls_and_kwargs" in each.value for each in outcomes)


@pytest.mark.parametrize("given", [{}, {"fsdp": True, "optim": "adamw_torch"}], ids=["ddp", "fsdp"])
def test_models_that_began_differently_take_the_first_ones_weights(pool: Pool, tmp_path: Path, given: Any) -> None:
    found = pool.run(2, "different_weights", folder=str(tmp_path), **given)
    first = found[0][0]
    assert not torch.equal(first["embed.weight"], found[1][0]["embed.weight"])
    for _, after in found:
        assert all(torch.allclose(after[name], value, atol=1e-12) for name, value in first.items())


def test_only_the_first_process_needs_to_load_weights(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(2, "made_on_meta", folder=str(tmp_path))
    assert [empty for *_, empty in found] == [False, True]
    for before, expected, steps, _ in found:
        assert steps > 0
        assert all(torch.equal(before[name], value) for name, value in expected.items())


def test_unused_parameters_are_named(pool: Pool, tmp_path: Path) -> None:
    outcomes = pool.outcomes(2, "with_unused", folder=str(tmp_path), ddp_timeout=20)
    assert all(each.kind == "raised" for each in outcomes)
    assert any("never.weight, never.bias" in each.value for each in outcomes)
    assert pool.run(2, "with_unused", folder=str(tmp_path / "told"), ddp_find_unused_parameters=True)[0] > 0


PLANS = [
    ({"blocks.*.0": "colwise", "blocks.*.2": "sideways"}, "the style 'sideways' is not available"),
    ({"blox.*": "colwise"}, "no module of the model matches this name"),
    ({"head": "colwise"}, "splits 13 into 2, which is not divisible"),
    ({"blocks.*.1": "colwise"}, "only Linear and Embedding"),
    (None, "has no tensor parallel plan"),
]


@pytest.mark.parametrize(("plan", "words"), PLANS)
def test_plans_that_cannot_be_carried_out_say_why(pool: Pool, tmp_path: Path, plan: Any, words: str) -> None:
    sizes = {"tp_size": 2, **({"tp_plan": plan} if plan else {})}
    outcomes = pool.outcomes(2, "saved_model", folder=str(tmp_path), parallelism_config=sizes)
    assert all(each.kind == "raised" and words in each.value for each in outcomes), outcomes[0].value


def test_half_precision_follows_the_policy(pool: Pool, tmp_path: Path) -> None:
    given = {"n": 8, "model": "blocks-single", "bf16": True, "num_train_epochs": 1}
    one = pool.run(1, "trained", folder=str(tmp_path / "one"), gradient_accumulation_steps=2, **given)[0]
    found = pool.run(2, "trained", folder=str(tmp_path / "two"), fsdp=True, **given)[0]
    assert all(value.dtype is torch.float32 for value in found["weights"].values()), "weights stay whole"
    assert abs(found["logs"][0]["loss"] - one["logs"][0]["loss"]) < 0.05


@pytest.mark.parametrize("world", [1, 2])
def test_an_optimizer_without_state_resumes(pool: Pool, tmp_path: Path, world: int) -> None:
    given = {"fsdp": True, "optim": "sgd", "n": 12, "save_steps": 1, "save_strategy": "steps", "max_steps": 3}
    whole = pool.run(world, "trained", folder=str(tmp_path / "run"), **given)
    first = str(tmp_path / "run/checkpoint-1")
    resumed = pool.run(world, "trained", folder=str(tmp_path / "run"), resume=first, **given)
    for one, other in zip(whole, resumed, strict=True):
        assert_same_run(other, one)
