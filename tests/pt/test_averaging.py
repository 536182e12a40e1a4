"""EMACallback and SWACallback: the averages by hand, in evaluations, in checkpoints, and after resuming."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import loopwright
from loopwright import ArgumentsError, EMACallback, ModelError, SWACallback
from tests.models import Tokens, made, samples, trainer_of, weights

OPTIONS: dict[str, Any] = {"per_device_train_batch_size": 4, "num_train_epochs": 4, "optim": "adamw_torch",
                           "learning_rate": 0.05, "save_strategy": "steps", "save_steps": 3}  # fmt: skip


class Watch(loopwright.TrainerCallback):
    """The weights after every step and epoch."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.epochs: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.first = weights(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps.append(weights(model))

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.epochs.append(weights(model))


def trained(folder: Any, *callbacks: Any, resume: Any = None, **options: Any) -> Any:
    trainer = trainer_of(made(Tokens), samples(), folder, callbacks=list(callbacks), eval_dataset=samples((5, 9, 3)),
                         **{**OPTIONS, **options})  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def averages(callback: Any, trainer: Any) -> Any:
    return callback.checkpoint_tensors(trainer.model)


def assert_close(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    assert all(float((found[name] - expected[name]).abs().max()) < 1e-12 for name in found)


@pytest.mark.parametrize("options", [{}, {"warmup": True}, {"start_step": 3, "every_n_steps": 2}], ids=str)
def test_ema_is_the_average_by_hand(tmp_path: Any, options: dict[str, Any]) -> None:
    ema, watch = EMACallback(decay=0.9, **options), Watch()
    trainer = trained(tmp_path, ema, watch)
    expected, count = watch.first, 0
    for step, own in enumerate(watch.steps, 1):
        first, every = options.get("start_step", 0), options.get("every_n_steps", 1)
        if step < first or (step - first) % every:
            continue
        decay = min(0.9, (1 + count) / (10 + count)) if "warmup" in options else 0.9
        decay = 0.0 if first and not count else decay
        expected = {name: decay * expected[name] + (1 - decay) * own[name] for name in own}
        count += 1
    assert_close(averages(ema, trainer), expected)


@pytest.mark.parametrize("every", [None, 2])
def test_swa_is_the_mean_by_hand(tmp_path: Any, every: int | None) -> None:
    swa, watch = SWACallback(start=0.5, every_n_steps=every), Watch()
    trainer = trained(tmp_path, swa, watch)
    chosen = watch.epochs[1:] if every is None else [watch.steps[each - 1] for each in (4, 6, 8)]
    expected = {name: sum(each[name] for each in chosen) / len(chosen) for name in chosen[0]}
    assert_close(averages(swa, trainer), expected)


def test_evaluations_use_the_averages_and_training_does_not(tmp_path: Any) -> None:
    rows = {}
    for kind in ("none", "used", "unused"):
        ema = EMACallback(decay=0.9, use_in_evaluation=kind == "used")
        trainer = trained(tmp_path / kind, *([] if kind == "none" else [ema]), eval_strategy="steps", eval_steps=4)
        rows[kind] = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        rows[f"weights {kind}"] = weights(trainer.model)
        own = weights(trainer.model)
        after = trainer.evaluate()["eval_loss"]
        assert all(torch.equal(own[name], value) for name, value in weights(trainer.model).items())
        if kind == "used":
            assert after == rows["used"][-1]
            with ema.swapped():
                assert not torch.equal(own["head.weight"], trainer.model.head.weight)
            ema.copy_to_model()
            ema.use_in_evaluation = False
            assert trainer.evaluate()["eval_loss"] == pytest.approx(after, rel=1e-12)
    assert rows["none"] == rows["unused"] != rows["used"]
    for kind in ("used", "unused"):
        assert all(torch.equal(rows["weights none"][name], each) for name, each in rows[f"weights {kind}"].items())


@pytest.mark.parametrize("format", ["native", "transformers"])
def test_a_resumed_run_has_the_same_averages(tmp_path: Any, format: str) -> None:
    def callbacks() -> tuple[Any, ...]:
        return EMACallback(decay=0.9), SWACallback(start=2, every_n_steps=2), EMACallback(decay=0.5)

    first, second = callbacks(), callbacks()
    whole = trained(tmp_path, *first, checkpoint_format=format)
    again = trained(tmp_path, *second, checkpoint_format=format, resume=str(tmp_path / "checkpoint-3"))
    for one, other in zip(first, second, strict=True):
        assert one.averaged == other.averaged > 0
        found = averages(other, again)
        assert all(torch.equal(value, found[name]) for name, value in averages(one, whole).items())


def test_a_checkpoint_without_averages_is_reported(tmp_path: Any, caplog: Any) -> None:
    trained(tmp_path)
    trained(tmp_path, EMACallback(), resume=str(tmp_path / "checkpoint-3"))
    assert "checkpoint-3 has no EMACallback/embed.weight, 5 in all" in caplog.text


def test_the_best_model_has_the_averages_it_was_measured_with(tmp_path: Any) -> None:
    ema = EMACallback(decay=0.8)
    trainer = trained(tmp_path, ema, eval_strategy="steps", eval_steps=2, save_steps=2, load_best_model_at_end=True,
                      learning_rate=0.9)  # fmt: skip
    assert trainer.state.best_global_step < trainer.state.global_step
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-12)


