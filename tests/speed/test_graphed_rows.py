"""Rows that are graphs, where it could go wrong: fillings, unknown padding, evaluations, many shapes, giving up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright.speed.graphing as graphing
import loopwright.speed.plan as speed_plan
from loopwright import Trainer
from loopwright.speed.layouts import BORDERS, LONGEST, PLACES, Limits, lay_unpadded
from loopwright.speed.plan import FLAT, UNPADDED
from loopwright.speed.samples import take_apart
from tests.speed.architectures import build, collate, samples
from tests.speed.test_graphing import ROWS, Recorder, dropping, even, exact, reason_of, recorder
from tests.speed.training import InOrder, Run, train

__all__ = ["recorder"]
pytest.importorskip("transformers")


def batch_of(lengths: list[int], padding: int = 0) -> dict[str, Tensor]:
    ids = [torch.full((length,), 7) for length in lengths]
    padded = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return {"input_ids": padded(ids, padding_value=padding), "attention_mask": padded([i * 0 + 1 for i in ids])}


# ---- evaluation in between -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "task"), [("bert", "class"), ("llama", "causal")])
@pytest.mark.parametrize("is_even", [True, False])
def test_an_evaluation_in_between_leaves_graphs_in_their_place(
    is_even: bool, kind: str, task: str, tmp_path: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(speed_plan.PER_LAUNCH, "cpu", 1e-3)
    data = even(48, task) if is_even else samples(96, task, longest=60)
    options: dict[str, Any] = {**ROWS, "eval_strategy": "steps", "eval_steps": 5, "kind": InOrder}
    options["given"] = {"eval_dataset": data[:8]}
    plain = train(build(kind, task), data, tmp_path, speed="off", **options)
    run = train(build(kind, task), data, tmp_path, **options)
    assert run.plan.graphed and run.plan.few_shapes is not is_even
    assert recorder.replays > 10, "also behind the first evaluation"
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)
    evals = [[row["eval_loss"] for row in r.trainer.state.log_history if "eval_loss" in row] for r in (run, plain)]
    assert evals[0] == pytest.approx(evals[1], rel=1e-6)
