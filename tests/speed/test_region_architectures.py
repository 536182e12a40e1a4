"""Compiled blocks of many architectures in double precision, against the models as written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

import loopwright.speed.planner.cost as cost
import loopwright.speed.planner.regions as regions
from loopwright.pt.acceleration import Acceleration
from loopwright.speed.planner.regions import REGION
from loopwright.speed.proof.distance import gradient_distance
from tests.speed.architectures import build, samples
from tests.speed.test_architectures import EXPECTED, IN_SINGLE_PRECISION
from tests.speed.training import gradients_of

pytest.importorskip("transformers")
ROUNDED = {"gemma", "gemma3_text", "mpt"}
"""Compute norms or shares of attention in single precision, which compiled code rounds in another order."""
ALWAYS = {("gpt2", "causal"), ("roberta", "class"), ("bart", "pair")}
"""The others run with `-m grid`."""


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(regions, "COMPILING_DEVICES", ("cpu",))
    monkeypatch.setattr(regions, "FASTER", 1e9)
    monkeypatch.setattr(regions, "LOOKS", 1)
    monkeypatch.setattr(cost, "MARGIN", 0.0)
    monkeypatch.setattr(Acceleration, "region_backend", "aot_eager")
    yield
    torch._dynamo.reset()


def of_one_length(count: int, task: str) -> list[dict[str, Any]]:
    made = [row for seed in range(200) for row in samples(8, task, seed=seed)]
    long = [row for row in made if len(row["input_ids"]) >= 12]
    if task == "pair":
        long = [{**row, "labels": row["labels"][:4]} for row in long if len(row["labels"]) >= 4]
    rows = [{name: value[:12] if value.dim() else value for name, value in row.items()} for row in long]
    return rows[:count]


@pytest.mark.parametrize(
    ("kind", "task"),
    [pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.grid) for case in sorted(EXPECTED)],
)
def test_the_update_is_that_of_the_model_as_written(kind: str, task: str, doubles_stay: None, tmp_path: Any) -> None:
    data, tolerance = of_one_length(12, task), 1e-5 if kind in IN_SINGLE_PRECISION | ROUNDED else 2e-9
    plain = gradients_of(build(kind, task, layers=2), data, tmp_path, speed="off", max_steps=2)
    fast = gradients_of(build(kind, task, layers=2), data, tmp_path, max_steps=2)
    assert fast.plan.region and fast.trainer.compiled.calls[0].times > 0, fast.plan.lines()
    assert fast.losses == pytest.approx(plain.losses, rel=tolerance)
    assert gradient_distance([*plain.gradients.values()], [*fast.gradients.values()]) < tolerance


def test_a_block_without_a_bias_is_refused(doubles_stay: None, tmp_path: Any, monkeypatch: Any) -> None:
    """A compiler that leaves a bias out of the products of a block."""

    def without_bias(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            biases = [each for each in args if isinstance(each, torch.Tensor) and each.dim() == 1 and len(each) == 96]
            return graph(*(torch.zeros_like(each) if any(each is b for b in biases) else each for each in args))

        return run

    def spoiled(model: Any) -> Any:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("c_attn.bias"):
                    parameter.fill_(0.1)
        return model

    monkeypatch.setattr(Acceleration, "region_backend", staticmethod(without_bias))
    data = of_one_length(12, "causal")
    plain = gradients_of(spoiled(build("gpt2", "causal")), data, tmp_path, speed="off", max_steps=2)
    fast = gradients_of(spoiled(build("gpt2", "causal")), data, tmp_path, max_steps=2)
    reasons = [each.reason for each in fast.plan.choices if each.name == REGION]
    assert not fast.plan.region and "differs" in reasons[0], fast.plan.lines()
    assert fast.losses == plain.losses
