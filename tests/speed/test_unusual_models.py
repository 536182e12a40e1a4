"""Models unlike usual ones: adapters, prompts, losses between samples. They train as they do with speed="off"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright.speed.planner.decision import COLLATED, FLAT, GROUPED
from tests.speed.architectures import SIZES, build, collate, on_the_left, samples
from tests.speed.training import off_and_max

transformers = pytest.importorskip("transformers")
DATA = samples(36, "causal")


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

    assert off_and_max(make, samples(36, "class"), tmp_path).plan.layout == COLLATED


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

    assert off_and_max(make, DATA, tmp_path).plan.layout not in (COLLATED, FLAT)


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
    assert run.plan.layout == COLLATED
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
    assert run.plan.layout == COLLATED and run.plan.linear_loss, run.plan.lines()
