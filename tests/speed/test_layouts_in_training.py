"""Layouts inside a trainer: when they are tested, what switches them off, and exact resume."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from torch import nn

from loopwright import Trainer, TrainerCallback, TrainingArguments
from loopwright.speed.planner.decision import COLLATED, FLAT, GROUPED, UNPADDED, SpeedPlan
from tests.speed.architectures import build, collate, samples
from tests.speed.training import Run, gradients_of, train

pytest.importorskip("transformers")
DATA = samples(48, "causal")


def fresh() -> nn.Module:
    return build("llama", "causal")


# ---- when ------------------------------------------------------------------------------------------------------------


def test_the_level_says_what_is_tried(tmp_path: Any) -> None:
    """speed="off" tries nothing, "auto" what pays (in a tiny run nothing does), "max" everything."""
    runs = {level: train(fresh(), DATA, tmp_path / level, speed=level, max_steps=3) for level in ("off", "auto", "max")}
    assert runs["off"].trainer._loopwright.run.speed is None
    assert runs["auto"].plan.layout == COLLATED and "too small" in runs["auto"].plan.choices[0].reason
    assert runs["max"].plan.layout == FLAT
    assert runs["off"].losses == runs["auto"].losses
    assert runs["max"].losses == pytest.approx(runs["off"].losses, rel=1e-6)


def test_auto_acts_where_it_pays(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import loopwright.speed.planner.decision as plan

    monkeypatch.setitem(plan.WORTH_SECONDS, "cpu", 0.0)
    run = train(fresh(), DATA, tmp_path, speed="auto")
    assert run.plan.layout == FLAT and not run.plan.linear_loss, "with only 64 classes"


@pytest.mark.parametrize("samples_that_fit", [6, pytest.param(7, marks=pytest.mark.grid)])
def test_an_update_that_only_fits_without_padding_is_proved_in_smaller_micro_batches(
    samples_that_fit: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The normal path runs out of memory on the collator's batches: it is compared on a part of them at a time."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    options = {"max_steps": 3, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    plain = train(fresh(), DATA, tmp_path / "plain", speed="off", **options)
    forward, most = LlamaMLP.forward, samples_that_fit * max(len(sample["input_ids"]) for sample in DATA)

    def small(self: Any, hidden: torch.Tensor) -> Any:
        if hidden.shape[0] * hidden.shape[1] > most:
            raise torch.OutOfMemoryError("out of memory")
        return forward(self, hidden)

    monkeypatch.setattr(LlamaMLP, "forward", small)
    with pytest.raises(torch.OutOfMemoryError):
        train(fresh(), DATA, tmp_path / "off", speed="off", **options)
    run = train(fresh(), DATA, tmp_path / "max", speed="max", **options)
    assert run.plan.layout == FLAT, run.plan.lines()
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)


def test_data_without_padding_is_left_alone_after_some_looking(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import loopwright.speed.planner.decision as plan
    import loopwright.speed.planner.planner as planning

    monkeypatch.setitem(plan.WORTH_SECONDS, "cpu", 0.0)
    monkeypatch.setattr(planning, "LOOKS", 3)
    even = [{name: value[:3] for name, value in sample.items()} for sample in DATA]
    run = train(fresh(), even, tmp_path, speed="auto", max_steps=4)
    assert run.plan.layout == COLLATED and "0% of the tokens are padding" in run.plan.choices[0].reason
    assert run.trainer._loopwright.run.speed.is_idle


@pytest.mark.parametrize("accumulation", [1, 6])
def test_small_micro_batches_without_padding_are_joined(accumulation: int, tmp_path: Any) -> None:
    """One sample at a time has no padding, and costs as many launches as there are samples."""
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulation, "max_steps": 3}
    plain = train(fresh(), DATA, tmp_path, speed="off", **options)
    run = train(fresh(), DATA, tmp_path, speed="max", **options)
    assert run.plan.layout == (FLAT if accumulation > 1 else COLLATED)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(run.gradients[name], gradient, rtol=1e-4, atol=1e-6)
    if accumulation > 1:
        assert "6 micro-batches of" in run.plan.choices[0].reason
        assert all(len(update) < 6 for update in run.shapes), "as many together as the longest sample has tokens"


def test_large_micro_batches_without_padding_stay_as_they_are(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import loopwright.speed.planner.decision as plan

    monkeypatch.setitem(plan.PER_MODULE, "cpu", 0.0)
    run = train(fresh(), DATA, tmp_path, speed="max", per_device_train_batch_size=1, gradient_accumulation_steps=6)
    assert run.plan.layout == COLLATED and "too little padding" in run.plan.choices[0].reason


def test_a_token_budget_is_kept(tmp_path: Any) -> None:
    budget = 64
    run = train(fresh(), DATA, tmp_path, per_device_train_batch_tokens=budget, max_steps=2)
    assert run.plan.layout == FLAT
    assert all(rows * width <= budget for update in run.shapes for rows, width in update)
    assert max(len(update) for update in run.shapes) > 2
    with pytest.raises(Exception, match="per_device_train_batch_tokens needs speed"):
        TrainingArguments(str(tmp_path), per_device_train_batch_tokens=budget, speed="off")


# ---- overrides -------------------------------------------------------------------------------------------------------


class OwnStep(Trainer):
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        assert inputs["attention_mask"].dim() == 2 and len(inputs["input_ids"]) == 6
        return super().training_step(model, inputs, num_items_in_batch)


class OwnLoss(Trainer):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        assert inputs["attention_mask"].dim() == 2
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


class Substeps(TrainerCallback):
    count = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1


def test_an_overridden_training_step_sees_its_own_batches(tmp_path: Any) -> None:
    run = train(fresh(), DATA, tmp_path, kind=OwnStep, speed="max")
    assert run.trainer._loopwright.run.speed is None
    assert "training_step is overridden" in str(run.trainer.speed_report())


def test_an_overridden_loss_keeps_the_form_of_its_inputs(tmp_path: Any) -> None:
    plain = gradients_of(fresh(), DATA, tmp_path, speed="off")
    run = gradients_of(fresh(), DATA, tmp_path, kind=OwnLoss, speed="max")
    assert run.plan.layout.startswith(GROUPED)
    reasons = [choice.reason for choice in run.plan.choices if choice.name == FLAT]
    assert reasons == ["compute_loss is overridden and may read the mask"]
    assert run.loss == pytest.approx(plain.loss, rel=1e-6)


def test_whoever_listens_between_micro_batches_gets_them(tmp_path: Any) -> None:
    listener = Substeps()
    run = train(fresh(), DATA, tmp_path, speed="max", given={"callbacks": [listener]})
    assert run.trainer._loopwright.run.speed is None and listener.count == 1


class Unstable(Trainer):
    """A loss that is another one each time it is asked for, whatever the random state."""

    asked = 0

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.asked += 1
        return super().compute_loss(model, inputs, **kwargs) * (1 + self.asked / 100)


def test_a_loss_that_changes_by_itself_is_left_alone(tmp_path: Any) -> None:
    run = train(fresh(), DATA, tmp_path, kind=Unstable, speed="max")
    assert run.plan.layout == COLLATED


def test_label_smoothing_is_laid_out_too(tmp_path: Any) -> None:
    plain = gradients_of(fresh(), DATA, tmp_path, speed="off", label_smoothing_factor=0.1)
    run = gradients_of(fresh(), DATA, tmp_path, speed="max", label_smoothing_factor=0.1)
    assert run.plan.layout == FLAT, run.plan.lines()
    assert run.loss == pytest.approx(plain.loss, rel=1e-6)


def test_a_sum_and_count_loss_is_laid_out_too(tmp_path: Any) -> None:
    class SumLoss(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            logits = model(**inputs).logits[:, :-1]
            losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            return losses, (labels[:, 1:] != -100).sum()

    plain = gradients_of(fresh(), DATA, tmp_path, kind=SumLoss, speed="off")
    run = gradients_of(fresh(), DATA, tmp_path, kind=SumLoss, speed="max")
    assert run.plan.layout.startswith(GROUPED), run.plan.lines()
    assert run.loss == pytest.approx(plain.loss, rel=1e-9)


def test_a_hook_of_the_users_sees_batches_of_the_form_it_was_written_for(tmp_path: Any) -> None:
    model, seen = fresh(), []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    run = train(model, DATA, tmp_path, speed="max")
    assert run.plan.layout == COLLATED and [shape[0] for shape in seen[-2:]] == [6, 6], "as the collator made them"
    assert any("a hook on model.layers.0" in choice.reason for choice in run.plan.choices)


def test_noise_that_depends_on_the_length_of_rows_keeps_them(tmp_path: Any) -> None:
    """It is drawn anew for every forward, so that nothing can be compared."""
    run = train(fresh(), DATA, tmp_path, speed="max", neftune_noise_alpha=5.0)
    assert run.trainer._loopwright.run.speed is None and "neftune" in str(run.trainer.speed_report())


# ---- batches that differ ---------------------------------------------------------------------------------------------


def test_batches_that_cannot_be_taken_apart_train_as_they_were_made(tmp_path: Any) -> None:
    """An update with a hole in a mask, between updates that are laid out."""

    def run(level: str) -> Run:
        calls = []

        def holey(rows: list[Any]) -> dict[str, torch.Tensor]:
            batch = collate(rows)
            calls.append(1)
            batch["attention_mask"][0, 1] = int(len(calls) != 4)
            return batch

        return train(fresh(), DATA, tmp_path / level, speed=level, max_steps=3, data_collator=holey)

    plain, laid = run("off"), run("max")
    assert laid.plan.layout == FLAT and [len(update) for update in laid.shapes] == [2, 2, 2]
    assert [update[0][0] for update in laid.shapes] == [1, 6, 1], "rows, the collator's own, rows again"
    assert laid.losses == pytest.approx(plain.losses, rel=1e-6)
    assert any("attention_mask has gaps" in text for text in laid.trainer._loopwright.notices.told)


def test_what_tokenizers_collate_is_laid_out_too(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding collators of transformers return a BatchEncoding, which is no dict."""
    from transformers import BatchEncoding

    import loopwright.speed.planner.decision as plan

    monkeypatch.setitem(plan.WORTH_SECONDS, "cpu", 1e-9)
    run = train(fresh(), DATA, tmp_path, speed="auto", data_collator=lambda rows: BatchEncoding(collate(rows)))
    assert run.plan.layout == FLAT, run.plan.lines()