@pytest.mark.parametrize(
    "callback", [EMACallback(0.8, start_step=7), SWACallback(0.9), SWACallback(7, every_n_steps=1)]
)
def test_a_best_model_from_before_the_averages_has_its_own_weights(tmp_path: Any, callback: Any) -> None:
    trainer = trained(tmp_path, callback, eval_strategy="steps", eval_steps=2, save_steps=2,
                      load_best_model_at_end=True, learning_rate=0.9)  # fmt: skip
    assert trainer.state.best_global_step < 7
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-12)
    with pytest.raises(ModelError, match="has no averages yet"):
        callback.copy_to_model()


def test_the_best_model_of_checkpoints_without_an_optimizer_has_its_averages(tmp_path: Any) -> None:
    trainer = trained(tmp_path, EMACallback(decay=0.8), eval_strategy="steps", eval_steps=2, save_steps=2,
                      load_best_model_at_end=True, learning_rate=0.9, save_only_model=True)  # fmt: skip
    assert trainer.state.best_global_step < trainer.state.global_step
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-12)


def test_frozen_parameters_and_half_precision(tmp_path: Any) -> None:
    ema = EMACallback(decay=0.5)
    model = made(Tokens).to(torch.bfloat16)
    model.embed.requires_grad_(False)
    trainer = trainer_of(model, samples(), tmp_path, callbacks=[ema], max_steps=2, per_device_train_batch_size=4)
    trainer.train()
    found = averages(ema, trainer)
    assert "embed.weight" not in found and {each.dtype for each in found.values()} == {torch.float32}


def test_wrong_options_are_named() -> None:
    for wrong in (lambda: EMACallback(decay=1.0), lambda: EMACallback(every_n_steps=0), lambda: SWACallback(start=1.5),
                  lambda: SWACallback(every_n_steps=0)):  # fmt: skip
        with pytest.raises(ArgumentsError, match="must be"):
            wrong()
    with pytest.raises(ModelError, match="EMACallback has no averages yet"), EMACallback().swapped():
        pass


@pytest.mark.parametrize("is_used", [True, False])
def test_two_averages_for_an_evaluation_are_reported(is_used: bool, tmp_path: Any, caplog: Any) -> None:
    trainer = trained(tmp_path, EMACallback(use_in_evaluation=is_used), SWACallback(0.0, every_n_steps=1))
    trainer.evaluate()
    shown = "evaluations use the weights of SWACallback, not those of EMACallback" in caplog.text
    assert shown is is_used
