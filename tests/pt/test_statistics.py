"""Tensors that change without their version counters: running statistics, and writes through `.data`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.pt.checkpoint.module_state import ModuleState
from loopwright.pt.restoring.sandbox import sandbox
from tests.models import Tokens, made, samples, trainer_of

DATA = samples((8, 9, 6, 12, 7, 3, 8, 5))
RUN = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 1, "per_device_train_batch_size": 1,
       "learning_rate": 0.1, "speed": "off"}  # fmt: skip
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Normed(Tokens):
    """Its loss depends on statistics: in the state dict, outside of it, and in a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        size = self.mix.weight.shape[0]
        self.norm, self.unsaved = nn.BatchNorm1d(size), nn.BatchNorm1d(size)
        for name in STATISTICS:
            value = self.unsaved._buffers.pop(name)
            self.unsaved.register_buffer(name, value, persistent=False)
        self.average = nn.Parameter(torch.zeros(size), requires_grad=False)

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> dict[str, Tensor]:
        outputs = super().forward(input_ids, attention_mask, labels)
        if self.training:
            hidden = self.mix(self.embed(input_ids)).flatten(0, 1)
            extra = self.norm(hidden) * self.norm.running_mean + self.unsaved(hidden) * self.unsaved.running_var
            self.average.data.mul_(0.9).add_(hidden.detach().mean(0))
            outputs["loss"] = outputs["loss"] + (extra * self.average).mean()
        return outputs


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    model = made(Normed)
    torch.manual_seed(6)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["mix"])).double()


def everything(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a model."""
    return {name: each.detach().clone() for name, each in [*model.named_parameters(), *model.named_buffers()]}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    theirs = everything(other)
    for name, value in everything(one).items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize("build", [lambda: made(Normed), lora], ids=["whole", "lora"])
def test_statistics_resume_to_the_bit(build: Any, step: int, tmp_path: Path) -> None:
    whole = trainer_of(build(), DATA, tmp_path / "run", **RUN)
    fresh = everything(whole.model)
    whole.train()
    changed = {name for name, value in everything(whole.model).items() if not torch.equal(value, fresh[name])}
    for part in (*(f"{norm}.{name}" for norm in ("norm", "unsaved") for name in STATISTICS), "average"):
        assert any(name.endswith(part) for name in changed), part
    again = trainer_of(build(), DATA, tmp_path / "again", **RUN)
    again.train(resume_from_checkpoint=str(tmp_path / f"run/checkpoint-{step}"))
    assert_same(again.model, whole.model)


def test_statistics_that_the_format_of_transformers_leaves_out_are_reported(tmp_path: Path) -> None:
    trainer = trainer_of(lora(), DATA, tmp_path, checkpoint_format="transformers", **{**RUN, "max_steps": 2})
    trainer.train()
    found = [text for text in trainer._loopwright.notices.told if "4 other tensors that training has changed" in text]
    assert len(found) == 1 and "checkpoint_format='native'" in found[0], trainer._loopwright.notices.told


def test_going_back_restores_the_statistics_of_the_start(tmp_path: Path) -> None:
    """A state in which a buffer had not changed yet: a copy of the buffer at the start is needed."""
    model = made(Normed)
    state = ModuleState(model)
    before, saved = everything(model), state.state_dict(print)
    assert saved == {"values": {}, "gone": []}
    for _ in range(2):
        model.unsaved.running_mean.data.fill_(3.0)
        state.load_state_dict(saved, print)
        assert torch.equal(model.unsaved.running_mean, before["unsaved.running_mean"])


@pytest.mark.parametrize("write", [lambda x: x.data.add_(1), lambda x: x.add_(1)], ids=["data", "in place"])
def test_a_write_to_any_plain_tensor_is_found(write: Any) -> None:
    model = made(Normed)
    model.table, model.nested = torch.zeros(3), {"a": [torch.ones(2), 5]}
    for name, tensor in ((".table", model.table), (".nested", model.nested["a"][0])):
        state = ModuleState(model)
        write(tensor)
        assert list(state.state_dict(print)["values"]) == [name]


def test_equal_content_is_no_change() -> None:
    model = made(Normed)
    model.table = torch.zeros(3)
    state = ModuleState(model)
    model.table = torch.zeros(3)
    assert state.state_dict(print) == {"values": {}, "gone": []}


def test_other_names_of_weights_stay_names_of_weights() -> None:
    """They would be separate tensors if a checkpoint held them as values."""
    model = made(Normed)
    model.mean, model.view = model.norm.running_mean, {"weight": model.mix.weight.data}
    state = ModuleState(model)
    model.norm.running_mean.add_(1)
    model.mix.weight.data.add_(1)
    model.norm.train()(torch.randn(4, 6, dtype=torch.float64))
    assert state.state_dict(print) == {"values": {}, "gone": []}
    state.load_state_dict({"values": {}, "gone": []}, print)
    assert model.mean is model.norm.running_mean and model.view["weight"].data_ptr() == model.mix.weight.data_ptr()


def test_only_buffers_that_differ_from_those_of_rank_0_are_saved_for_a_rank() -> None:
    """Also one that rank 0 alone has changed."""
    first, second = made(Normed), made(Normed)
    states = ModuleState(first), ModuleState(second)
    first.norm.running_mean.data.fill_(2.0)
    second.norm(torch.randn(4, 6, dtype=torch.float64))
    saved = states[1].own_buffers(states[0].buffer_hashes(), print)
    assert set(saved) == {f"norm.{name}" for name in STATISTICS}
    resumed = copy.deepcopy(first)
    ModuleState(resumed).load_own_buffers(saved)
    assert_same(resumed.norm, second.norm)
    first.norm.load_state_dict(second.norm.state_dict())
    assert states[1].own_buffers(states[0].buffer_hashes(), print) == {}


def test_a_sandbox_undoes_writes_through_data() -> None:
    model = made(Normed)
    model.table = torch.zeros(3)
    with sandbox(model):
        model.table.data.add_(1)
        model.norm(torch.randn(4, 6, dtype=torch.float64))
    assert model.table.tolist() == [0, 0, 0] and int(model.norm.num_batches_tracked) == 0
