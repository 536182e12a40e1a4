"""Uses that are odd and reasonable: what is trained must be what it is with speed="off"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright import Trainer
from loopwright.speed.planner.decision import AS_MADE, FLAT, GROUPED, UNMASKED, UNPADDED
from loopwright.speed.proof.distance import gradient_distance
from tests.speed.architectures import SIZES, WithFeatures, build, collate, on_the_left, samples
from tests.speed.training import InOrder, Run, train

transformers = pytest.importorskip("transformers")
DATA = samples(36, "causal")


def off_and_max(make: Any, data: Any, folder: Path, **arguments: Any) -> Run:
    """The run with all that is proved, whose losses and last gradient are those of a plain run."""
    plain = train(make(), data, folder / "off", speed="off", learning_rate=0.05, max_steps=3, **arguments)
    fast = train(make(), data, folder / "max", speed="max", learning_rate=0.05, max_steps=3, **arguments)
    assert fast.losses == pytest.approx(plain.losses, rel=1e-5)
    assert gradient_distance([*plain.gradients.values()], [*fast.gradients.values()]) < 1e-5
    return fast


class Contrast(nn.Module):
    """Every sample is compared with the others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = build("bert", "class").bert
        self.config = self.bert.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        first = F.normalize(self.bert(input_ids, attention_mask=attention_mask).last_hidden_state[:, 0], dim=-1)
        likeness = 3 * first @ first.T + 0.1 * labels
        return {"loss": F.cross_entropy(likeness, torch.arange(len(first)))}


def test_a_loss_between_samples_is_found_however_short_they_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Contrast().state_dict()

    def make() -> nn.Module:
        found = Contrast()
        found.load_state_dict(model)
        return found

    assert off_and_max(make, samples(36, "class"), tmp_path).plan.layout == AS_MADE


class Positions:
    """A collator whose positions are the usual ones for the first update, and later others."""

    def __init__(self, later: Tensor) -> None:
        self.later, self.calls = later, 0

    def __call__(self, batch: list[dict[str, Any]]) -> dict[str, Any]:
        self.calls += 1
        made = collate(batch)
        places = (torch.arange(64) if self.calls <= 2 else self.later)[: made["input_ids"].shape[1]]
        return {**made, "position_ids": places.expand_as(made["input_ids"])}


class SameLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


MOVED = torch.arange(64).clamp(max=55) + 7
JUMPING = torch.where(torch.arange(64) < 4, torch.arange(64), (torch.arange(64) + 5).clamp(max=60))


@pytest.mark.parametrize("later", [MOVED, JUMPING])
@pytest.mark.parametrize(("kind", "layout"), [(Trainer, FLAT), (SameLoss, UNMASKED)])
def test_positions_of_the_collator_are_kept_also_when_they_change(
    kind: type[Trainer], layout: str, later: Tensor, tmp_path: Path
) -> None:
    runs = [
        train(
            build("gpt2", "causal"), DATA, tmp_path, data_collator=Positions(later), speed=speed, max_steps=3, kind=kind
        )
        for speed in ("off", "max")
    ]
    assert runs[1].plan.layout == layout
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)


class ChangingSides:
    """Padding on the right in the first update, later on the left."""

    calls = 0

    def __call__(self, batch: list[dict[str, Any]]) -> dict[str, Any]:
        self.calls += 1
        return collate(batch) if self.calls <= 2 else on_the_left(collate(batch))


def test_padding_that_changes_sides_is_masked(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kind": SameLoss, "max_steps": 3}
    data = [{**sample, "labels": sample["labels"].index_fill(0, torch.tensor(0), -100)} for sample in DATA]
    runs = [
        train(build("llama", "causal"), data, tmp_path, data_collator=ChangingSides(), speed=speed, **options)
        for speed in ("off", "max")
    ]
    assert runs[1].plan.layout == UNMASKED
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)


class Flattening:
    """Rows without padding and mask: of one sample at first, later of several."""

    calls = 0

    def __call__(self, batch: list[dict[str, Any]]) -> dict[str, Any]:
        self.calls += 1
        made = transformers.DataCollatorWithFlattening()(batch[:1] if self.calls <= 2 else batch)
        made["labels"][:, -1] = -100  # a last token that need not be computed
        return dict(made)


def test_rows_that_hold_several_documents_already_stay_apart(tmp_path: Path) -> None:
    runs = [
        train(build("llama", "causal"), DATA, tmp_path, data_collator=Flattening(), speed=speed, max_steps=3)
        for speed in ("off", "max")
    ]
    assert runs[1].plan.layout == FLAT
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)