@pytest.mark.parametrize("kind", [None, "mean"])
def test_long_prompts_without_targets_are_no_obstacle(kind: str | None, tmp_path: Any) -> None:
    """The few samples of the proof are cut short, and must still have targets."""
    generator, data = torch.Generator().manual_seed(0), []
    for index in range(24):
        ids = torch.randint(5, 64, ((600, 350, 150, 40)[index % 4],), generator=generator)
        data.append({"input_ids": ids, "labels": torch.where(torch.arange(len(ids)) < 0.8 * len(ids), -100, ids)})
    model = fresh()
    model.accepts_loss_kwargs = kind is None  # told nothing, the model returns the mean of a batch
    options = {"per_device_train_batch_size": 4, "max_steps": 1}
    run = train(model, data, tmp_path, speed="max", **options)
    assert run.plan.layout == FLAT, run.plan.lines()
    assert next(choice for choice in run.plan.choices if choice.name == FLAT).numbers["leak"] == 0.0


# ---- models that do not allow it -------------------------------------------------------------------------------------


class BatchNormed(nn.Module):
    """Every sample sees all others through the statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 64)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> dict[str, Any]:
        hidden = self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2)
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return {"loss": loss}


def test_statistics_of_the_batch_keep_batches_as_they_are(tmp_path: Any) -> None:
    torch.manual_seed(0)
    run = train(BatchNormed(), DATA, tmp_path, speed="max")
    assert run.plan.layout == COLLATED
    assert any("not made of the losses of its samples" in choice.reason for choice in run.plan.choices)


class MaskBlind(BatchNormed):
    """Ignores its mask and looks both ways: padding is part of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> dict[str, Any]:
        hidden = self.embed(input_ids)
        hidden = hidden + hidden.mean(1, keepdim=True)
        return {"loss": nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def test_a_model_that_computes_with_its_padding_keeps_it(tmp_path: Any) -> None:
    torch.manual_seed(0)
    run = train(MaskBlind(), DATA, tmp_path, speed="max")
    assert run.plan.layout == COLLATED
    assert any("changes with its padding" in choice.reason for choice in run.plan.choices)


def test_a_plain_module_is_grouped(tmp_path: Any) -> None:
    class Plain(MaskBlind):
        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> dict[str, Any]:
            mask = attention_mask.unsqueeze(-1).to(self.embed.weight.dtype)
            hidden = self.embed(input_ids) * mask
            hidden = hidden + hidden.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
            return {"loss": nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}

    torch.manual_seed(0)
    run = train(Plain(), DATA, tmp_path, speed="max")
    assert run.plan.layout == GROUPED


# ---- the rest of training --------------------------------------------------------------------------------------------


def exact(a: Run, b: Run) -> bool:
    mine, theirs = a.trainer.model.state_dict(), b.trainer.model.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(("kind", "task", "layout"), [("llama", "causal", FLAT), ("bert", "class", UNPADDED)])
def test_a_resumed_run_is_laid_out_as_before_to_the_last_bit(kind: str, task: str, layout: str, tmp_path: Any) -> None:
    data = samples(40, task)
    options: dict[str, Any] = {"speed": "max", "max_steps": 6, "learning_rate": 0.1, "optim": "adamw_torch"}
    whole = train(build(kind, task), data, tmp_path / "whole", **options)
    saving = {**options, "save_strategy": "steps", "save_steps": 2}
    train(build(kind, task), data, tmp_path / "cut", **saving)
    rest = train(build(kind, task), data, tmp_path / "cut", resume=str(tmp_path / "cut" / "checkpoint-2"), **saving)
    assert rest.plan.layout == layout and exact(whole, rest)
    assert rest.shapes == whole.shapes[2:]


def test_dropout_run_twice_is_the_same_run(tmp_path: Any) -> None:
    def dropping() -> nn.Module:
        model = build("bert", "class")
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        return model

    runs = [train(dropping(), samples(40, "class"), tmp_path, speed="max", max_steps=3) for _ in range(2)]
    assert runs[0].plan.layout == UNPADDED and runs[0].losses == runs[1].losses and exact(*runs)


def test_evaluation_and_saving_see_the_model_as_it_is(tmp_path: Any) -> None:
    data = samples(24, "causal")
    options = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "learning_rate": 0.0}
    seen = {}
    for level in ("off", "max"):
        run = train(fresh(), data, tmp_path, speed=level, given={"eval_dataset": data}, **options)
        seen[level] = [row["eval_loss"] for row in run.trainer.state.log_history if "eval_loss" in row]
        assert run.trainer.model.config._attn_implementation == "sdpa"
        assert "forward" not in run.trainer.model.lm_head.__dict__
    assert seen["off"] == pytest.approx(seen["max"], rel=1e-6)  # evaluations are laid out too


