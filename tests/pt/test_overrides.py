"""Every override point is reached, with what its signature accepts; what would never be called is refused."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from loopwright import OverrideError, Trainer, TrainerCallback, TrainingArguments
from loopwright.core.user_code.overrides import NEVER_CALLED
from tests.models import Regression, logged, losses, regression_data, regression_run

DATA = regression_data(12)


def arguments(**options: Any) -> TrainingArguments:
    options = {"per_device_train_batch_size": 4, "max_steps": 4, "logging_steps": 1, "save_strategy": "no",
               "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2, **options}  # fmt: skip
    return TrainingArguments("run", **options)


def make(cls: type, *, model: Any = None, train: Any = DATA, **options: Any) -> Any:
    torch.manual_seed(0)
    return cls(model or Regression(), arguments(**options), train_dataset=train, eval_dataset=DATA[:5])


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What the same run logs without any override."""
    with contextlib.chdir(tmp_path_factory.mktemp("plain")):
        trainer = make(Trainer)
        trainer.train()
    return losses(trainer)


# ---- all of them at once --------------------------------------------------------------------------------------------

POINTS = """
get_train_dataloader get_eval_dataloader get_test_dataloader num_examples get_batch_samples
set_initial_training_values
create_optimizer create_scheduler create_optimizer_and_scheduler get_optimizer_cls_and_kwargs get_decay_parameter_names
training_step compute_loss compute_loss_context_manager autocast_smart_context_manager
evaluate predict evaluation_loop prediction_step save_model log store_flos floating_point_ops
_get_train_sampler _get_eval_sampler _get_dataloader _remove_unused_columns _get_collator_with_removed_columns
_set_signature_columns_if_needed _prepare_inputs _prepare_input
_evaluate _determine_best_metric _save_checkpoint _save _load_from_checkpoint _load_best_model
_load_optimizer_and_scheduler
_wrap_model _move_model_to_device _get_learning_rate _maybe_log_save_evaluate _load_callback_state
""".split()

PRIVATE_ELSEWHERE = """
_inner_training_loop _run_epoch _prepare_for_training _init_training_state _finalize_training
_prepare_context_parallel_inputs _save_rng_state _save_optimizer_and_scheduler _save_scaler _load_rng_state
_load_scaler _clip_grad_norm _get_grad_norm _track_num_input_tokens _update_auto_batch_size
create_accelerator_and_postprocess
""".split()


def recording(names: list[str], calls: set[str]) -> type:
    """A subclass that overrides these methods, notes their calls and hands them on."""

    def method_of(name: str) -> Any:
        base = getattr(Trainer, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.add(name)
            return base(*args, **kwargs) if name == "get_optimizer_cls_and_kwargs" else base(self, *args, **kwargs)

        return method

    return type("Recording", (Trainer,), {name: method_of(name) for name in names})


def is_accepted(name: str) -> bool:
    try:
        make(recording([name], set()))
    except OverrideError:
        return False  # refused, and that is tested below
    return True


GROUPS = [POINTS[start::5] for start in range(5)]
"""Overrides that are tried together; one by one they run with `-m grid`."""


@pytest.mark.parametrize(
    "names", [*GROUPS, *(pytest.param([name], marks=pytest.mark.grid) for name in POINTS)], ids=lambda names: names[0]
)
def test_overrides_are_reached_in_an_ordinary_run(names: list[str], tmp_path: Any) -> None:
    calls: set[str] = set()
    options = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "load_best_model_at_end": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2,
    }  # fmt: skip
    accepted = [name for name in names if is_accepted(name)]
    trainer = make(recording(accepted, calls), **options)
    trainer.train()
    trainer.train(resume_from_checkpoint=True)
    trainer.predict(DATA[:3])
    trainer.save_model()
    assert set(accepted) - calls == set(), "overridden, accepted and never called"


