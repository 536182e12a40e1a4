"""Rows that are graphs, where it could go wrong: fillings, unknown padding, evaluations, many shapes, giving up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright.speed.cuda_graphs.graphed_step as graphing
import loopwright.speed.planner.decision as speed_plan
from loopwright.pt.acceleration import Acceleration
from loopwright.pt.internals import TorchInternals
from loopwright.speed.layouts.rows import BORDERS, LONGEST, PLACES, Limits, lay_unpadded
from loopwright.speed.layouts.samples import take_apart
from loopwright.speed.planner.decision import FLAT, UNPADDED
from tests.speed.architectures import build, collate, samples
from tests.speed.test_graphing import ROWS, Recorder, dropping, even, exact, reason_of, recorder
from tests.speed.training import InOrder, Run, train
from tests.spreads import some, spread

__all__ = ["recorder"]
pytest.importorskip("transformers")


def batch_of(lengths: list[int], padding: int = 0) -> dict[str, Tensor]:
    ids = [torch.full((length,), 7) for length in lengths]
    padded = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return {"input_ids": padded(ids, padding_value=padding), "attention_mask": padded([i * 0 + 1 for i in ids])}


# ---- what fills rows up ----------------------------------------------------------------------------------------------


def test_what_fills_a_row_up_may_be_longer_than_a_model_has_positions(
    tmp_path: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(speed_plan.PER_LAUNCH, "cpu", 1e-2)
    data = samples(400, "causal", longest=60)
    options: dict[str, Any] = {**ROWS, "max_steps": 8, "per_device_train_batch_size": 48, "kind": InOrder}
    plain = train(build("gpt2", "causal"), data, tmp_path, speed="off", **options)
    run = train(build("gpt2", "causal"), data, tmp_path, **options)
    real = [sum(len(each["input_ids"]) for each in data[48 * i : 48 * i + 48]) for i in range(8)]
    assert any(row[0][1] - tokens > 64 for row, tokens in zip(run.shapes, real, strict=True)), "more than its positions"
    assert run.plan.layout == FLAT and run.plan.few_shapes and run.losses == pytest.approx(plain.losses, rel=1e-6)


@pytest.mark.parametrize("count", [3, 113, 230, 900])
def test_no_document_is_longer_than_kernels_are_told(count: int) -> None:
    """What fills a row up is one too: kernels that are told less leave the rest of it unwritten."""
    taken = take_apart([batch_of([9, 5, 4, 10] * count)], is_pair=False)
    (batch,) = lay_unpadded(taken, Limits(100_000, 0, few_shapes=True, width=10), fill=True).batches
    assert batch[LONGEST] >= int(torch.diff(batch[BORDERS]).max())
    full = len(batch[PLACES]) // 7 * [7]
    (other,) = lay_unpadded(
        take_apart([batch_of([10, *full])], is_pair=False), Limits(100_000, 0, few_shapes=True, width=10), fill=True
    ).batches
    assert len(other[PLACES]) != len(batch[PLACES]) or other[LONGEST] == batch[LONGEST], "it is a part of the shape"


class MeanOfTokens(nn.Module):
    """Classifies by the mean of all that is not padding, which it knows by its token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bert = build("bert", "class").bert
        self.config, self.head = self.bert.config, nn.Linear(32, 3).double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        real = (input_ids != 1).unsqueeze(-1)
        states = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        mean = (states * real).sum(1) / real.sum(1)
        return {"loss": nn.functional.cross_entropy(self.head(mean), labels)}


def collate_with_ones(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    made = collate(rows)
    made["input_ids"][made["attention_mask"] == 0] = 1
    return made


def test_batches_are_widened_with_the_padding_of_their_collator_or_not_at_all(
    tmp_path: Any, recorder: Recorder
) -> None:
    """A batch of samples of one length shows none."""
    data = samples(60, "class", longest=50)
    for sample in data[30:]:
        sample["input_ids"] = sample["input_ids"].repeat(9)[:20]
    options: dict[str, Any] = {**ROWS, "max_steps": 10, "kind": InOrder, "data_collator": collate_with_ones}
    plain = train(MeanOfTokens(), data, tmp_path, speed="off", **options)
    run = train(MeanOfTokens(), data, tmp_path, **options)
    assert run.plan.layout == UNPADDED and run.plan.few_shapes, run.plan.lines()
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)


def test_a_row_without_padding_is_widened_with_that_of_the_other_rows() -> None:
    taken = take_apart([batch_of([5, 5, 3, 4], padding=1)], is_pair=False)
    laid = lay_unpadded(taken, Limits(10, 0, few_shapes=True, width=8), fill=True)
    assert [tuple(batch["input_ids"].shape) for batch in laid.batches] == [(2, 8), (2, 8)]
    assert laid.batches[0]["input_ids"][:, 5:].tolist() == [[1] * 3] * 2


