"""Training with micro-batches as graphs: everything but the recording, which tests/gpu/test_graphed_training.py shows.

The recorder here runs the function again; a replay is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright.speed.planner.decision as speed_plan
import loopwright.speed.planner.planner as planning
from loopwright import Trainer, TrainerCallback
from loopwright.core.update import MicroBatch, Update
from loopwright.pt.acceleration import Acceleration
from loopwright.speed.cuda_graphs.graphed_step import GraphedTraining, operations_of
from loopwright.speed.cuda_graphs.recorder import GraphedStep
from loopwright.speed.planner.decision import COLLATED, FLAT, GRAPHS, IN_GROUPS, UNPADDED, SpeedPlan
from tests.speed.architectures import build, samples
from tests.speed.training import InOrder, Run, train
from tests.spreads import some, spread

pytest.importorskip("transformers")
LENGTH = 12


class Recorder:
    """Records nothing: a replay is another run on the same tensors."""

    def __init__(self) -> None:
        self.recorded = self.replays = 0

    def __call__(self, function: Callable[[], Tensor]) -> Any:
        loss = torch.zeros((), dtype=torch.float64)
        self.recorded += 1

        def replay() -> None:
            self.replays += 1
            loss.copy_(function())

        return replay, loss


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Graphs on a CPU, decided on after three updates, however short the run."""
    found = Recorder()
    monkeypatch.setattr(Acceleration, "graph_recorder", found)
    monkeypatch.setattr(planning, "LOOKS", 3)
    monkeypatch.setitem(speed_plan.WORTH_SECONDS, "cpu", 0.0)
    return found


def even(count: int, task: str, *, prompts: bool = False) -> list[dict[str, Any]]:
    """Samples of one length; with prompts, each has another number of targets."""
    made = []
    for number, sample in enumerate(samples(4 * count, task, longest=40)):
        if len(sample["input_ids"]) < LENGTH or len(made) == count:
            continue
        row = {"input_ids": sample["input_ids"][:LENGTH].clone(), "labels": sample["labels"].clone()}
        if row["labels"].dim():
            row["labels"] = row["labels"][:LENGTH]
            row["labels"][: number % 9 if prompts else 0] = -100
        made.append(row)
    assert len(made) == count
    return made


def dropping(kind: str, task: str) -> nn.Module:
    model = build(kind, task)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return model


def exact(a: Run, b: Run) -> bool:
    mine, theirs = a.trainer.model.state_dict(), b.trainer.model.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def reason_of(run: Run) -> str:
    return next(choice.reason for choice in run.plan.choices if choice.name == GRAPHS)


GRAPHED = [("bert", "class", False), ("llama", "causal", False), ("llama", "causal", True), ("bert", "masked", False)]