def test_memory_that_runs_out_makes_rows_shorter(tmp_path: Any) -> None:
    class Small(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            if inputs["input_ids"].numel() > 120 and model.training and not self._loopwright.is_probing:
                raise torch.OutOfMemoryError("a small device")
            return super().compute_loss(model, inputs, return_outputs, **kwargs)

    plain = train(fresh(), DATA, tmp_path, speed="off", max_steps=3)
    run = train(fresh(), DATA, tmp_path, kind=Small, speed="max", max_steps=3, auto_find_batch_size=True)
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)
    assert run.plan.budget and all(rows * width <= 120 for rows, width in run.shapes[-1])


def test_unpadded_batches_are_laid_out_anew_and_never_cut_in_two(tmp_path: Any) -> None:
    """Cutting one in two would cut its list of real tokens too."""

    data, model = samples(24, "class"), build("bert", "class")
    plain = train(build("bert", "class"), data, tmp_path, speed="off", max_steps=2)
    forward = model.bert.encoder.layer[0].forward
    model.bert.encoder.layer[0].forward = lambda hidden, *args, **kwargs: _fits(forward, hidden, *args, **kwargs)
    run = train(model, data, tmp_path, speed="max", max_steps=2, auto_find_batch_size=True)
    assert run.plan.layout == UNPADDED and run.plan.budget and run.trainer._loopwright.run.micro_split == 1
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)