@pytest.mark.parametrize("name", [*PRIVATE_ELSEWHERE, *(each for each in NEVER_CALLED if not hasattr(Trainer, each))])
def test_an_override_nobody_would_call_is_refused_with_what_to_do_instead(name: str) -> None:
    cls = type("Theirs", (Trainer,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(OverrideError, match=rf"Theirs overrides {name}, .*Override instead: .+") as caught:
        make(cls)
    assert NEVER_CALLED[name] in str(caught.value)


def test_a_mixin_that_brings_a_dead_override_is_refused_too() -> None:
    class Mixin:
        def _inner_training_loop(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("never called")

    with pytest.raises(OverrideError, match="_inner_training_loop"):
        make(type("Mixed", (Mixin, Trainer), {}))


# ---- signatures of older documents ----------------------------------------------------------------------------------


def test_training_step_with_two_arguments(plain_losses: list[float]) -> None:
    class Theirs(Trainer):
        seen = 0

        def training_step(self, model, inputs):
            model.train()
            inputs = self._prepare_inputs(inputs)
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            type(self).seen += 1
            return loss.detach()

    trainer = make(Theirs)
    trainer.train()
    assert Theirs.seen == 4
    assert losses(trainer) == plain_losses


@pytest.mark.parametrize("through", ["super", "name", "instance"])
def test_training_step_that_goes_on_to_ours_divides_means_as_ours_does(through: str) -> None:
    """A loss that is a mean is weighed in `training_step`: an override around it changes nothing."""

    class BySuper(Trainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    class ByName(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return Trainer.training_step(self, model, inputs, num_items_in_batch)

    plain = make(Trainer, gradient_accumulation_steps=3)
    plain.train()
    theirs = make({"super": BySuper, "name": ByName, "instance": Trainer}[through], gradient_accumulation_steps=3)
    if through == "instance":
        theirs.training_step = lambda *args, **kwargs: Trainer.training_step(theirs, *args, **kwargs)
    theirs.train()
    assert losses(theirs) == losses(plain)


def test_training_step_that_calls_the_original(plain_losses: list[float]) -> None:
    class Theirs(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            self.items = num_items_in_batch
            return super().training_step(model, inputs, num_items_in_batch)

    trainer = make(Theirs)
    trainer.train()
    assert trainer.items == 4
    assert losses(trainer) == plain_losses


@pytest.mark.parametrize(
    "compute_loss",
    [
        lambda self, model, inputs: model(**inputs)["loss"],
        lambda self, model, inputs, return_outputs=False: model(**inputs)["loss"],
        lambda self, model, inputs, return_outputs=False, num_items_in_batch=None: model(**inputs)["loss"],
        lambda self, model, inputs, return_outputs=False, **kwargs: model(**inputs)["loss"],
        lambda self, model, inputs, **kwargs: model(**inputs)["loss"],
        lambda self, model, inputs, num_items_in_batch: model(**inputs)["loss"],
        lambda self, *args, **kwargs: args[0](**args[1])["loss"],
    ],
    ids=["two", "flag", "flag and items", "flag and kwargs", "kwargs", "items", "anything"],
)
def test_compute_loss_of_any_signature(compute_loss: Any, plain_losses: list[float]) -> None:
    trainer = make(type("Theirs", (Trainer,), {"compute_loss": compute_loss}))
    trainer.train()
    assert losses(trainer) == plain_losses
    assert trainer.predict(DATA[:5]).predictions.shape == (5,)
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize(
    "function",
    [
        lambda outputs, labels: nn.functional.mse_loss(outputs["y"], labels),
        lambda outputs, labels, num_items_in_batch=None: (
            nn.functional.mse_loss(outputs["y"], labels, reduction="sum") / (num_items_in_batch or labels.numel())
        ),
        lambda outputs, labels, **kwargs: nn.functional.mse_loss(outputs["y"], labels),
    ],
    ids=["two", "items", "kwargs"],
)
def test_compute_loss_func_of_any_signature(function: Any, plain_losses: list[float]) -> None:
    trainer = Trainer(make(Trainer).model, arguments(), train_dataset=DATA, compute_loss_func=function)
    trainer.train()
    assert losses(trainer) == pytest.approx(plain_losses, rel=1e-6)


def test_log_with_one_argument(plain_losses: list[float]) -> None:
    class Theirs(Trainer):
        def log(self, logs):
            logs["mine"] = 1.0
            super().log(logs)

    trainer = make(Theirs)
    trainer.train()
    assert all(row["mine"] == 1.0 for row in trainer.state.log_history)
    assert losses(trainer) == plain_losses


def test_train_sampler_without_arguments() -> None:
    seen: list[float] = []

    class Theirs(Trainer):
        def _get_train_sampler(self):
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, model, inputs, return_outputs=False):
            seen.extend(inputs["labels"].tolist())
            return super().compute_loss(model, inputs, return_outputs)

    make(Theirs, max_steps=3).train()
    assert seen == [sample["labels"].item() for sample in DATA]


def test_train_sampler_that_returns_none_goes_through_the_data_in_its_order() -> None:
    class Theirs(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return None

    trainer = make(Theirs)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["labels"].tolist() == [sample["labels"].item() for sample in DATA[:4]]


def test_own_train_loader_decides_what_an_update_is_made_of() -> None:
    class Theirs(Trainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, batch_size=6, sampler=RandomSampler(self.train_dataset))

    trainer = make(Theirs, max_steps=-1, num_train_epochs=2)
    trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.state.epoch == 2.0


def test_own_train_loader_may_be_any_iterable_of_batches() -> None:
    batches = [{"x": torch.stack([s["x"] for s in part]), "labels": torch.stack([s["labels"] for s in part])}
               for part in (DATA[:4], DATA[4:8], DATA[8:])]  # fmt: skip

    class Theirs(Trainer):
        def get_train_dataloader(self):
            return batches

    trainer = make(Theirs, max_steps=-1, num_train_epochs=2)
    trainer.train()
    assert trainer.state.global_step == 6


def test_own_eval_loader() -> None:
    asked: list[Any] = []

    class Theirs(Trainer):
        def get_eval_dataloader(self, eval_dataset=None):
            asked.append(eval_dataset)
            return DataLoader(self.eval_dataset if eval_dataset is None else eval_dataset, batch_size=2)

    trainer = make(Theirs, eval_strategy="steps", eval_steps=2)
    trainer.train()
    trainer.evaluate(DATA[:3])
    assert asked == [None, None, DATA[:3]]


def test_create_optimizer_without_arguments() -> None:
    class Theirs(Trainer):
        def create_optimizer(self):
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)
            return self.optimizer

    trainer = make(Theirs)
    trainer.train()
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert trainer.state.log_history[0]["learning_rate"] == 0.25


def test_create_optimizer_that_returns_nothing_but_assigns() -> None:
    class Theirs(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)

    trainer = make(Theirs)
    trainer.train()
    assert isinstance(trainer.optimizer, torch.optim.SGD)


def test_create_scheduler_is_given_the_optimizer() -> None:
    class Theirs(Trainer):
        def create_scheduler(self, num_training_steps, optimizer):
            assert isinstance(optimizer, torch.optim.Optimizer)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            self.total = num_training_steps
            return self.lr_scheduler

    trainer = make(Theirs)
    trainer.train()
    rates = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
    assert rates == pytest.approx([1e-2, 5e-3, 2.5e-3, 1.25e-3])
    assert trainer.total == 4


def test_create_scheduler_that_takes_only_the_steps() -> None:
    class Theirs(Trainer):
        def create_scheduler(self, num_training_steps):
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)
            return self.lr_scheduler

    trainer = make(Theirs)
    trainer.train()
    assert {row["learning_rate"] for row in trainer.state.log_history if "loss" in row} == {1e-2}


def test_create_optimizer_and_scheduler_is_really_called() -> None:
    class Theirs(Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
            self.total = num_training_steps

    trainer = make(Theirs)
    trainer.train()
    assert trainer.total == 4
    assert {row["learning_rate"] for row in trainer.state.log_history if "loss" in row} == {0.125}


@pytest.mark.parametrize("steps", [4, 9])
def test_a_schedule_made_before_training_is_made_again_for_its_steps(steps: int) -> None:
    trainer = make(Trainer)
    trainer.create_optimizer_and_scheduler(num_training_steps=steps)
    trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx([1e-2 * (1 - step / 4) for step in range(4)])
    told = [text for text in trainer._loopwright.notices.told if "num_training_steps=9" in text]
    assert len(told) == (steps == 9)


def test_a_schedule_that_replaces_the_one_made_before_training_is_used() -> None:
    trainer = make(Trainer)
    trainer.create_optimizer_and_scheduler(num_training_steps=9)
    trainer.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer, factor=1.0)
    trainer.train()
    assert set(logged(trainer, "learning_rate")) == {1e-2}


@pytest.mark.parametrize("with_keys", [False, True])
def test_prediction_step_with_and_without_ignore_keys(with_keys: bool) -> None:
    seen: list[Any] = []

    class Short(Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only):
            seen.append(prediction_loss_only)
            return super().prediction_step(model, inputs, prediction_loss_only)

    class Long(Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            seen.append(ignore_keys)
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    trainer = make(Long if with_keys else Short)
    trainer.evaluate(ignore_keys=["hidden"])
    assert seen == ([["hidden"]] if with_keys else [True])
    assert trainer.predict(DATA[:5]).predictions.shape == (5,)


def test_evaluate_with_any_arguments_decides_the_metrics_of_training() -> None:
    class Theirs(Trainer):
        def evaluate(self, *args, **kwargs):
            return {**super().evaluate(*args, **kwargs), "eval_mine": -float(self.state.global_step)}

    trainer = make(Theirs, eval_strategy="steps", eval_steps=1, metric_for_best_model="mine", greater_is_better=False)
    trainer.train()
    assert trainer.state.best_metric == -4.0


def test_evaluate_without_ignore_keys() -> None:
    class Theirs(Trainer):
        calls = 0

        def evaluate(self, eval_dataset=None):
            type(self).calls += 1
            return super().evaluate(eval_dataset)

    make(Theirs, eval_strategy="steps", eval_steps=2).train()
    assert Theirs.calls == 2


def test_evaluation_loop_as_a_document_overrides_it() -> None:
    class Theirs(Trainer):
        def evaluation_loop(
            self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
        ):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            output.metrics[f"{metric_key_prefix}_batches"] = len(dataloader)
            return output

    metrics = make(Theirs, per_device_eval_batch_size=2).evaluate()
    assert metrics["eval_batches"] == 3


@pytest.mark.parametrize("async_save", [False, True])
def test_save_model_with_one_argument_writes_into_checkpoints(async_save: bool, tmp_path: Any) -> None:
    class Theirs(Trainer):
        def save_model(self, output_dir):
            super().save_model(output_dir)
            with open(f"{output_dir}/mine.txt", "w") as file:
                file.write("mine")

    trainer = make(Theirs, save_strategy="steps", save_steps=2, async_save=async_save)
    trainer.train()
    for step in (2, 4):
        assert (tmp_path / f"run/checkpoint-{step}/mine.txt").read_text() == "mine"
        assert (tmp_path / f"run/checkpoint-{step}/model.safetensors").is_file()
    again = make(Theirs, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    assert losses(again) == losses(trainer)


def test_save_with_its_old_signature_writes_into_checkpoints(tmp_path: Any) -> None:
    class Theirs(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            (tmp_path / output_dir / "mine.txt").write_text("mine")

    make(Theirs, save_strategy="steps", save_steps=2).train()
    assert (tmp_path / "run/checkpoint-4/mine.txt").is_file()


@pytest.mark.parametrize("signature", ["model, trial", "model, trial, metrics=None", "model", "model, *args, **kwargs"])
def test_save_checkpoint_of_any_signature(signature: str, tmp_path: Any) -> None:
    names: dict[str, Any] = {"Trainer": Trainer, "saved": []}
    exec(
        "class Theirs(Trainer):\n"
        f"    def _save_checkpoint(self, {signature}):\n"
        "        super()._save_checkpoint(model, None)\n"
        "        saved.append(self.state.global_step)\n",
        names,
    )
    make(names["Theirs"], save_strategy="steps", save_steps=2).train()
    assert names["saved"] == [2, 4]
    assert (tmp_path / "run/checkpoint-4/manifest.json").is_file()


def test_prepare_inputs_changes_what_the_model_sees() -> None:
    class Theirs(Trainer):
        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            return {**inputs, "labels": inputs["labels"] * 0 + 100.0}

    trainer = make(Theirs)
    trainer.train()
    assert losses(trainer)[0] > 5000


@pytest.mark.parametrize("signature", ["epoch_iterator, num_batches, device", "epoch_iterator, num_batches"])
def test_get_batch_samples_of_either_signature(signature: str, plain_losses: list[float]) -> None:
    names: dict[str, Any] = {"Trainer": Trainer, "asked": []}
    exec(
        "class Theirs(Trainer):\n"
        f"    def get_batch_samples(self, {signature}):\n"
        "        asked.append(num_batches)\n"
        "        batches = []\n"
        "        for _ in range(num_batches):\n"
        "            try:\n"
        "                batches.append(next(epoch_iterator))\n"
        "            except StopIteration:\n"
        "                break\n"
        "        return batches, None\n",
        names,
    )
    trainer = make(names["Theirs"])
    trainer.train()
    assert set(names["asked"]) == {1}
    assert losses(trainer) == plain_losses


def test_get_batch_samples_is_given_the_iterator_of_the_loader(plain_losses: list[float]) -> None:
    lengths: list[int] = []

    class Theirs(Trainer):
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            lengths.append(len(epoch_iterator))
            return super().get_batch_samples(epoch_iterator, num_batches, device)

    trainer = make(Theirs)
    trainer.train()
    assert set(lengths) == {len(trainer.get_train_dataloader())} and losses(trainer) == plain_losses


@pytest.mark.parametrize("signature", ["args, dataloader", "args, dataloader, total_train_batch_size"])
def test_set_initial_training_values_decides_the_length_of_the_run(signature: str) -> None:
    names: dict[str, Any] = {"Trainer": Trainer}
    exec(
        "class Theirs(Trainer):\n"
        f"    def set_initial_training_values(self, {signature}):\n"
        "        values = list(super().set_initial_training_values(args, dataloader))\n"
        "        values[6] = 2\n"
        "        return tuple(values)\n",
        names,
    )
    trainer = make(names["Theirs"])
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps == 2


class DividesByItems(Regression):
    def forward(self, x, labels=None, num_items_in_batch=None):
        y = super().forward(x)["y"]
        if labels is None:
            return {"y": y}
        return {"loss": ((y - labels) ** 2).sum() / (num_items_in_batch or len(labels)), "y": y}


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}], ids=str)
def test_get_num_items_in_batch_decides_what_a_scaled_loss_is_divided_by(
    options: Any, plain_losses: list[float]
) -> None:
    class Theirs(Trainer):
        def _get_num_items_in_batch(self, batch_samples, device):
            return 2 * super()._get_num_items_in_batch(batch_samples, device)

    trainer = make(Theirs, model=DividesByItems(), **options)
    trainer.model.load_state_dict(make(Trainer).model.state_dict())
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(plain_losses[0] / 2)


def test_floating_point_ops_decides_total_flos() -> None:
    class Theirs(Trainer):
        def floating_point_ops(self, inputs):
            return 7

    trainer = make(Theirs, gradient_accumulation_steps=2, per_device_train_batch_size=2)
    trainer.train()
    assert trainer.state.total_flos == 4 * 2 * 7


def test_get_decay_parameter_names_decides_weight_decay() -> None:
    class Theirs(Trainer):
        def get_decay_parameter_names(self, model):
            return ["out.bias"]

    trainer = make(Theirs, weight_decay=0.5)
    trainer.create_optimizer()
    decayed = [group for group in trainer.optimizer.param_groups if group["weight_decay"] == 0.5]
    assert [id(p) for group in decayed for p in group["params"]] == [id(trainer.model.out.bias)]


def test_get_optimizer_cls_and_kwargs_decides_the_optimizer() -> None:
    class Theirs(Trainer):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args, model=None):
            return torch.optim.SGD, {"lr": 0.5, "momentum": 0.25}

    trainer = make(Theirs)
    trainer.train()
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.25


def test_compute_loss_context_manager_is_around_the_loss_in_training_and_evaluation() -> None:
    inside: list[bool] = []

    class Theirs(Trainer):
        active = False

        @contextlib.contextmanager
        def compute_loss_context_manager(self):
            with super().compute_loss_context_manager():
                self.active = True
                yield
                self.active = False

        def compute_loss(self, model, inputs, return_outputs=False):
            inside.append(self.active)
            return super().compute_loss(model, inputs, return_outputs)

    trainer = make(Theirs)
    trainer.train()
    trainer.evaluate()
    assert len(inside) >= 5 and all(inside)


# ---- columns --------------------------------------------------------------------------------------------------------


def seen_columns(trainer: Any) -> set[str]:
    return set(next(iter(trainer.get_train_dataloader())))


WITH_EXTRA = [{**sample, "weight": torch.tensor(1.0), "name": torch.tensor(2.0)} for sample in DATA]


def test_signature_columns_may_be_assigned() -> None:
    trainer = make(Trainer, train=WITH_EXTRA)
    assert seen_columns(trainer) == {"x", "labels"}
    trainer = make(Trainer, train=WITH_EXTRA)
    trainer._signature_columns = ["x", "labels", "weight"]
    assert seen_columns(trainer) == {"x", "labels", "weight"}


def test_set_signature_columns_may_be_overridden() -> None:
    class Theirs(Trainer):
        def _set_signature_columns_if_needed(self):
            if self._signature_columns is None:
                super()._set_signature_columns_if_needed()
                self._signature_columns += ["weight"]

        def compute_loss(self, model, inputs, return_outputs=False):
            weight = inputs.pop("weight")
            outputs = model(**inputs)
            loss = (weight * (outputs["y"] - inputs["labels"]) ** 2).mean()
            return (loss, outputs) if return_outputs else loss

    trainer = make(Theirs, train=WITH_EXTRA)
    assert seen_columns(trainer) == {"x", "labels", "weight"}
    trainer.train()
    assert len(losses(trainer)) == 4


# ---- attributes assigned after construction -------------------------------------------------------------------------


def test_compute_loss_assigned_on_the_instance_is_called(plain_losses: list[float]) -> None:
    trainer = make(Trainer)
    trainer.compute_loss = lambda model, inputs, return_outputs=False: model(**inputs)["loss"] * 2
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(2 * plain_losses[0])
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.predict(DATA[:5]).predictions.shape == (5,)


class TakesItems(Regression):
    """Says it takes the item count, and would fail if it were given."""

    def forward(self, x, labels=None, **kwargs):
        assert "num_items_in_batch" not in kwargs
        return super().forward(x, labels)


def test_model_accepts_loss_kwargs_assigned_on_the_instance_is_honoured() -> None:
    trainer = make(Trainer, model=TakesItems(), gradient_accumulation_steps=2, per_device_train_batch_size=2)
    assert trainer.model_accepts_loss_kwargs
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    trainer.evaluate()
    assert not trainer.model_accepts_loss_kwargs


class TwoTargets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x, left=None, right=None):
        y = self.linear(x).squeeze(-1)
        if left is None:
            return {"y": y}
        return {"loss": ((y - left) ** 2 + (y - right) ** 2).mean(), "y": y}


TWO = [{"x": s["x"], "left": s["labels"], "right": s["labels"] + 1} for s in DATA]


@pytest.mark.parametrize("how", ["argument", "attribute"])
def test_label_names_say_what_labels_are(how: str) -> None:
    names = ["left", "right"]
    trainer = make(Trainer, model=TwoTargets(), train=TWO, **({"label_names": names} if how == "argument" else {}))
    trainer.label_names = names
    trainer.train()
    prediction = trainer.predict(TWO[:5])
    left, right = prediction.label_ids
    assert (right - left).tolist() == [1.0] * 5
    assert trainer.evaluate(TWO[:5])["eval_loss"] > 0


def test_optimizer_assigned_before_training_is_used() -> None:
    trainer = make(Trainer)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
    mine = trainer.optimizer
    trainer.train()
    assert trainer.optimizer is mine
    assert trainer.state.log_history[0]["learning_rate"] == 0.5


def test_datasets_collator_and_metrics_assigned_after_construction_are_used() -> None:
    trainer = Trainer(Regression(), arguments(max_steps=1))
    trainer.train_dataset = trainer.eval_dataset = DATA
    trainer.data_collator = lambda samples: {"x": torch.stack([s["x"] for s in samples]) * 0 + 1.0,
                                             "labels": torch.full((len(samples),), 50.0)}  # fmt: skip
    trainer.compute_metrics = lambda p: {"label": float(p.label_ids.mean())}
    trainer.train()
    assert losses(trainer)[0] > 1000
    assert trainer.evaluate()["eval_label"] == 50.0


def test_loss_is_scaled_for_ga_says_how_a_loss_is_scaled() -> None:
    first = {}
    for scaled in (None, True, False):

        class Theirs(Trainer):
            loss_is_scaled_for_ga = scaled

            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                outputs = model(**inputs)
                return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

        trainer = make(Theirs, gradient_accumulation_steps=2, per_device_train_batch_size=2)
        trainer.train()
        first[scaled] = losses(trainer)[0]
    assert first[None] == pytest.approx(first[False])
    assert first[True] == pytest.approx(2 * first[False])


def test_an_old_callback_may_name_the_tokenizer_and_a_strict_one_gets_no_more_than_it_takes() -> None:
    seen = []

    class Old(TrainerCallback):
        def on_train_begin(self, args, state, control, tokenizer=None, **kwargs):
            seen.append(tokenizer)

        def on_step_end(self, args, state, control):
            seen.append(state.global_step)

    tokenizer = object()
    Trainer(
        copy.deepcopy(Regression()), arguments(max_steps=2), train_dataset=DATA, processing_class=tokenizer,
        callbacks=[Old],
    ).train()  # fmt: skip
    assert seen == [tokenizer, 1, 2]


def test_what_compute_loss_logs_is_logged_once_per_micro_batch(tmp_path: Path) -> None:
    class Logs(Trainer):
        def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = model(**inputs)["loss"]
            self.log({"part": float(loss)})
            return loss

    trainer = regression_run(tmp_path, cls=Logs, max_steps=2, gradient_accumulation_steps=2)
    assert sum("part" in row for row in trainer.state.log_history) == 4


def test_a_training_step_that_evaluates_changes_no_update(tmp_path: Path) -> None:
    """An evaluation in the middle of an update has micro-batches of its own."""

    class Evaluates(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.evaluate()
            return super().training_step(*args, **kwargs)

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}

    data = [{"x": torch.tensor([float(i), 1.0]), "labels": torch.tensor(float(i % 3))} for i in range(12)]

    def weights(kind: type[Trainer]) -> list[torch.Tensor]:
        args = TrainingArguments(
            str(tmp_path / kind.__name__), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            use_cpu=True, disable_tqdm=True, report_to="none", learning_rate=0.01,
        )  # fmt: skip
        trainer = kind(Line(), args, train_dataset=data, eval_dataset=data[:3])
        trainer.train()
        return [each.detach() for each in trainer.model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(Evaluates), weights(Trainer), strict=True))