class MeanOfAll(nn.Module):
    """Takes padding for text."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings, self.head = nn.Embedding(64, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.head(self.embeddings(input_ids).mean(1)), labels)}


@pytest.mark.parametrize("length", [12, 300])
def test_padding_that_is_minded_is_found_when_all_samples_are_equally_long(length: int, tmp_path: Path) -> None:
    data = [{"input_ids": [3 + (7 * i + j) % 50 for j in range(length)], "labels": i % 3} for i in range(36)]

    def to_width(batch: list[dict[str, Any]]) -> dict[str, Any]:
        ids = F.pad(torch.tensor([sample["input_ids"] for sample in batch]), (0, 40))
        return {
            "input_ids": ids,
            "attention_mask": (ids > 0).long(),
            "labels": torch.tensor([s["labels"] for s in batch]),
        }

    assert off_and_max(MeanOfAll, data, tmp_path, data_collator=to_width).plan.layout == AS_MADE


def test_as_many_classes_as_tokens_are_still_classes(tmp_path: Path) -> None:
    data = samples(36, "class")
    width = max(len(sample["input_ids"]) for sample in data)

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = build("bert", "class").config
        config.num_labels, config.problem_type = width, "multi_label_classification"
        return transformers.BertForSequenceClassification(config)

    def to_width(batch: list[dict[str, Any]]) -> dict[str, Any]:
        made = collate(batch)
        wide = {name: F.pad(value, (0, width - value.shape[1])) for name, value in made.items() if name != "labels"}
        return {**wide, "labels": (torch.arange(width) % 3 == made["labels"][:, None] % 3).float()}

    assert off_and_max(make, data, tmp_path, data_collator=to_width).plan.layout == UNPADDED


def lora(**options: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    return peft.get_peft_model(build("llama", "causal"), config)


def test_adapters_are_part_of_what_is_proved(tmp_path: Path) -> None:
    run = off_and_max(lambda: lora(target_modules=["q_proj"]), DATA, tmp_path)
    assert run.plan.layout == FLAT and run.plan.linear_loss


def test_a_head_that_is_wrapped_keeps_its_logits_and_that_is_said(tmp_path: Path) -> None:
    run = off_and_max(lambda: lora(target_modules=["q_proj"], modules_to_save=["lm_head"]), DATA, tmp_path)
    assert not run.plan.linear_loss
    assert any("peft's ModulesToSaveWrapper" in line for line in run.plan.lines()), run.plan.lines()


def test_prompts_that_are_learned_are_proved_with_the_prompt(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def make() -> nn.Module:
        torch.manual_seed(1)
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        return peft.get_peft_model(build("llama", "causal"), config)

    assert off_and_max(make, DATA, tmp_path).plan.layout not in (AS_MADE, FLAT)


class OwnLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        assert "attention_mask" not in inputs or inputs["attention_mask"].dim() == 2, "a mask that is none of theirs"
        return super().compute_loss(model, inputs, return_outputs, **kwargs)


def test_a_plan_is_not_taken_up_by_a_trainer_with_another_loss(tmp_path: Path) -> None:
    options: dict[str, Any] = {"speed": "max", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    first = train(build("llama", "causal"), DATA, tmp_path / "first", **options)
    assert first.plan.layout == FLAT
    resume = str(tmp_path / "first" / "checkpoint-2")
    other = train(build("llama", "causal"), DATA, tmp_path / "other", kind=OwnLoss, resume=resume, **options)
    assert other.plan.layout not in (FLAT, AS_MADE)
    assert other.losses[-2:] == pytest.approx(first.losses[-2:], rel=1e-5)


def test_a_run_that_goes_on_elsewhere_has_its_plan_there(tmp_path: Path) -> None:
    options: dict[str, Any] = {"speed": "max", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    train(build("llama", "causal"), DATA, tmp_path / "first", **options)
    resume = str(tmp_path / "first" / "checkpoint-2")
    train(build("llama", "causal"), DATA, tmp_path / "second", resume=resume, **options)
    plans = [json.loads((tmp_path / name / "speed_plan.json").read_text()) for name in ("first", "second")]
    assert plans[0] == plans[1]


class OnlyWhileTraining(nn.Module):
    """Refuses to run with dropout off."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("llama", "causal")
        self.config = self.inner.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        assert self.training, "this model only trains"
        return self.inner(input_ids, attention_mask=attention_mask, labels=labels)


def test_what_cannot_be_compared_trains_as_it_is(tmp_path: Path) -> None:
    run = off_and_max(OnlyWhileTraining, DATA, tmp_path)
    assert run.plan.layout == AS_MADE
    assert "this model only trains" in run.plan.lines()[0]


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_model_that_knows_padding_by_its_token_is_grouped(side: str, tmp_path: Path) -> None:
    """As decoders that classify by the last token that is no padding."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = build("llama", "causal").config
        config.num_labels = 3
        return transformers.LlamaForSequenceClassification(config)

    def padded(batch: list[dict[str, Any]]) -> dict[str, Any]:
        return on_the_left(collate(batch)) if side == "left" else collate(batch)

    assert off_and_max(make, samples(36, "class"), tmp_path, data_collator=padded).plan.layout == GROUPED


def test_a_loss_over_the_batch_leaves_the_head_as_it_is(tmp_path: Path) -> None:
    """Experts that are balanced over a batch forbid layouts, and have nothing to do with logits."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
        config = transformers.MixtralConfig(
            **sizes, num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1
        )
        return transformers.MixtralForCausalLM(config)

    run = off_and_max(make, DATA, tmp_path)
    assert run.plan.layout == AS_MADE and run.plan.linear_loss, run.plan.lines()


def test_as_many_features_as_tokens_are_still_features(tmp_path: Path) -> None:
    lengths = [13 if i < 12 else 12 for i in range(36)]  # the first update is another one than the rest
    data = [
        {"input_ids": 3 + (7 * i + torch.arange(n if i % 3 else 6)) % 50, "labels": torch.tensor(i % 3), "place": i}
        for i, n in enumerate(lengths)
    ]

    def with_features(batch: list[dict[str, Any]]) -> dict[str, Any]:
        made = collate([{name: sample[name] for name in ("input_ids", "labels")} for sample in batch])
        return {
            **made,
            "features": torch.tensor([[sample["place"] * j % 7 / 7 for j in range(12)] for sample in batch]),
        }

    options: dict[str, Any] = {"kind": InOrder, "data_collator": with_features, "remove_unused_columns": False,
                               "max_steps": 3, "learning_rate": 0.05}  # fmt: skip
    plain = train(WithFeatures(), data, tmp_path, speed="off", **options)
    fast = train(WithFeatures(), data, tmp_path, speed="auto", per_device_train_batch_tokens=40, **options)
    assert fast.plan.layout == GROUPED and fast.losses == pytest.approx(plain.losses, rel=1e-5)