# ---- evaluation in between -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_even", "model"), spread([False, True], [("bert", "class"), ("llama", "causal")]), ids=str
)
def test_an_evaluation_in_between_leaves_graphs_in_their_place(
    is_even: bool, model: tuple[str, str], tmp_path: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, task = model
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


# ---- how many shapes there are ---------------------------------------------------------------------------------------


def test_several_rows_of_an_update_have_equally_many_samples() -> None:
    shapes = set()
    for seed in range(40):
        data = samples(128, "class", seed=seed, longest=60)
        taken = take_apart([collate(data)], is_pair=False)
        for batch in lay_unpadded(taken, Limits(2300, 0, few_shapes=True, width=60), fill=True).batches:
            assert len(batch[PLACES]) <= 2300 + 256
            shapes.add((tuple(batch["input_ids"].shape), len(batch[PLACES])))
    assert {shape[0][0] for shape in shapes} == {64, 42, 43} and len(shapes) <= 12


def test_rows_of_too_many_shapes_are_no_graphs_and_are_not_filled_up(
    tmp_path: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graphing, "MOST_ROWS", 2)
    monkeypatch.setitem(speed_plan.PER_LAUNCH, "cpu", 1e-2)
    data = samples(600, "causal", longest=60)
    grow = {"per_device_train_batch_size": 24, "gradient_accumulation_steps": 1, "max_steps": 20, "kind": InOrder}
    with caplog.at_level(logging.INFO, logger="loopwright"):
        run = train(build("llama", "causal"), sorted(data, key=lambda s: len(s["input_ids"])), tmp_path, **grow)
    assert run.plan.layout == FLAT and not run.plan.graphed
    assert reason_of(run) == "micro-batches have more than 4 shapes" and reason_of(run) in caplog.text
    assert any(row[0][1] % 64 for row in run.shapes[-3:]), "as long as their samples"


class Telling(Recorder):
    """A replay whose loss shows that it is one."""

    def __call__(self, function: Callable[[], Tensor]) -> Any:
        return super().__call__(lambda: function() * (1 + 1e-5))


@pytest.mark.parametrize("start", some([9, 4, 14], step=3))
def test_a_resumed_run_has_graphs_of_the_same_shapes(
    start: int, tmp_path: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where more shapes repeat than are recorded."""
    monkeypatch.setattr(graphing, "MOST_ROWS", 2)
    monkeypatch.setattr(Acceleration, "graph_recorder", Telling())
    options: dict[str, Any] = {**ROWS, "max_steps": 20, "save_strategy": "steps", "save_steps": 1, "kind": InOrder}
    short, long = samples(30, "causal", longest=20), samples(90, "causal", seed=1, longest=60)
    data = [*short[:12], *long[:60], *short[12:], *long[60:]]
    whole = train(build("llama", "causal"), data, tmp_path, **options)
    rest = train(build("llama", "causal"), data, tmp_path, resume=str(tmp_path / f"checkpoint-{start}"), **options)
    assert whole.plan.few_shapes and rest.losses[-(20 - start) :] == whole.losses[start:]


# ---- giving up, and memory -------------------------------------------------------------------------------------------


def fails(function: Any) -> Any:
    raise RuntimeError("not while recording")


def given_up(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Run:
    monkeypatch.setattr(Acceleration, "graph_recorder", staticmethod(fails))
    options = {**ROWS, "max_steps": 12, "save_strategy": "steps", "save_steps": 1, "kind": InOrder, **more}
    return train(dropping("bert", "class"), samples(96, "class", longest=60), tmp_path, **options)


@pytest.mark.parametrize("starts", [(1, 3, 4, 11), pytest.param(range(1, 12), marks=pytest.mark.grid)], ids=str)
def test_a_checkpoint_knows_that_graphs_were_given_up(
    starts: Any, tmp_path: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever resumes there does not fill rows up again, which dropout would show."""
    whole = given_up(tmp_path, monkeypatch)
    assert not whole.plan.graphed and reason_of(whole) == "not while recording"
    for start in starts:
        rest = given_up(tmp_path, monkeypatch, resume=str(tmp_path / f"checkpoint-{start}"))
        assert rest.shapes == whole.shapes[start:] and exact(whole, rest), start


def test_rows_made_shorter_for_want_of_memory_leave_no_graphs_of_longer_ones(tmp_path: Any, recorder: Recorder) -> None:
    kept: list[tuple[int, int]] = []

    class Short(TorchInternals):
        """Runs out of memory once, in the last but three."""

        def run_micro_batches(self, update: Any) -> Any:
            if self.state.global_step == 12 and self.run.speed is not None:
                step = self.run.speed._graphed.step
                assert step._graphs and self.loss._halve(update)
                kept.append((len(step._graphs), len(update.batches)))
            return super().run_micro_batches(update)

    class ShortOfMemory(InOrder):
        _loopwright_class = Short

    options = {**ROWS, "auto_find_batch_size": True}
    data = sorted(samples(96, "class", longest=60), key=lambda sample: len(sample["input_ids"]) < 50)
    run = train(build("bert", "class"), data, tmp_path, **options, kind=ShortOfMemory)
    plain = train(build("bert", "class"), data, tmp_path, speed="off", **options, kind=InOrder)
    assert kept == [(0, 2)] and run.plan.few_shapes and run.plan.budget
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)
