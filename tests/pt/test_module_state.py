"""What training changes in modules outside the state dict comes back on resuming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopwright
from loopwright.pt.checkpoint.module_state import LARGEST, ModuleState
from tests import models
from tests.models import Tokens, made, samples, trainer_of, weights
from tests.spreads import spread

DATA = samples((40, 9, 60, 12, 7, 30, 8, 5))
RUN = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 1, "per_device_train_batch_size": 1,
       "learning_rate": 0.1}  # fmt: skip


def rope(kind: str, **options: Any) -> nn.Module:
    parameters = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0, **options}
    return models.llama(max_position_embeddings=16, rope_parameters=parameters)


def longrope() -> nn.Module:
    return rope("longrope", short_factor=[1.0, 1.0], long_factor=[4.0, 9.0], original_max_position_embeddings=16)


class Counting(Tokens):
    """Scales its loss by what it keeps for itself: a count, a history, a running value and a carried state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.options = 0, list[int](), {"scale": 1.0}
        self.register_buffer("running", torch.zeros(3), persistent=False)
        self.carried: Tensor | None = None

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> dict[str, Tensor]:
        outputs = super().forward(input_ids, attention_mask, labels)
        if self.training:
            self.calls += 1
            self.seen.append(int(input_ids.shape[1]))
            self.options["scale"] *= 1.1
            self.running.mul_(0.5).add_(outputs["logits"].detach().mean())
            self.carried = outputs["logits"].detach().mean(dim=(0, 1))
            scale = 1 + self.calls + len(self.seen) + self.options["scale"] + self.running.sum() + self.carried.sum()
            outputs["loss"] = outputs["loss"] * scale
        return outputs


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dynamic": lambda: rope("dynamic"),
    "longrope": longrope,
    "counting": lambda: made(Counting),
}


@pytest.mark.parametrize(("name", "step"), spread(MODELS, [1, 3, 6]))
def test_a_run_resumed_anywhere_is_the_run_that_was(name: str, step: int, tmp_path: Path) -> None:
    options = {**RUN, "speed": "off"}
    whole = trainer_of(MODELS[name](), DATA, tmp_path / "run", **options)
    whole.train()
    fresh = MODELS[name]()
    again = trainer_of(fresh, DATA, tmp_path / "again", **options)
    again.train(resume_from_checkpoint=str(tmp_path / f"run/checkpoint-{step}"))
    for key, value in weights(again.model).items():
        assert torch.equal(value, weights(whole.model)[key]), key
    assert ModuleState(fresh).state_dict(print) == {"values": {}, "gone": []}


@pytest.mark.parametrize("name", MODELS)
def test_going_back_in_one_process_takes_back_what_came_later(name: str, tmp_path: Path) -> None:
    whole = trainer_of(MODELS[name](), DATA, tmp_path / "run", speed="off", **RUN)
    whole.train()
    after = weights(whole.model)
    whole.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    for key, value in weights(whole.model).items():
        assert torch.equal(value, after[key]), key


def test_the_best_model_comes_with_the_state_of_its_modules(tmp_path: Path) -> None:
    options = {**RUN, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "speed": "off",
               "metric_for_best_model": "loss", "greater_is_better": False, "eval_dataset": DATA[:2]}  # fmt: skip
    trainer = trainer_of(made(Counting), DATA, tmp_path, **options)
    trainer.train()
    assert trainer.model.calls == trainer.state.best_global_step < 8


def test_only_what_training_changes_is_kept(tmp_path: Path) -> None:
    model = made(Counting)
    model.untouched, model.table = 7, torch.arange(5)
    state = ModuleState(model)
    model.calls += 1
    assert state.state_dict(print) == {"values": {".calls": 1}, "gone": []}


def test_what_is_too_large_is_told() -> None:
    model, told = made(Counting), list[str]()
    state = ModuleState(model)
    model.activations = torch.zeros(LARGEST + 1, dtype=torch.uint8)
    assert state.state_dict(told.append)["values"] == {}
    assert len(told) == 1 and ".activations" in told[0] and "persistent buffer" in told[0]


