"""What Trainer(...) accepts, sets up and leaves alone."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import loopwright
from loopwright import ArgumentsError, Trainer, TrainerCallback, TrainingArguments
from loopwright.core.user_code.overrides import NEVER_CALLED
from loopwright.pt.constructor_checks import PARAMETERS
from loopwright.pt.data.collators import DataCollatorWithPadding, default_data_collator
from tests.models import TASKS, Regression, regression_data, small_bert

transformers = pytest.importorskip("transformers")

DATA = regression_data(8)


def arguments(**options: Any) -> TrainingArguments:
    return TrainingArguments(
        "run", **{"max_steps": 2, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", **options}
    )


def test_the_constructor_has_the_parameters_of_transformers_in_their_order() -> None:
    ours = list(inspect.signature(Trainer.__init__).parameters)
    theirs = list(inspect.signature(transformers.Trainer.__init__).parameters)
    assert ours[: len(theirs)] == theirs
    assert {*ours, "tokenizer"} == {"self", "old_names", *PARAMETERS}


def test_every_public_method_of_transformers_is_there() -> None:
    public = [
        name
        for name, member in vars(transformers.Trainer).items()
        if not name.startswith("_")
        and name not in NEVER_CALLED
        and (callable(member) or isinstance(member, staticmethod | property))
    ]
    assert len(public) > 30 and [name for name in public if not hasattr(Trainer, name)] == []


ATTRIBUTES = """
model model_wrapped args state control optimizer lr_scheduler accelerator callback_handler train_dataset eval_dataset
data_collator processing_class compute_metrics compute_loss_func label_names can_return_loss label_smoother
model_accepts_loss_kwargs is_in_train is_model_parallel place_model_on_device is_deepspeed_enabled is_fsdp_enabled
is_fsdp_xla_enabled deepspeed hp_search_backend hp_name objective hub_model_id current_flos
current_gradient_accumulation_steps gather_function neftune_noise_alpha loss_is_scaled_for_ga
""".split()


def test_attributes_users_rely_on_are_there_from_the_start() -> None:
    trainer = Trainer(Regression(), arguments())
    assert [name for name in ATTRIBUTES if not hasattr(trainer, name)] == []


def test_two_positional_arguments_are_enough() -> None:
    model, args = Regression(), arguments()
    trainer = Trainer(model, args)
    assert trainer.model is model and trainer.args is args
    assert not trainer.is_in_train


def test_without_arguments_the_folder_is_tmp_trainer(tmp_path: Path) -> None:
    assert Trainer(Regression()).args.output_dir == "tmp_trainer"
    assert (tmp_path / "tmp_trainer").is_dir()


def test_the_output_folder_is_made() -> None:
    Trainer(Regression(), arguments())
    assert Path("run").is_dir()
    assert list(Path("run").iterdir()) == []


def test_creating_a_trainer_seeds_everything() -> None:
    drawn = []
    for _ in range(2):
        random.random(), np.random.rand(), torch.rand(1)
        Trainer(Regression(), arguments(seed=5))
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]
    transformers.set_seed(5)
    assert drawn[0] == (random.random(), np.random.rand(), torch.rand(1).item())


def test_transformers_own_arguments_are_converted_or_refused_clearly(tmp_path: Path) -> None:
    given = {"max_steps": 2, "use_cpu": True, "learning_rate": 0.5, "lr_scheduler_type": "cosine", "report_to": "none"}
    trainer = Trainer(Regression(), transformers.TrainingArguments(str(tmp_path), **given), train_dataset=DATA)
    assert isinstance(trainer.args, loopwright.TrainingArguments)
    assert {name: getattr(trainer.args, name) for name in given} == {**given, "report_to": []}
    trainer.train()
    assert trainer.state.global_step == 2
    with pytest.raises(loopwright.ArgumentsError, match="lomo"):
        Trainer(Regression(), transformers.TrainingArguments(str(tmp_path), optim="lomo"), train_dataset=DATA)


# ---- collators and processors ---------------------------------------------------------------------------------------


class Tokenizer:
    model_input_names = ["input_ids"]
    saved: list[str] = []

    def pad(self, features: Any, **kwargs: Any) -> Any:
        return {name: torch.tensor([each[name] for each in features]) for name in features[0]}

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


def test_the_default_collator_pads_with_a_tokenizer_and_stacks_otherwise() -> None:
    assert Trainer(Regression(), arguments()).data_collator is default_data_collator
    assert isinstance(
        Trainer(Regression(), arguments(), processing_class=Tokenizer()).data_collator, DataCollatorWithPadding
    )
    assert Trainer(Regression(), arguments(), processing_class=object()).data_collator is default_data_collator
    assert Trainer(Regression(), arguments(), data_collator=list).data_collator is list


def test_a_processor_is_saved_with_the_model(tmp_path: Path) -> None:
    Trainer(Regression(), arguments(), processing_class=Tokenizer()).save_model("saved")
    assert (tmp_path / "saved/tokenizer.json").is_file()
    assert (tmp_path / "saved/model.safetensors").is_file()


def test_tokenizer_is_the_old_name_of_processing_class(caplog: Any) -> None:
    tokenizer = Tokenizer()
    trainer = Trainer(Regression(), arguments(), tokenizer=tokenizer)
    assert trainer.processing_class is tokenizer
    assert "processing_class" in caplog.text
    with pytest.raises(ArgumentsError, match="are the same; pass only one"):
        Trainer(Regression(), arguments(), tokenizer=tokenizer, processing_class=Tokenizer())


# ---- models ---------------------------------------------------------------------------------------------------------


def test_labels_are_found_from_the_forward() -> None:
    class Two(nn.Module):
        def forward(self, x: Any, labels: Any = None, next_sentence_label: Any = None) -> None: ...

    class ForQuestionAnswering(nn.Module):
        def forward(self, x: Any, start_positions: Any = None, end_positions: Any = None) -> None: ...

    assert Trainer(Two(), arguments()).label_names == ["labels", "next_sentence_label"]
    assert Trainer(ForQuestionAnswering(), arguments()).label_names == ["start_positions", "end_positions"]
    assert Trainer(Two(), arguments(label_names=["labels"])).label_names == ["labels"]
    assert Trainer(nn.Linear(2, 2), arguments()).label_names == []


@pytest.mark.parametrize("use_cache", [False, True])
def test_the_cache_of_a_model_is_switched_as_asked(use_cache: bool) -> None:
    model = small_bert(0.0)
    model.config.use_cache = not use_cache
    Trainer(model, arguments(use_cache=use_cache))
    assert model.config.use_cache is use_cache


def test_an_encoder_is_given_no_cache() -> None:
    """Its model refuses to run with one."""
    model = TASKS["t5"].model(0.0)
    trainer = Trainer(model, arguments(use_cache=True))
    assert model.config.use_cache and not model.encoder.config.use_cache
    assert len(trainer.predict(TASKS["t5"].data(2)).predictions[0]) == 2


def test_label_smoothing_needs_no_config() -> None:
    assert Trainer(Regression(), arguments(label_smoothing_factor=0.1)).label_smoother is not None


@pytest.mark.parametrize("factory", [lambda: Regression(), lambda trial: Regression()], ids=["none", "trial"])
def test_model_init_makes_the_model_anew_for_every_training(factory: Any) -> None:
    made: list[Any] = []

    def init() -> nn.Module:
        made.append(factory() if factory.__code__.co_argcount == 0 else factory(None))
        return made[-1]

    trainer = Trainer(args=arguments(logging_steps=1), model_init=init, train_dataset=DATA)
    runs = []
    for _ in range(2):
        trainer.train()
        runs.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        assert trainer.model is made[-1]
        assert trainer.optimizer.param_groups[0]["params"][0] in set(trainer.model.parameters())
    assert len(made) == 3
    assert runs[0] == runs[1]


def test_a_peft_model_trains_only_its_adapter_and_saves_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    from tests.models import token_data

    model = peft.get_peft_model(
        small_bert(0.0),
        peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], modules_to_save=["classifier"]),
    )
    before = {name: p.clone() for name, p in model.named_parameters()}
    data = token_data(8, labels="class")
    args = arguments(save_strategy="steps", save_steps=1, max_steps=3, learning_rate=1e-2, logging_steps=1)
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data)
    assert trainer.label_names == ["labels"]
    trainer.train()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name
    assert (tmp_path / "run/checkpoint-2/adapter_model.safetensors").is_file()
    assert not (tmp_path / "run/checkpoint-2/model.safetensors").exists()
    assert trainer.predict(data).predictions.shape == (8, 3)

    torch.manual_seed(0)
    fresh = peft.get_peft_model(
        small_bert(0.0),
        peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], modules_to_save=["classifier"]),
    )
    again = Trainer(fresh, arguments(max_steps=3, learning_rate=1e-2, logging_steps=1), train_dataset=data)
    again.train(str(tmp_path / "run/checkpoint-2"))
    for name, p in model.named_parameters():
        assert torch.equal(p, dict(fresh.named_parameters())[name]), name


class TupleOutput(Regression):
    def forward(self, x: Any, labels: Any = None) -> Any:
        return tuple(super().forward(x, labels).values())


class DataclassOutput(Regression):
    def forward(self, x: Any, labels: Any = None) -> Any:
        from dataclasses import make_dataclass

        out = super().forward(x, labels)
        return make_dataclass("Out", ["loss", "y"])(loss=out.get("loss"), y=out["y"])


@pytest.mark.parametrize("model", [Regression, TupleOutput, DataclassOutput])
def test_outputs_of_every_shape_train_and_predict_alike(model: Any) -> None:
    torch.manual_seed(0)
    trainer = Trainer(model(), arguments(logging_steps=1), train_dataset=DATA, eval_dataset=DATA)
    trainer.train()
    reference = Regression()
    torch.manual_seed(0)
    plain = Trainer(reference.__class__(), arguments(logging_steps=1), train_dataset=DATA, eval_dataset=DATA)
    plain.model.load_state_dict(trainer.model.state_dict())
    np.testing.assert_array_equal(trainer.predict(DATA).predictions, plain.predict(DATA).predictions)
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]


# ---- callbacks ------------------------------------------------------------------------------------------------------


class Quiet(TrainerCallback):
    pass


def test_callbacks_may_be_classes_or_instances_and_can_be_taken_out() -> None:
    instance = Quiet()
    trainer = Trainer(Regression(), arguments(), callbacks=[Quiet, instance])
    mine = [each for each in trainer.callback_handler.callbacks if isinstance(each, Quiet)]
    assert len(mine) == 2 and mine[1] is instance
    assert trainer.pop_callback(instance) is instance
    trainer.remove_callback(Quiet)
    assert not any(isinstance(each, Quiet) for each in trainer.callback_handler.callbacks)
    trainer.add_callback(Quiet)
    assert isinstance(trainer.callback_handler.callbacks[-1], Quiet)


def test_callbacks_of_transformers_are_welcome() -> None:
    seen = []

    class Theirs(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(state.global_step)
            control.should_training_stop = True

    Trainer(Regression(), arguments(), train_dataset=DATA, callbacks=[Theirs()]).train()
    assert seen == [1]


# ---- optimizers -----------------------------------------------------------------------------------------------------


def test_an_optimizer_and_a_scheduler_that_are_given_are_used() -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    trainer = Trainer(model, arguments(logging_steps=1), train_dataset=DATA, optimizers=(optimizer, scheduler))
    trainer.train()
    assert trainer.optimizer is optimizer and trainer.lr_scheduler is scheduler
    rates = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
    assert rates == pytest.approx([0.5, 0.05])


def test_an_optimizer_class_and_its_options() -> None:
    trainer = Trainer(
        Regression(), arguments(weight_decay=0.25), train_dataset=DATA,
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.5, "momentum": 0.75}),
    )  # fmt: skip
    trainer.train()
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.75
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.25, 0.0}


def test_helpers_about_parameters() -> None:
    trainer = Trainer(Regression(), arguments(learning_rate=0.5), train_dataset=DATA)
    assert trainer.get_num_trainable_parameters() == sum(p.numel() for p in trainer.model.parameters())
    trainer.create_optimizer()
    assert trainer.get_learning_rates() == [0.5, 0.5]
    assert trainer.get_optimizer_group(trainer.model.out.weight)["lr"] == 0.5
    assert sum(map(len, trainer.get_optimizer_group())) == 4


def test_what_a_user_calls_after_training(tmp_path: Path, capsys: Any) -> None:
    trainer = Trainer(Regression(), arguments(), train_dataset=DATA, eval_dataset=DATA)
    result = trainer.train()
    assert loopwright.TrainOutput(*result) == result
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_state()
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"train_results.json", "eval_results.json", "all_results.json", "trainer_state.json"} <= names
    assert "train_loss" in capsys.readouterr().out
    assert transformers.TrainerState.load_from_json(str(tmp_path / "run/trainer_state.json")).global_step == 2


def test_named_evaluation_sets() -> None:
    trainer = Trainer(Regression(), arguments(), eval_dataset={"small": DATA[:2], "large": DATA})
    metrics = trainer.evaluate()
    assert {"eval_small_loss", "eval_large_loss"} <= set(metrics)
    assert "eval_loss" in trainer.evaluate("small")


def test_one_of_several_processes_that_cannot_find_the_others_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(loopwright.ArgumentsError, match="MASTER_ADDR, MASTER_PORT is not set"):
        loopwright.Trainer(torch.nn.Linear(1, 1), loopwright.TrainingArguments(str(tmp_path), use_cpu=True))


def test_tokenizer_is_still_a_name_for_the_processor(tmp_path: Path) -> None:
    processor = object()
    trainer = Trainer(Regression(), TrainingArguments(str(tmp_path), use_cpu=True), processing_class=processor)
    assert trainer.tokenizer is processor


def test_the_best_of_several_metrics_needs_a_name() -> None:
    args = arguments(save_strategy="best", eval_strategy="steps", eval_steps=1)
    with pytest.raises(ValueError, match="`args.metric_for_best_model` must be provided"):
        Trainer(Regression(), args, train_dataset=DATA, eval_dataset=DATA, compute_metrics=lambda given: {"f1": 1.0})
    trainer = Trainer(Regression(), args, train_dataset=DATA, eval_dataset=DATA)
    trainer.train()
    assert trainer.state.best_metric == min(row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row)
