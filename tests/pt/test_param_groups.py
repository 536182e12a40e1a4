"""param_groups: learning rates, weight decay and frozen parameters by patterns of names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import loopwright
from loopwright import ArgumentsError, TrainingArguments
from tests.models import Tokens, made, samples, trainer_of, weights

GROUPS = {"embed": {"freeze": True}, r"head\.weight": {"lr_scale": 0.1, "weight_decay": 0.3}, "bias$": {"lr_scale": 2}}
OPTIONS: dict[str, Any] = {"per_device_train_batch_size": 4, "num_train_epochs": 3, "learning_rate": 0.02,
                           "weight_decay": 0.1, "lr_scheduler_type": "linear", "warmup_steps": 2}  # fmt: skip


def trainer(folder: Any, **options: Any) -> Any:
    return trainer_of(made(Tokens), samples(), folder, **{**OPTIONS, "param_groups": GROUPS, **options})


def groups_of(made_trainer: Any) -> dict[str, dict[str, Any]]:
    names = {id(p): name for name, p in made_trainer.model.named_parameters()}
    return {names[id(p)]: group for group in made_trainer.optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor", "muon", "rmsprop"])
@pytest.mark.parametrize("schedule", ["linear", "constant", "cosine", "reduce_lr_on_plateau"])
def test_learning_rates_and_decay_by_pattern(tmp_path: Any, optim: str, schedule: str) -> None:
    more = {"eval_strategy": "steps", "eval_dataset": samples()} if schedule == "reduce_lr_on_plateau" else {}
    run = trainer(tmp_path, optim=optim, lr_scheduler_type=schedule, max_steps=3, **more)
    before = weights(run.model)
    rates: list[dict[str, float]] = []

    class Rates(loopwright.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append({name: float(group["lr"]) for name, group in groups_of(run).items()})
            assert not run.model.embed.weight.requires_grad

    run.add_callback(Rates())
    run.train()
    found = groups_of(run)
    assert set(found) == {"mix.weight", "mix.bias", "head.weight", "head.bias"}
    assert found["mix.weight"]["weight_decay"] == 0.1 and found["head.weight"]["weight_decay"] == 0.3
    assert found["head.bias"]["weight_decay"] == 0.0
    for each in rates:
        assert each["head.weight"] == pytest.approx(0.1 * each["mix.weight"])
        assert each["mix.bias"] == each["head.bias"] == pytest.approx(2 * each["mix.weight"])
    assert rates[-1]["mix.weight"] > 0
    after = weights(run.model)
    assert torch.equal(before["embed.weight"], after["embed.weight"])
    assert not torch.equal(before["head.weight"], after["head.weight"])
    assert run.model.embed.weight.requires_grad  # for the run only
    logged = [row["learning_rate"] for row in run.state.log_history if "learning_rate" in row]
    assert logged == pytest.approx([each["mix.weight"] for each in rates])


def test_groups_are_those_of_a_loop_by_hand(tmp_path: Any) -> None:
    run = trainer(tmp_path, optim="adamw_torch", lr_scheduler_type="constant", warmup_steps=0, max_steps=4,
                  per_device_train_batch_size=7)  # fmt: skip
    from tests.models import pad

    model = made(Tokens)
    model.embed.requires_grad_(False)
    optimizer = torch.optim.AdamW([
        {"params": [model.mix.weight], "lr": 0.02, "weight_decay": 0.1},
        {"params": [model.head.weight], "lr": 0.002, "weight_decay": 0.3},
        {"params": [model.mix.bias, model.head.bias], "lr": 0.04, "weight_decay": 0.0},
    ])  # fmt: skip
    for _ in range(4):
        model(**pad(samples()))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    run.train()
    for name, value in weights(model).items():
        assert float((weights(run.model)[name] - value).abs().max()) < 1e-10, name


def test_a_run_with_groups_resumes_to_the_bit(tmp_path: Any) -> None:
    options = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2}
    whole = trainer(tmp_path, **options)
    whole.train()
    again = trainer(tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(weights(whole.model)[name], value) for name, value in weights(again.model).items())


def test_tied_weights_match_by_any_of_their_names(tmp_path: Any) -> None:
    model = made(Tokens)
    model.head.weight = model.embed.weight
    run = trainer_of(model, samples(), tmp_path, **{**OPTIONS, "param_groups": {"head.weight": {"freeze": True}}})
    run.train()
    assert "embed.weight" not in groups_of(run)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"embedd": {"freeze": True}}, "'embedd' has no effect: it matches no parameter of Tokens"),
        ({"head": {"lr_scale": 2}, "head.bias": {"lr_scale": 3}}, "'head.bias' has no effect: all its 1 matches"),
        ({".": {"freeze": True}}, "none of them requires a gradient"),
    ],
    ids=["unmatched", "earlier", "all"],
)
def test_a_pattern_without_effect_is_an_error(tmp_path: Any, groups: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trainer(tmp_path, param_groups=groups).train()


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({}, "must be a dict such as"),
        ({"*.bias": {"freeze": True}}, "is not a regular expression .*write '.*' for any text"),
        ({"a": {"lr_scal": 1}}, "the option 'lr_scal'.*did you mean 'lr_scale'"),
        ({"a": {"lr_scale": "fast"}}, "lr_scale='fast' must be a number"),
        ({"a": {"weight_decay": -1}}, "weight_decay=-1 must be a number of at least 0"),
        ({"a": {"freeze": 1}}, "freeze=1 must be True or False"),
        ({"a": {"freeze": True, "lr_scale": 1}}, "no other option than freeze"),
        ({"a": {}}, "needs a dict with lr_scale, weight_decay or freeze"),
        ("{", "not JSON|JSON"),
    ],
    ids=str,
)
def test_wrong_options_are_named(groups: Any, words: str) -> None:
    with pytest.raises(ArgumentsError, match=rf"(?s)param_groups.*({words})"):
        TrainingArguments("run", param_groups=groups, use_cpu=True)


def test_json_text_is_read() -> None:
    args = TrainingArguments("run", param_groups='{"head": {"lr_scale": 0.5}}', use_cpu=True)
    assert args.param_groups == {"head": {"lr_scale": 0.5}}


def test_an_optimizer_of_the_users_own_is_refused(tmp_path: Any) -> None:
    model = made(Tokens)
    args = TrainingArguments(str(tmp_path), use_cpu=True, param_groups={"head": {"lr_scale": 2}}, report_to=[])
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentsError, match="param_groups needs the optimizer of the arguments"):
        loopwright.Trainer(model, args, train_dataset=samples([4] * 4), optimizers=(own, None)).train()