def _fits(forward: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if torch.is_grad_enabled() and hidden.requires_grad and hidden.shape[1] > 160:
        raise torch.OutOfMemoryError("a small device")
    return forward(hidden, *args, **kwargs)


def test_the_plan_is_told_and_kept(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="loopwright"):  # what everybody sees
        run = train(fresh(), DATA, tmp_path, speed="max", max_steps=2)
    assert "on   flat:" in caplog.text and "of the tokens were padding; same loss and gradient" in caplog.text
    kept = SpeedPlan.from_dict(json.loads((tmp_path / "speed_plan.json").read_text()))
    assert kept == run.plan
    report = run.trainer.speed_report()
    assert "flat" in str(report) and report.as_dict()["choices"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_is_left_out(side: str, tmp_path: Any) -> None:
    def to_the_left(rows: list[Any]) -> dict[str, torch.Tensor]:
        batch = collate(rows)
        batch["labels"][:, 0] = -100  # or it would be predicted from padding, where there is some
        shifts = [batch["input_ids"].shape[1] - int(length) for length in batch["attention_mask"].sum(1)]
        rolled = {name: [row.roll(by) for row, by in zip(value, shifts, strict=True)] for name, value in batch.items()}
        return {name: torch.stack(rows) for name, rows in rolled.items()}

    chosen = {"left": to_the_left, "right": collate}[side]
    plain = gradients_of(fresh(), DATA, tmp_path, speed="off", data_collator=chosen)
    run = gradients_of(fresh(), DATA, tmp_path, speed="max", data_collator=chosen)
    assert run.plan.layout == FLAT, run.plan.lines()
    assert run.loss == pytest.approx(plain.loss, rel=1e-6)


class NoDenseMask(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        assert "attention_mask" not in inputs or inputs["attention_mask"].dim() == 2, "a mask that is none of theirs"
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


def test_a_plan_is_not_taken_up_by_a_trainer_with_another_loss(tmp_path: Any) -> None:
    options: dict[str, Any] = {"speed": "max", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    first = train(build("llama", "causal"), DATA[:36], tmp_path / "first", **options)
    assert first.plan.layout == FLAT
    resume = str(tmp_path / "first" / "checkpoint-2")
    other = train(build("llama", "causal"), DATA[:36], tmp_path / "other", kind=NoDenseMask, resume=resume, **options)
    assert other.plan.layout not in (FLAT, COLLATED)
    assert other.losses[-2:] == pytest.approx(first.losses[-2:], rel=1e-5)


def test_a_run_that_goes_on_elsewhere_has_its_plan_there(tmp_path: Any) -> None:
    options: dict[str, Any] = {"speed": "max", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    train(build("llama", "causal"), DATA[:36], tmp_path / "first", **options)
    resume = str(tmp_path / "first" / "checkpoint-2")
    train(build("llama", "causal"), DATA[:36], tmp_path / "second", resume=resume, **options)
    plans = [json.loads((tmp_path / name / "speed_plan.json").read_text()) for name in ("first", "second")]
    assert plans[0] == plans[1]
