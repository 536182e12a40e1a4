"""trainer.find_lr(), the notice about router losses, and gradient checkpointing of some layers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import loopwright
from loopwright import ArgumentsError, DataError, ModelError
from tests.models import Tokens, llama, made, pad, samples, trainer_of, weights

HAS_GPU = torch.accelerator.is_available()
BRIEF: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 1}


def random_states() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "param_groups": {"head": {"lr_scale": 2}}}])
def test_find_lr_suggests_a_rate_and_leaves_everything_as_it_was(tmp_path: Any, options: dict[str, Any]) -> None:
    model = made(Tokens)
    model.extra = torch.nn.BatchNorm1d(2)
    runs = []
    for tested in (False, True):
        torch.manual_seed(3)
        given = {"optim": "adamw_torch", "lr_scheduler_type": "linear", "learning_rate": 0.01, "num_train_epochs": 2,
                 "per_device_train_batch_size": 4, **options}  # fmt: skip
        trainer = trainer_of(model, samples(), tmp_path / str(tested), **given)
        if tested:
            before, states = weights(trainer.model), random_states()
            found = trainer.find_lr(min_lr=1e-5, max_lr=100.0, num_steps=60)
            assert states == random_states() and trainer.optimizer is None and trainer.state.global_step == 0
            assert all(torch.equal(before[name], value) for name, value in weights(trainer.model).items())
            assert all(p.grad is None for p in trainer.model.parameters())
            assert len(found.rates) == len(found.losses) > 10 and found.suggestion is not None
            assert 1e-4 < found.suggestion < 10
            assert found.rates == sorted(found.rates)
        trainer.train()
        runs.append((weights(trainer.model), [row["loss"] for row in trainer.state.log_history if "loss" in row]))
    assert runs[0][1] == runs[1][1]
    assert all(torch.equal(runs[0][0][name], value) for name, value in runs[1][0].items())


def test_find_lr_refuses_what_it_would_use_up(tmp_path: Any) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(samples())

    trainer = trainer_of(made(Tokens), Stream(), tmp_path, collator=pad, **BRIEF)
    with pytest.raises(DataError, match="would use up samples of a stream"):
        trainer.find_lr()
    with pytest.raises(ArgumentsError, match="min_lr must be above 0 and below max_lr"):
        trainer.find_lr(min_lr=1.0, max_lr=0.1)


def mixtral(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=13, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, num_local_experts=3, max_position_embeddings=128, pad_token_id=0, **options,
    )  # fmt: skip
    return made(transformers.MixtralForCausalLM, config).float()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "has 3 experts and trains its router, but without the router loss"),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.0}, "router_aux_loss_coef=0 leaves out the loss"),
        ({"output_router_logits": True}, ""),
    ],
    ids=["off", "zero", "on"],
)
def test_a_model_with_experts_is_told_when_its_router_loss_is_missing(
    tmp_path: Any, caplog: Any, options: dict[str, Any], words: str
) -> None:
    trainer_of(mixtral(**options), samples((5, 4)), tmp_path, **BRIEF).train()
    said = [each.message for each in caplog.records if "experts" in each.message]
    assert (words in said[0]) if words else not said


def test_a_frozen_router_needs_no_loss(tmp_path: Any, caplog: Any) -> None:
    model = mixtral()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("gate" not in name)
    trainer_of(model, samples((5, 4)), tmp_path, **BRIEF).train()
    assert "experts" not in caplog.text


@pytest.mark.parametrize("options", [{"every_n_layers": 2}, {"offload": False}, {"every_n_layers": 1}], ids=str)
def test_checkpointing_some_layers_changes_nothing(tmp_path: Any, options: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    plain = trainer_of(llama(), samples(), tmp_path / "a", **BRIEF)
    saving = trainer_of(llama(), samples(), tmp_path / "b", gradient_checkpointing=True,
                        gradient_checkpointing_kwargs=options, **BRIEF)  # fmt: skip
    plain.train(), saving.train()
    marked = [layer.gradient_checkpointing for layer in saving.model.model.layers]
    assert marked == [True, options.get("every_n_layers", 1) == 1]
    for mine, theirs in zip(saving.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


class Old(Tokens):
    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        pass


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (llama, {"every_n_layers": 0}, "must be an integer of at least 1"),
        (llama, {"evry_n_layers": 2}, "has no option 'evry_n_layers'; did you mean 'every_n_layers'"),
        (llama, {"offload": "yes"}, "must be True or False"),
        (lambda: made(Old), {"offload": False}, "of Old has no such option"),
        pytest.param(llama, {"offload": True}, "needs an accelerator", marks=pytest.mark.skipif(HAS_GPU, reason="GPU")),
    ],
    ids=["layers", "misspelt", "offload", "old", "host"],
)
def test_wrong_options_of_checkpointing_are_named(tmp_path: Any, model: Any, options: Any, words: str) -> None:
    trainer = trainer_of(model(), samples(), tmp_path, gradient_checkpointing=True,
                         gradient_checkpointing_kwargs=options, **BRIEF)  # fmt: skip
    with pytest.raises(ModelError, match=words):
        trainer.train()


def test_find_lr_is_a_method_of_every_trainer_of_pytorch() -> None:
    assert "heuristic" in (loopwright.Trainer.find_lr.__doc__ or "")
    assert loopwright.Seq2SeqTrainer.find_lr is loopwright.Trainer.find_lr


def test_find_lr_without_a_learning_rate_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ArgumentsError, match="needs a learning_rate above 0"):
        trainer_of(made(Tokens), samples(), tmp_path, learning_rate=0.0).find_lr()