@pytest.mark.parametrize(("case", "accumulation"), spread(GRAPHED, [1, 3]), ids=str)
def test_a_graphed_run_is_the_run_without(
    case: tuple[str, str, bool], accumulation: int, tmp_path: Any, recorder: Recorder
) -> None:
    kind, task, prompts = case
    data = even(72, task, prompts=prompts)
    options = {
        "max_steps": 8, "gradient_accumulation_steps": accumulation, "max_grad_norm": 1.0, "optim": "adamw_torch",
        "learning_rate": 1e-2,
    }  # fmt: skip
    plain = train(dropping(kind, task), data, tmp_path, speed="off", **options)
    run = train(dropping(kind, task), data, tmp_path, **options)
    assert run.plan.graphed and run.plan.layout == COLLATED, run.plan.lines()
    assert recorder.recorded == 1 and recorder.replays == 6 * accumulation + 2, "from the third update, and two checks"
    # A share is a number in single precision where the graph reads it.
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)
    for name, value in plain.trainer.model.state_dict().items():
        torch.testing.assert_close(run.trainer.model.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def test_a_resumed_run_is_graphed_from_its_first_update_to_the_last_bit(tmp_path: Any, recorder: Recorder) -> None:
    data = even(48, "class")
    options: dict[str, Any] = {"max_steps": 8, "learning_rate": 0.1, "save_strategy": "steps", "save_steps": 2}
    whole = train(dropping("bert", "class"), data, tmp_path, **options)
    for start, replayed in ((2, 6), (4, 4)):  # before and after it was decided
        recorder.replays = 0
        rest = train(dropping("bert", "class"), data, tmp_path, resume=str(tmp_path / f"checkpoint-{start}"), **options)
        assert rest.plan == whole.plan and exact(whole, rest)
        assert recorder.replays == 2 * replayed + 2


def test_evaluation_clipping_and_skipping_go_on_as_before(tmp_path: Any, recorder: Recorder) -> None:
    data = even(48, "class")

    class Breaks(TrainerCallback):
        """One update whose loss is not a number."""

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.kept = model.classifier.bias.data.clone()
            if state.global_step == 5:
                model.classifier.bias.data.fill_(float("nan"))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 6:
                model.classifier.bias.data.copy_(self.kept)

    options = {
        "max_steps": 8, "eval_strategy": "steps", "eval_steps": 2, "on_nonfinite": "skip", "max_grad_norm": 0.5,
        "learning_rate": 0.1,
    }  # fmt: skip
    runs = {}
    for level in ("off", "auto"):
        given = {"eval_dataset": data[:8], "callbacks": [Breaks()]}
        run = runs[level] = train(build("bert", "class"), data, tmp_path, speed=level, given=given, **options)
        run.evals = [row["eval_loss"] for row in run.trainer.state.log_history if "eval_loss" in row]  # type: ignore[attr-defined]
    assert runs["auto"].plan.graphed and recorder.replays
    assert runs["auto"].evals == pytest.approx(runs["off"].evals, rel=1e-5)  # type: ignore[attr-defined]
    names = runs["off"].trainer.model.state_dict()
    assert all(value.isfinite().all() for value in names.values())


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def own_loss(outputs: Any, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, labels)


class OwnInputs(Trainer):
    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs(inputs)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": OwnLoss}, "compute_loss is overridden"),
        ({"kind": OwnInputs}, "_prepare_inputs is overridden"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing is on"),
        ({"given": {"compute_loss_func": own_loss}}, "compute_loss_func is set"),
    ],
)
def test_what_a_replay_would_leave_out_keeps_graphs_off(
    options: dict[str, Any], words: str, tmp_path: Any, recorder: Recorder
) -> None:
    run = train(build("bert", "class"), even(24, "class"), tmp_path, max_steps=4, **options)
    assert not run.plan.graphed and recorder.recorded == 0
    assert words in str(run.trainer._loopwright.run.speed._setup.why_not_graph)


def test_changing_shapes_are_no_graphs(tmp_path: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    import loopwright.speed.cuda_graphs.graphed_step as graphing

    monkeypatch.setattr(planning, "LOOKS", 8)
    monkeypatch.setattr(planning, "is_worth_it", lambda *a: False)  # layouts do not pay here
    monkeypatch.setattr(graphing, "MOST_SHAPES", 4)
    run = train(build("bert", "class"), samples(96, "class"), tmp_path, max_steps=9, gradient_accumulation_steps=1)
    assert not run.plan.graphed and recorder.recorded == 0 and run.trainer._loopwright.run.speed.is_idle


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_groups_of_pairs_are_graphs_of_a_few_shapes(
    kind: str, accumulation: int, tmp_path: Any, recorder: Recorder, only_groups: None
) -> None:
    data, options = samples(96, "pair"), {"max_steps": 10, "gradient_accumulation_steps": accumulation, "speed": "max"}
    plain = train(build(kind, "pair"), data, tmp_path, **{**options, "speed": "off"})
    run = train(build(kind, "pair"), data, tmp_path, **options)
    assert run.plan.layout in IN_GROUPS and run.plan.graphed and not run.plan.linear_loss, run.plan.lines()
    assert 0 < recorder.recorded <= 4 and recorder.replays > 4
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    for name, value in plain.trainer.model.state_dict().items():
        torch.testing.assert_close(run.trainer.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


PAIRS: dict[str, Any] = {"max_steps": 10, "gradient_accumulation_steps": 2, "speed": "max", "kind": InOrder}


@pytest.mark.parametrize("start", [2, 6])
def test_a_resumed_run_of_pairs_is_graphed_to_the_last_bit(
    start: int, tmp_path: Any, recorder: Recorder, only_groups: None
) -> None:
    options = {**PAIRS, "save_strategy": "steps", "save_steps": 2}
    data = samples(120, "pair")
    whole = train(dropping("t5", "pair"), data, tmp_path, **options)
    recorder.replays = 0
    rest = train(dropping("t5", "pair"), data, tmp_path, resume=str(tmp_path / f"checkpoint-{start}"), **options)
    assert whole.plan.few_shapes and rest.plan == whole.plan and exact(whole, rest) and recorder.replays


def test_rows_that_are_added_and_count_are_refused(
    tmp_path: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, only_groups: None
) -> None:
    import loopwright.speed.layouts.rows as layouts

    def spoil(batch: dict[str, Any], missing: int) -> None:
        for name, values in batch.items():
            if missing and isinstance(values, Tensor):
                batch[name] = torch.cat([values, values[:1].expand(missing, *values.shape[1:])])

    monkeypatch.setattr(layouts, "_add_rows", spoil)
    data = samples(48, "pair")
    plain = train(build("t5", "pair"), data, tmp_path, **{**PAIRS, "speed": "off", "max_steps": 4})
    run = train(build("t5", "pair"), data, tmp_path, **{**PAIRS, "max_steps": 4})
    assert run.plan.layout in IN_GROUPS and not run.plan.graphed and recorder.recorded == 0
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)


def test_groups_that_cannot_be_recorded_are_groups_still(
    tmp_path: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, only_groups: None
) -> None:
    def fails(function: Any) -> Any:
        raise RuntimeError("not while recording")

    data = samples(120, "pair")
    plain = train(build("bart", "pair"), data, tmp_path, **{**PAIRS, "speed": "off"})
    monkeypatch.setattr(Acceleration, "graph_recorder", staticmethod(fails))
    run = train(build("bart", "pair"), data, tmp_path, **PAIRS)
    assert run.plan.layout in IN_GROUPS and not run.plan.graphed
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)