VALUES = [True, 3, -1.5, float("inf"), "text", None, [1, [2.0]], (1, "a"), {"a": 1, 3: [None]},
          torch.tensor(5), torch.zeros(2, 0), torch.tensor([0.1, -2.0], dtype=torch.bfloat16),
          torch.tensor([True, False]), {"cache": (torch.arange(3), 4)}]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_every_kind_of_value_comes_back(value: Any) -> None:
    one, other = Tokens(), Tokens()
    state, target = ModuleState(one), ModuleState(other)
    one.mix.value = value
    saved = state.state_dict(print)
    target.load_state_dict(saved, print)
    assert str(other.mix.value) == str(value) and type(other.mix.value) is type(value)
    assert target.state_dict(print) == saved
    target.load_state_dict({"values": {}, "gone": []}, print)
    assert not hasattr(other.mix, "value")


class Lazy(Tokens):
    """Installs something at its first call, and remembers that it has."""

    ready, what = False, "hook"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.ready:
            self.ready = True
            self.made = object() if self.what == "object" else None
            if self.what == "hook":
                self.mix.register_forward_hook(lambda *args: None)
        if self.what != "nothing":
            assert self.mix._forward_hooks if self.what == "hook" else self.made is not None, "not installed"
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("what", ["hook", "object", "nothing"])
def test_a_flag_comes_back_only_without_what_it_stands_for(what: str, tmp_path: Path) -> None:
    def lazy() -> Any:
        model = made(Lazy)
        model.what = what
        return model

    whole = trainer_of(lazy(), DATA, tmp_path / "run", speed="off", **RUN)
    whole.train()
    assert ("ready" in str(whole._loopwright.saving.modules.state_dict(print)["values"])) == (what == "nothing")
    assert bool([text for text in whole._loopwright.notices.told if "together with made" in text]) == (what == "object")
    again = trainer_of(lazy(), DATA, tmp_path / "again", speed="off", **RUN)
    again.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    assert again.state.global_step == 8
    if what == "hook":
        again.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
        assert len(again.model.mix._forward_hooks) == 1, "what is there is not installed again"


def test_two_names_of_one_tensor_are_not_confused() -> None:
    one, other = Tokens(), Tokens()
    for model in (one, other):
        model.first = torch.ones(2)
        model.register_buffer("second", model.first, persistent=False)
    state, target = ModuleState(one), ModuleState(other)
    one.second = torch.zeros(2)
    target.load_state_dict(state.state_dict(print), print)
    assert other.first.tolist() == [1, 1] and other.second.tolist() == [0, 0]


def test_loading_again_is_not_needed_where_nothing_was_saved(tmp_path: Path) -> None:
    """Checkpoints of before have no such part."""
    trainer = trainer_of(made(Counting), DATA, tmp_path, speed="off", **RUN)
    trainer._loopwright.saving.start_modules()
    trainer.model.calls = 5
    trainer._loopwright.saving._resume_modules({})
    assert trainer.model.calls == 5 and isinstance(trainer, loopwright.Trainer)


class Freezing(loopwright.TrainerCallback):
    """Freezes the first parameter after a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            next(kwargs["model"].parameters()).requires_grad_(False)


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("speed", ["off", "max"])
def test_parameters_that_a_callback_froze_are_frozen_after_resuming(speed: str, step: int, tmp_path: Path) -> None:
    def trainer(folder: str) -> Any:
        options = {**RUN, "speed": speed, "callbacks": [Freezing()]}
        return trainer_of(made(Tokens), DATA, tmp_path / folder, **options)

    whole, resumed = trainer("whole"), trainer("resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / f"whole/checkpoint-{step}"))
    for key, value in weights(resumed.model).items():
        assert torch.equal(value, weights(whole.model)[key]), key
    assert not next(resumed.model.parameters()).requires_grad
