"""Names and behaviour of transformers' Trainer that other libraries read, call or override."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import SequentialSampler

import loopwright
from loopwright import CallbackHandler, DefaultFlowCallback, EarlyStoppingCallback, Trainer, TrainingArguments
from loopwright.core.state import TrainerControl, TrainerState
from tests.models import Regression, StopAt, regression_data, regression_run

OPTIONS: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "report_to": "none"}


def trainer_in(folder: Path, *, cls: Any = Trainer, model: nn.Module | None = None, n: int = 10, **options: Any) -> Any:
    names = ("callbacks", "eval_dataset", "optimizers", "data_collator")
    given = {name: options.pop(name) for name in names if name in options}
    args = TrainingArguments(str(folder), **{**OPTIONS, **options})
    return cls(model or Regression(), args, train_dataset=regression_data(n), **given)


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_names_that_are_read(tmp_path: Path) -> None:
    trainer = regression_run(tmp_path, n=16, max_steps=4, logging_steps=2)
    assert trainer._train_batch_size == 4
    assert trainer._globalstep_last_logged == 4
    assert trainer._total_loss_scalar == pytest.approx(4 * trainer.state.log_history[-1]["train_loss"])
    assert trainer.push_in_progress is None
    assert trainer._get_output_dir(trial=None) == str(tmp_path)
    assert trainer._eval_dataloaders == {}
    assert callable(trainer._push_from_checkpoint)
    args = trainer.args
    assert args.distributed_state is not None and args.distributed_state.num_processes == 1
    assert args.deepspeed_plugin is args.hf_deepspeed_config is None and args._n_gpu == 0
    assert args.save_safetensors is True and "save_safetensors" not in args.to_dict(), "what is true of every run"
    assert dataclasses.replace(args).save_safetensors is True
    assert not args.group_by_length, "an old name that was not given is false"


def test_dicts_of_a_subclass_of_arguments_are_read(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Mine(TrainingArguments):
        _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "added"]
        added: dict[str, Any] | str | None = None

    assert Mine(str(tmp_path), added='{"a": 1}', use_cpu=True).added == {"a": 1}


def test_a_dtype_of_a_subclass_of_arguments_is_text(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Mine(TrainingArguments):
        dtype: torch.dtype = torch.float32

    assert Mine(str(tmp_path), dtype=torch.bfloat16, use_cpu=True).to_dict()["dtype"] == "bfloat16"


# ---- loaders ---------------------------------------------------------------------------------------------------------


def test_loaders_have_the_sizes_of_accelerates(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, per_device_train_batch_size=4, per_device_eval_batch_size=3)
    train, evaluation = trainer.get_train_dataloader(), trainer.get_eval_dataloader(regression_data(7))
    assert (len(train), train.total_batch_size) == (3, 4)
    assert (len(evaluation), evaluation.total_batch_size) == (3, 3)


def test_the_sampler_of_get_dataloader_is_used(tmp_path: Path) -> None:
    trainer, data = trainer_in(tmp_path), regression_data(6)
    loader = trainer._get_dataloader(data, "Training", 2, sampler_fn=SequentialSampler, is_training=True)
    assert isinstance(loader.sampler, SequentialSampler)
    assert torch.equal(next(iter(loader))["x"], torch.stack([row["x"] for row in data[:2]]))


def test_evaluation_loaders_with_persistent_workers_are_kept_for_their_dataset(tmp_path: Path) -> None:
    data = regression_data(6)
    options = {"dataloader_persistent_workers": True, "dataloader_num_workers": 1, "eval_dataset": data}
    trainer = trainer_in(tmp_path, **options)
    kept = trainer.get_eval_dataloader()
    assert trainer.get_eval_dataloader(data) is kept is trainer._eval_dataloaders["eval"]
    assert trainer.get_eval_dataloader(regression_data(4)) is not kept, "another dataset"


def test_an_evaluation_loader_without_batches(tmp_path: Path) -> None:
    """sentence-transformers evaluates with an evaluator only, over a loader that is empty."""

    class Mine(Trainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return torch.utils.data.DataLoader([])

    metrics = trainer_in(tmp_path, cls=Mine, eval_dataset=regression_data(2)).evaluate()
    assert "eval_runtime" in metrics and "eval_loss" not in metrics


# ---- overrides that call super() -------------------------------------------------------------------------------------


def test_overrides_are_called_and_reach_ours(tmp_path: Path) -> None:
    called: list[str] = []

    class Mine(Trainer):
        def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
            called.append("load")
            super()._load_optimizer_and_scheduler(checkpoint)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            called.append("save")
            super()._save_checkpoint(model, trial)

        def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
            super()._push_from_checkpoint(checkpoint_folder)

        def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
            return {**super()._build_accelerator_args(**kwargs), "more": 1}

    options = {"save_steps": 1, "per_device_train_batch_size": 5}
    trainer_in(tmp_path, cls=Mine, max_steps=1, **options).train()
    resumed = trainer_in(tmp_path, cls=Mine, max_steps=2, **options)
    resumed.train(resume_from_checkpoint=True)
    assert called == ["save", "load", "save"] and resumed.state.global_step == 2
    made = resumed._build_accelerator_args()
    assert made["more"] == 1 and made["mixed_precision"] == "no"


@pytest.mark.parametrize("value", [None, True, False])
def test_the_options_of_ddp_reach_accelerates_arguments(tmp_path: Path, value: bool | None) -> None:
    (handler,) = trainer_in(tmp_path, ddp_static_graph=value)._build_accelerator_args()["kwargs_handlers"]
    assert handler.static_graph is bool(value)


def test_an_optimizer_dict_of_get_optimizer_cls_and_kwargs_is_used(tmp_path: Path) -> None:
    class Mine(Trainer):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, dict[str, Any]]:
            return torch.optim.SGD, {"optimizer_dict": [{"params": list(model.out.parameters()), "lr": 0.5}], "lr": 0.1}

    trainer = trainer_in(tmp_path, cls=Mine)
    optimizer = trainer.create_optimizer()
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.5 and len(group["params"]) == 2


def test_a_model_that_loads_itself_resumes_with_a_buffer_that_grew(tmp_path: Path) -> None:
    class Grows(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(0))

        def forward(self, x: Any, labels: Any = None) -> Any:
            self.seen = torch.cat([self.seen, x[:, 0].detach()])
            return super().forward(x, labels)

        def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            self.seen = state_dict["seen"].clone()
            return super().load_state_dict(state_dict, strict, assign)

    whole = regression_run(tmp_path / "a", model=Grows(), n=12, max_steps=3, save_steps=1).model.seen
    again = trainer_in(tmp_path / "b", model=Grows(), n=12, max_steps=3, per_device_train_batch_size=4)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert torch.equal(again.model.seen, whole)


# ---- callbacks -------------------------------------------------------------------------------------------------------


def test_a_handler_of_ones_own_calls_events(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Mine(loopwright.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.update(kwargs, state=state, control=control)

    handler = CallbackHandler([DefaultFlowCallback(), Mine()], "model", "processor", "optimizer", "schedule")
    state, control = TrainerState(), TrainerControl()
    assert handler.call_event("on_log", None, state, control, logs={"loss": 1.0}) is control
    assert seen["state"] is state and seen["control"] is control and seen["logs"] == {"loss": 1.0}
    assert (seen["model"], seen["optimizer"], seen["lr_scheduler"]) == ("model", "optimizer", "schedule")
    assert handler.callback_list == "DefaultFlowCallback\nMine"


def test_callbacks_that_are_missing_or_twice_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(loopwright.TrainerCallback): ...

    one = Mine()
    for callbacks, text in (([DefaultFlowCallback, Mine, Mine], "Mine is added a second time"),
                            ([DefaultFlowCallback(), one, one], "same Mine object"),
                            ([one], "no DefaultFlowCallback")):  # fmt: skip
        caplog.clear()
        CallbackHandler(callbacks)
        assert text in caplog.text
    caplog.clear()
    CallbackHandler([DefaultFlowCallback(), Mine(), Mine()])
    assert caplog.text == "", "two objects of a class are two callbacks"


def test_control_begins_anew() -> None:
    control = TrainerControl(True, True, True, True, True)
    control._new_step()
    assert control == TrainerControl(True, True)
    control._new_epoch()
    assert control == TrainerControl(True)
    control._new_training()
    assert control == TrainerControl()


@pytest.mark.parametrize(("value", "counter"), [(0.8, 2), (0.95, 0), (0.905, 2)])
def test_early_stopping_checks_a_value(value: float, counter: int) -> None:
    class Args:
        greater_is_better = True

    callback = EarlyStoppingCallback(3, 0.01)
    callback.early_stopping_patience_counter = 1
    callback.check_metric_value(Args(), TrainerState(best_metric=0.9), TrainerControl(), value)
    assert callback.early_stopping_patience_counter == counter


def test_an_override_of_check_metric_value_is_called(tmp_path: Path) -> None:
    values: list[float] = []

    class Mine(EarlyStoppingCallback):
        def check_metric_value(self, args: Any, state: Any, control: Any, metric_value: Any) -> None:
            values.append(metric_value)
            super().check_metric_value(args, state, control, metric_value)

    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "max_steps": 3}
    regression_run(tmp_path, callbacks=[Mine(5)], **options)
    assert len(values) == 3


@pytest.mark.parametrize(("given", "used"), [((), (5, 0.2)), ((3, 0.1), (3, 0.1)), ((3,), (3, 0.2))])
def test_arguments_of_early_stopping_that_were_not_given_are_restored(
    tmp_path: Path, given: tuple[Any, ...], used: tuple[int, float]
) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "save_steps": 1}
    regression_run(tmp_path, callbacks=[EarlyStoppingCallback(5, 0.2)], max_steps=1, **options)
    callback = EarlyStoppingCallback(*given)
    eval_dataset = regression_data(4)
    again = trainer_in(tmp_path, n=40, max_steps=2, callbacks=[callback], eval_dataset=eval_dataset, **options)
    again.train(resume_from_checkpoint=True)
    assert (callback.early_stopping_patience, callback.early_stopping_threshold) == used


# ---- semantics -------------------------------------------------------------------------------------------------------


def test_named_columns_are_removed_before_the_collator_and_what_it_makes_is_passed_on(tmp_path: Path) -> None:
    shown: list[set[str]] = []

    class Mine(Trainer):
        def _set_signature_columns_if_needed(self) -> None:
            self._signature_columns = ["x", "labels"]

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            shown.append({*inputs})
            return super().compute_loss(model, {k: inputs[k] for k in ("x", "labels")}, return_outputs, **kwargs)

    def collate(rows: list[Any]) -> dict[str, Any]:
        assert all({*row} == {"x", "labels"} for row in rows)
        return {"made": torch.ones(1), **{name: torch.stack([row[name] for row in rows]) for name in rows[0]}}

    trainer = trainer_in(tmp_path, cls=Mine, max_steps=1, data_collator=collate, save_strategy="no")
    trainer.train_dataset = [{**row, "more": torch.ones(1)} for row in trainer.train_dataset]
    trainer.train()
    assert shown and all(each == {"made", "x", "labels"} for each in shown)


def test_messages_about_named_columns_do_not_blame_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(Trainer):
        def _set_signature_columns_if_needed(self) -> None:
            self._signature_columns = ["x", "labels"]

    monkeypatch.setattr(logging.getLogger("loopwright"), "propagate", True)
    trainer = trainer_in(tmp_path, cls=Mine, max_steps=1, save_strategy="no", log_level="info")
    trainer.train_dataset = [{**row, "more": torch.ones(1)} for row in trainer.train_dataset]
    with caplog.at_level(logging.INFO, logger="loopwright"):
        trainer.train()
    assert "that the trainer does not name in _signature_columns: more" in caplog.text
    trainer.train_dataset = [{"more": torch.ones(1), "labels": torch.ones(1)}] * 4
    with pytest.raises(loopwright.DataError, match=r"_signature_columns, which this trainer sets \(columns: more"):
        trainer.train()


def test_modes_in_logs_of_an_evaluation_and_in_training_steps(tmp_path: Path) -> None:
    logged: list[bool] = []
    trained: list[bool] = []

    class Mine(Trainer):
        def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
            if "eval_loss" in logs:
                logged.append(self.model.training)
            super().log(logs, *args, **kwargs)

        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_in_train and torch.is_grad_enabled():
                trained.append(model.training)
            return super().compute_loss(model, *args, **kwargs)

    class Leaves(loopwright.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            model.eval()

    regression_run(tmp_path, cls=Mine, callbacks=[Leaves()], max_steps=3, eval_strategy="steps", eval_steps=1)
    assert logged == [False] * 3 and trained and all(trained)


def test_an_output_folder_that_is_changed_after_construction_is_used(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "a", max_steps=1, save_steps=1)
    trainer.args.output_dir = str(tmp_path / "b")
    trainer.train()
    assert (tmp_path / "b" / "checkpoint-1").is_dir() and not (tmp_path / "a" / "checkpoint-1").exists()


def test_labels_that_forward_takes_as_keywords(tmp_path: Path) -> None:
    class Keywords(Regression):
        def forward(self, x: Any, **kwargs: Any) -> Any:
            return super().forward(x, kwargs.get("labels"))

    trainer = trainer_in(tmp_path, model=Keywords(), label_names=["labels"], eval_dataset=regression_data(4))
    assert trainer.predict(regression_data(4)).label_ids.shape == (4,)
    assert "eval_loss" in trainer.evaluate()


def test_label_smoothing_is_left_out_for_several_labels(tmp_path: Path) -> None:
    model = Regression()
    model.config = type("Config", (), {"problem_type": "multi_label_classification"})()  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=r"multi-label.*label_smoothing_factor=0.1"):
        assert trainer_in(tmp_path, model=model, label_smoothing_factor=0.1).label_smoother is None
    with pytest.raises(loopwright.LoopwrightError, match="strict"):
        trainer_in(tmp_path, model=model, label_smoothing_factor=0.1, strict=True)


def test_memory_of_the_constructor_is_reported_once(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, skip_memory_metrics=False, eval_dataset=regression_data(4))
    first, second = trainer.evaluate(), trainer.evaluate()
    for name in ("init_mem_cpu_alloc_delta", "before_init_mem_cpu"):
        assert name in first and name not in second


# ---- trainer.accelerator ---------------------------------------------------------------------------------------------


def test_the_accelerator_of_one_process(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, gradient_accumulation_steps=4)
    it, model = trainer.accelerator, trainer.model
    assert (it.num_processes, it.process_index, it.local_process_index) == (1, 0, 0)
    assert it.is_main_process and it.is_local_main_process and it.is_last_process and not it.use_distributed
    assert it.device.type == "cpu" and it.mixed_precision == "no" and str(it.distributed_type).endswith("NO")
    assert it.state.num_processes == 1 and it.parallelism_config is None
    assert it.even_batches and it.use_seedable_sampler and it.dataloader_config.even_batches
    assert it.gradient_accumulation_steps == 1, "what backward divides a loss by"
    values = torch.arange(3.0)
    assert torch.equal(it.gather(values), values) and torch.equal(it.gather_for_metrics(values), values)
    assert it.gather_for_metrics(["a", 1]) == ["a", 1]
    assert torch.equal(it.reduce(values, "mean", scale=2.0), values * 2)
    assert torch.equal(it.pad_across_processes(values, pad_index=7), values)
    with it.split_between_processes([1, 2, 3]) as own:
        assert own == [1, 2, 3]
    assert it.unwrap_model(model) is model is it.unwrap_model(nn.DataParallel(model))
    other = nn.Linear(1, 1)
    assert it.prepare(other) is other and it.prepare_model(other, evaluation_mode=True).training is False
    loader = torch.utils.data.DataLoader([1])
    prepared = it.prepare_data_loader(loader)
    assert isinstance(prepared, torch.utils.data.DataLoader) and prepared.dataset == [1] and len(prepared) == 1
    assert [batch.tolist() for batch in prepared] == [[1]] and prepared.total_batch_size == 1
    with it.main_process_first(), it.local_main_process_first(), it.autocast(), it.accumulate(other), it.no_sync(other):
        it.backward(other(torch.ones(1, 1)).sum())
    assert it.clip_grad_norm_(other.parameters(), 1.0) > 0 and other.weight.grad is not None
    assert it.get_state_dict(model).keys() == model.state_dict().keys()
    it.wait_for_everyone()


@pytest.mark.parametrize("name", ["skip_first_batches", "profile", "init_trackers", "set_trigger"])
def test_what_the_accelerator_does_not_have_names_what_to_use(tmp_path: Path, name: str) -> None:
    with pytest.raises(loopwright.NotAvailable, match=rf"trainer.accelerator.{name}\b.*(use|keep) "):
        getattr(trainer_in(tmp_path).accelerator, name)({})


def test_the_configuration_of_batches_with_one_process(tmp_path: Path) -> None:
    config = {"split_batches": True, "dispatch_batches": True, "even_batches": False, "use_seedable_sampler": False}
    trainer = trainer_in(tmp_path, accelerator_config={**config, "gradient_accumulation_kwargs": {"num_steps": 3}})
    assert {name: getattr(trainer.accelerator, name) for name in config} == config
    assert trainer.args.gradient_accumulation_steps == 3
    assert trainer.accelerator.gradient_state.plugin_kwargs == {"num_steps": 3}
    assert {f"accelerator_config.{name}" for name in config} <= {*trainer.args.without_effect()}


def test_configurations_that_are_refused(tmp_path: Path) -> None:
    from loopwright.args.groups.distributed import AcceleratorConfig

    for config, error, text in (
        (AcceleratorConfig, NotImplementedError, "AcceleratorConfig.*pass an instance"),
        ({"gradient_accumulation_kwargs": {"steps": 3}}, ValueError, "no key 'steps'"),
    ):
        with pytest.raises(error, match=text):
            TrainingArguments(str(tmp_path), accelerator_config=config)
    with pytest.raises(ValueError, match=r"num_steps.*10 and 2"):
        config = {"gradient_accumulation_kwargs": {"num_steps": 10}}
        trainer_in(tmp_path, accelerator_config=config, gradient_accumulation_steps=2)


def test_a_configured_state_must_exist(tmp_path: Path) -> None:
    states = pytest.importorskip("accelerate.state")
    states.AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(ValueError, match=r"use_configured_state.*beforehand"):
        TrainingArguments(str(tmp_path), accelerator_config={"use_configured_state": True}, use_cpu=True)
    assert TrainingArguments(str(tmp_path), use_cpu=True).distributed_state is not None, "which makes the state"
    TrainingArguments(str(tmp_path), accelerator_config={"use_configured_state": True}, use_cpu=True)
    states.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_run_resumes_without_a_warning_in_strict_mode(tmp_path: Path) -> None:
    options = {"n": 16, "max_steps": 3, "save_steps": 1, "strict": True}
    regression_run(tmp_path, callbacks=[StopAt(1)], **options)
    given = {"per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-2}
    trainer = trainer_in(tmp_path, **options, **given)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3


def test_a_prepared_loader_is_the_loader_of_the_user(tmp_path: Path) -> None:
    """Attributes are those of the given loader, also in a copy; the trainer uses the given one."""
    import copy

    class Mine(torch.utils.data.DataLoader[Any]):
        note = "mine"

        def __iter__(self) -> Any:
            yield {"x": torch.tensor([7.0])}

    trainer = trainer_in(tmp_path)
    prepared = trainer.accelerator.prepare(Mine([1, 2, 3]))
    assert prepared.note == "mine" and prepared.batch_size == 1 and copy.copy(prepared).note == "mine"
    assert [batch["x"].item() for batch in prepared] == [7.0] and not trainer.accelerator.gradient_state.in_dataloader
    prepared.note = "changed"
    assert prepared.given.note == "changed" and trainer._loopwright.data.share_loader(prepared) is prepared.given
    ends = [trainer.accelerator.gradient_state.end_of_dataloader for _ in trainer.accelerator.prepare(Mine([1]))]
    assert ends == [True] and trainer.accelerator.prepare(prepared) is prepared