def test_groups_without_ignored_labels_are_no_graphs(tmp_path: Any, recorder: Recorder, only_groups: None) -> None:
    """A row without targets needs a label that the loss ignores, and nothing shows that it does."""
    data = [{**each, "labels": torch.tensor([5, 6, 7, 8])} for each in samples(48, "pair")]
    run = train(build("t5", "pair"), data, tmp_path, max_steps=4, speed="max")
    assert run.plan.layout in IN_GROUPS and not run.plan.graphed and recorder.recorded == 0


def test_large_computations_and_short_runs_are_not_recorded(
    tmp_path: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(speed_plan.PER_SECOND, "cpu", 1e6)
    run = train(build("bert", "class"), even(24, "class"), tmp_path, max_steps=4)
    assert not run.plan.graphed
    monkeypatch.setitem(speed_plan.PER_SECOND, "cpu", 5e10)
    monkeypatch.setitem(speed_plan.WORTH_SECONDS, "cpu", 1e3)
    run = train(build("bert", "class"), even(24, "class"), tmp_path, max_steps=4)
    assert not run.plan.graphed
    run = train(build("bert", "class"), even(24, "class"), tmp_path, max_steps=4, speed="max")
    assert run.plan.graphed and recorder.recorded == 1, "max asks for all that is possible"


def test_a_cpu_hears_nothing_of_graphs(tmp_path: Any) -> None:
    run = train(build("bert", "class"), even(24, "class"), tmp_path, max_steps=2, speed="max")
    assert not run.plan.graphed and all(choice.name != GRAPHS for choice in run.plan.choices)


def test_a_recording_that_fails_is_taken_back(
    tmp_path: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(function: Any) -> Any:
        raise RuntimeError("not while recording")

    monkeypatch.setattr(Acceleration, "graph_recorder", staticmethod(fails))
    data = even(24, "class")
    plain = train(dropping("bert", "class"), data, tmp_path, speed="off", max_steps=6)
    with caplog.at_level(logging.INFO, logger="loopwright"):
        run = train(dropping("bert", "class"), data, tmp_path, max_steps=6, strict=True)
    assert run.losses == plain.losses and exact(plain, run)
    assert not run.plan.graphed and reason_of(run) == "not while recording"
    assert run.trainer._loopwright.run.speed_plan["graphed"] is False
    assert caplog.text.count("speed: no CUDA graph: not while recording") == 1


def test_micro_batches_without_targets_run_as_they_are(tmp_path: Any, recorder: Recorder) -> None:
    """The mean over no targets does not exist: recorded, it would make the whole update not a number."""
    data = even(48, "causal")
    for sample in data[::2]:
        sample["labels"][:] = -100
    options = {"max_steps": 10, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    plain = train(build("llama", "causal"), data, tmp_path, speed="off", **options)
    run = train(build("llama", "causal"), data, tmp_path, **options)
    assert run.plan.graphed and 0 < recorder.replays < 17
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)


# ---- rows of a few lengths ---------------------------------------------------------------------------------------


ROWS = {"max_steps": 16, "gradient_accumulation_steps": 1, "learning_rate": 0.1}


def uneven(task: str, count: int = 96) -> list[dict[str, Any]]:
    """Samples of many lengths, the longest of them late."""
    return sorted(samples(count, task, longest=60), key=lambda sample: len(sample["input_ids"]) > 50)


@pytest.mark.parametrize(
    ("kind", "task", "layout"),
    some(
        [
            ("bert", "class", UNPADDED), ("roberta", "class", UNPADDED),
            ("llama", "causal", FLAT), ("bert", "tokens", FLAT),
        ],
        step=2,
    ),
)  # fmt: skip
def test_rows_are_graphs_of_a_few_lengths(
    kind: str, task: str, layout: str, tmp_path: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(speed_plan.PER_LAUNCH, "cpu", 1e-3)
    data = uneven(task)
    plain = train(build(kind, task), data, tmp_path, speed="off", kind=InOrder, **ROWS)
    run = train(build(kind, task), data, tmp_path, kind=InOrder, **ROWS)
    assert run.plan.layout == layout and run.plan.few_shapes, run.plan.lines()
    assert 0 < recorder.recorded <= 4 and recorder.replays > 8
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)
    for name, value in plain.trainer.model.state_dict().items():
        torch.testing.assert_close(run.trainer.model.state_dict()[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("start", some([5, 1, 10, 15], step=2))
def test_a_resumed_run_records_rows_when_the_whole_one_did(start: int, tmp_path: Any, recorder: Recorder) -> None:
    """With dropout, whose draws follow the shapes, to the last bit."""
    options: dict[str, Any] = {**ROWS, "save_strategy": "steps", "save_steps": 1, "kind": InOrder}
    data = uneven("class")
    whole = train(dropping("bert", "class"), data, tmp_path, **options)
    replays, recorder.replays = recorder.replays, 0
    rest = train(dropping("bert", "class"), data, tmp_path, resume=str(tmp_path / f"checkpoint-{start}"), **options)
    assert whole.plan.few_shapes and rest.plan == whole.plan and exact(whole, rest)
    assert rest.trainer._loopwright.run.speed.state_dict() == whole.trainer._loopwright.run.speed.state_dict()
    assert 0 < recorder.replays <= replays


def test_rows_that_cannot_be_recorded_are_rows_still(
    tmp_path: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(function: Any) -> Any:
        raise RuntimeError("not while recording")

    data = uneven("class")
    plain = train(build("bert", "class"), data, tmp_path, speed="off", kind=InOrder, **ROWS)
    monkeypatch.setattr(Acceleration, "graph_recorder", staticmethod(fails))
    run = train(build("bert", "class"), data, tmp_path, kind=InOrder, **ROWS)
    assert run.plan.layout == UNPADDED and not run.plan.graphed and reason_of(run) == "not while recording"
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)


def test_filling_that_changes_the_model_is_no_graph(
    tmp_path: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fills rows up is proved to count for nothing."""
    import loopwright.speed.layouts.rows as layouts

    def spoil(batch: dict[str, Any], axis: Any, samples: Any, width: int) -> None:
        spoiled.append(batch["input_ids"][0, 0].fill_(1))

    spoiled: list[Any] = []
    monkeypatch.setattr(layouts, "_widen", spoil)
    run = train(build("bert", "class"), uneven("class"), tmp_path, **ROWS)
    assert spoiled and run.plan.layout == UNPADDED and not run.plan.graphed and recorder.recorded == 0


# ---- the step --------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Looks at its mask, or cannot do without it."""

    def __init__(self, needs: bool) -> None:
        super().__init__()
        self.layer, self.needs, self.seen = nn.Linear(3, 1), needs, []

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.seen.append(attention_mask is not None)
        if attention_mask is None and self.needs:
            raise TypeError("forward() is missing attention_mask")
        return self.layer(x).square().mean()


def graphed(
    model: nn.Module, given_up: list[str], loss_of: Any = None, *, targets: int = 1, items: int | None = None
) -> GraphedTraining:
    """A graphed step whose micro-batch holds `targets` of the two targets of its update."""
    micro = MicroBatch(Update([{}, {}], items=[targets, 2 - targets], total_items=2), 0, items=items)
    return GraphedTraining(
        model,
        loss_of=loss_of or (lambda inputs, items: model(**inputs)),
        micro_batch=lambda: micro,
        weigh=lambda loss, micro: loss,
        backward=lambda loss: loss.backward(),
        put=dict,
        plain=lambda model, inputs, num_items_in_batch=None: torch.tensor(-1.0),
        give_up=given_up.append,
        tell=lambda text: None,
        recorder=Recorder(),
    )


@pytest.mark.parametrize("needs", [True, False])
def test_a_mask_that_masks_nothing_is_left_out_where_that_is_the_same(needs: bool) -> None:
    model, given_up = Masked(needs), []
    step = graphed(model, given_up, targets=2)
    whole = {"x": torch.ones(2, 3), "attention_mask": torch.ones(2, 3)}
    step(model, whole)
    model.seen.clear()
    assert step(model, whole) > 0 and given_up == []
    assert set(model.seen) == {needs}
    model.seen.clear()
    step(model, {**whole, "attention_mask": torch.tensor([[1.0, 1, 0], [1, 1, 1]])})
    assert set(model.seen) == {True}


def test_a_graph_is_divided_between_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, order = Masked(False), []
    monkeypatch.setattr(GraphedStep, "divide", lambda self: order.append("divide"))
    model.layer.weight.register_hook(lambda gradient: order.append("backward"))
    model.register_forward_hook(lambda *given: order.append("forward"))
    graphed(model, [], targets=2)(model, {"x": torch.ones(2, 3)})
    assert order[-3:] == ["forward", "divide", "backward"] and order.count("divide") == order.count("backward")


def test_a_loss_that_needs_the_number_of_items_is_not_recorded() -> None:
    model, given_up = Masked(False), []
    step = graphed(model, given_up, lambda inputs, items: model(**inputs) * (1 if items is None else items), items=7)
    assert step(model, {"x": torch.ones(2, 3)}, num_items_in_batch=7) == -1.0
    assert len(given_up) == 1 and "not given the number of items" in given_up[0]
    assert step(model, {"x": torch.ones(2, 3)}) == -1.0 and len(given_up) == 1


def test_a_loss_that_is_not_a_number_proves_nothing() -> None:
    model, given_up = Masked(False), []
    step = graphed(model, given_up, targets=2)
    assert step(model, {"x": torch.full((2, 3), float("nan"))}) == -1.0 and given_up == []
    assert step(model, {"x": torch.ones(2, 3)}) > 0 and step.step.reason is None


def test_shares_are_known_where_targets_were_counted() -> None:
    update = Update([{}, {}], items=[3, 0], total_items=3)
    assert MicroBatch(update, 0).share == 1.0 and MicroBatch(update, 1).share is None
    assert MicroBatch(Update([{}]), 0).share is None
    on_device = Update([{}, {}], items=[torch.tensor(3), torch.tensor(1)], total_items=torch.tensor(4))
    assert MicroBatch(on_device, 0).share is None


def test_operations_are_told_by_shapes_or_not_at_all() -> None:
    ids = {"input_ids": torch.ones(4, 8).long(), "labels": torch.ones(4)}
    rows = {"x": torch.ones(5, 16), "labels": torch.ones(5)}
    assert operations_of([ids, rows], 10.0) == 320 and operations_of([rows], 10.0) == 50
    assert operations_of([{"pixel_values": torch.ones(2, 3, 8, 8)}, rows], 10.0) is None
    assert operations_of([[1, 2]], 10.0) is None


def test_a_plan_keeps_that_it_is_graphed() -> None:
    plan = SpeedPlan(graphed=True)
    plan.note(GRAPHS, True, "kernel launches take longer")
    assert plan.changes_anything and SpeedPlan.from_dict(plan.as_dict()) == plan
    assert SpeedPlan.from_dict({**plan.as_dict(), "layout": "as made"}).layout == COLLATED, "of an older checkpoint"
    plan.take_back(GRAPHS, "it failed")
    assert plan.lines() == [f"off  {GRAPHS}: it failed"]
