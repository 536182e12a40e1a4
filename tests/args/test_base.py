"""BaseArguments as a whole: unknown names, all problems together, copies, views, setters, processes."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import pickle
import subprocess
import sys
from dataclasses import InitVar, dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from loopwright.args.base import BaseArguments
from loopwright.errors import ArgumentsError, NotAvailable, UnknownArgument

FRAMEWORKS = ("torch", "transformers", "tensorflow", "jax", "numpy", "datasets", "accelerate", "yaml")
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda args: pickle.loads(pickle.dumps(args)),
    "replace": dataclasses.replace,
    "to_dict": lambda args: type(args)(**args.to_dict()),
    "json": lambda args: type(args)(**json.loads(args.to_json_string())),
}


@dataclass
class OwnArguments(BaseArguments):
    """A user's dataclass."""

    cache_dir: str | None = None
    api_token: str | None = None
    title: str = "a name our own groups use"


class PlainArguments(BaseArguments):
    """A user's class with its own __init__."""

    def __init__(self, folder: str, **kwargs: object) -> None:
        super().__init__(folder, **kwargs)


@dataclass
class InitVarArguments(BaseArguments):
    """A user's dataclass with a parameter that is no field."""

    scale: InitVar[int] = 1

    def __post_init__(self, scale: int) -> None:
        super().__post_init__()
        self.learning_rate *= scale


def test_importing_brings_no_framework():
    code = "import sys, loopwright.args.base as base; base.BaseArguments('x'); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(FRAMEWORKS) & set(result.stdout.split()) == set()


def test_the_torch_arguments_import_no_torch_until_asked_for_a_device():
    code = "import sys, loopwright.pt.arguments as a; a.TrainingArguments('x'); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize("cls", [BaseArguments, OwnArguments])
def test_an_unknown_name_suggests_the_nearest(cls):
    with pytest.raises(UnknownArgument, match="has no argument 'lerning_rate'; did you mean 'learning_rate'"):
        cls("out", lerning_rate=1e-4)


def test_an_unknown_name_is_also_a_type_error_and_all_are_listed():
    with pytest.raises(TypeError) as caught:
        BaseArguments(lerning_rate=1, batchsize=2)
    assert "lerning_rate" in str(caught.value) and "batchsize" in str(caught.value)


def test_classes_with_their_own_init_are_left_alone():
    assert PlainArguments(folder="x", seed=3).seed == 3
    assert InitVarArguments("x", scale=2, learning_rate=1.0).learning_rate == 2.0


def test_all_problems_are_reported_together():
    with pytest.raises(ArgumentsError) as caught:
        BaseArguments(
            per_device_train_batch_size=0,
            eval_strategy="stps",
            fp16=True,
            bf16=True,
            learning_rate="fast",
            past_index=3,
            fsdp="full_shart",
        )
    assert len(caught.value.problems) == 6
    words = ("per_device_train_batch_size=0", "'stps'", "fp16 and bf16", "'fast'", "past_index=3", "'full_shart'")
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("cls", [BaseArguments, OwnArguments])
def test_copies_are_equal(way, cls):
    args = cls(
        "out",
        eval_strategy="steps",
        load_best_model_at_end=True,
        warmup_ratio=0.1,
        report_to="tensorboard",
        lr_scheduler_kwargs={"a": 1},
        accelerator_config={"non_blocking": True},
        torch_compile=True,
        use_cpu=True,
    )
    assert COPIES[way](args) == args


@given(
    learning_rate=st.floats(0, 10),
    steps=st.one_of(st.integers(1, 10_000), st.floats(0.001, 0.999)),
    strategy=st.sampled_from(["no", "steps", "epoch"]),
    bf16=st.booleans(),
    metric=st.sampled_from([None, "accuracy", "eval_loss"]),
)
def test_any_arguments_survive_their_dict(learning_rate, steps, strategy, bf16, metric):
    args = BaseArguments(
        "out",
        learning_rate=learning_rate,
        logging_steps=steps,
        eval_strategy=strategy,
        bf16=bf16,
        metric_for_best_model=metric,
    )
    assert BaseArguments(**json.loads(args.to_json_string())) == args
    assert dataclasses.replace(args) == args


def test_settling_twice_changes_nothing():
    args = BaseArguments("out", eval_strategy="steps", torch_compile_mode="default", report_to="all", use_cpu=True)
    again = copy.deepcopy(args)
    again.settle()
    assert again == args


def test_tokens_are_masked_everywhere():
    args = OwnArguments("out", hub_token="hf_secret", api_token=None)
    assert args.to_dict()["hub_token"] == "<HUB_TOKEN>" and args.to_dict()["api_token"] is None
    assert OwnArguments("out", api_token="secret").to_dict()["api_token"] == "<API_TOKEN>"
    views = (repr(args), str(args), args.to_json_string(), str(args.to_sanitized_dict()))
    assert [view for view in views if "hf_secret" in view] == []


def test_a_masked_token_is_no_token():
    assert BaseArguments("out", hub_token="<HUB_TOKEN>").hub_token is None


def test_an_old_token_is_not_told(caplog):
    BaseArguments("out", push_to_hub_token="hf_secret")
    assert "hf_secret" not in caplog.text


def test_to_dict_holds_plain_values():
    values = BaseArguments(Path("a") / "b", eval_strategy="epoch").to_dict()
    assert values["output_dir"] == str(Path("a") / "b") and type(values["eval_strategy"]) is str
    assert values["accelerator_config"]["even_batches"] is True


def test_to_sanitized_dict_holds_what_trackers_take():
    values = BaseArguments("out").to_sanitized_dict()
    assert {type(value) for value in values.values()} <= {bool, int, float, str}
    assert (values["train_batch_size"], values["eval_batch_size"]) == (8, 8)


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({}, {"output_dir": "trainer_output", "report_to": [], "do_eval": False, "eval_steps": None, "debug": []}),
        ({"output_dir": "~/run"}, {"output_dir": str(Path.home() / "run")}),
        ({"eval_strategy": "epoch"}, {"do_eval": True, "eval_steps": None}),
        ({"eval_strategy": "steps", "logging_steps": 7}, {"do_eval": True, "eval_steps": 7}),
        ({"eval_strategy": "steps", "eval_steps": 0}, {"eval_steps": 500}),
        ({"eval_strategy": "steps", "eval_steps": 9}, {"eval_steps": 9}),
        (
            {"load_best_model_at_end": True, "eval_strategy": "epoch"},
            {"metric_for_best_model": "loss", "greater_is_better": False},
        ),
        (
            {"save_strategy": "best", "eval_strategy": "epoch", "metric_for_best_model": "loss"},
            {"metric_for_best_model": "loss", "greater_is_better": False},
        ),
        ({"lr_scheduler_type": "greedy", "eval_strategy": "epoch"}, {"metric_for_best_model": "loss"}),
        ({"metric_for_best_model": "accuracy"}, {"greater_is_better": True}),
        ({"metric_for_best_model": "eval_x_loss"}, {"greater_is_better": False}),
        ({"metric_for_best_model": "loss", "greater_is_better": True}, {"greater_is_better": True}),
        ({"torch_compile": True}, {"torch_compile_backend": "inductor"}),
        ({"torch_compile_mode": "default"}, {"torch_compile": True, "torch_compile_backend": "inductor"}),
        ({"use_cpu": True}, {"dataloader_pin_memory": False}),
        ({"report_to": None}, {"report_to": []}),
        ({"report_to": ["none"]}, {"report_to": []}),
        ({"report_to": "tensorboard"}, {"report_to": ["tensorboard"]}),
        ({"bf16": True}, {"mixed_precision": "bf16"}),
        ({"fp16": True}, {"mixed_precision": "fp16"}),
    ],
    ids=str,
)
def test_what_follows_from_other_arguments(given_, expected):
    args = BaseArguments(**given_)
    assert {name: getattr(args, name) for name in expected} == expected


def test_all_trackers_are_those_that_are_installed(monkeypatch):
    monkeypatch.setattr("loopwright.args.groups.tracking.find_spec", lambda name: None)
    assert BaseArguments(report_to="all").report_to == []
    monkeypatch.setattr("loopwright.args.groups.tracking.find_spec", lambda name: name == "tensorboard" or None)
    assert BaseArguments(report_to="all").report_to == ["tensorboard"]


def test_trackers_of_other_packages_are_known(monkeypatch):
    monkeypatch.setattr("loopwright.args.rules.third_party", lambda: ["own"])
    assert BaseArguments(report_to="own").report_to == ["own"]


def test_tensorboards_folder_is_the_one_asked_for(monkeypatch):
    assert BaseArguments("out", logging_dir="here").get_tensorboard_dir() == "here"
    assert Path(BaseArguments("out").get_tensorboard_dir()).parent == Path("out") / "runs"
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "there")
    assert BaseArguments("out").get_tensorboard_dir() == "there"


@pytest.mark.parametrize(("warmup", "expected"), [(0, 0), (10, 10), (0.1, 10), (0.001, 1)])
def test_warmup_steps_are_a_number_or_a_share(warmup, expected):
    assert BaseArguments(warmup_steps=warmup).get_warmup_steps(100) == expected


def test_log_levels(monkeypatch):
    assert BaseArguments(log_level="error").get_process_log_level() == logging.ERROR
    assert BaseArguments().get_process_log_level() == logging.getLogger("loopwright").getEffectiveLevel()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert BaseArguments().get_process_log_level() == logging.WARNING


def test_one_process_is_the_main_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    args = BaseArguments("out", ddp_timeout=60)
    assert (args.world_size, args.process_index, args.local_process_index) == (1, 0, 0)
    assert args.parallel_mode == "not_parallel" and args.should_log and args.should_save
    assert args.ddp_timeout_delta == timedelta(minutes=1)
    with args.main_process_first(desc="tokenizing"):
        pass


def test_process_numbers_come_from_the_launcher(monkeypatch):
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    args = BaseArguments("out", log_on_each_node=False)
    assert (args.world_size, args.process_index, args.local_process_index) == (8, 5, 1)
    assert args.parallel_mode == "distributed" and not args.should_log and not args.should_save
    with pytest.raises(NotAvailable, match="8 processes"), args.main_process_first():
        pass
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ArgumentsError, match="RANK='first'"):
        _ = args.process_index


SETTERS = [
    ("set_training", {"batch_size": 2, "num_epochs": 1}, {"per_device_train_batch_size": 2, "do_train": True}),
    ("set_evaluate", {"strategy": "steps", "steps": 5}, {"eval_strategy": "steps", "eval_steps": 5, "do_eval": True}),
    ("set_testing", {"batch_size": 3}, {"per_device_eval_batch_size": 3, "do_predict": True}),
    ("set_save", {"strategy": "epoch", "total_limit": 2}, {"save_strategy": "epoch", "save_total_limit": 2}),
    ("set_logging", {"report_to": "tensorboard"}, {"report_to": ["tensorboard"], "log_level_replica": "warning"}),
    ("set_optimizer", {"name": "sgd", "args": "momentum=0.9"}, {"optim": "sgd", "optim_args": "momentum=0.9"}),
    ("set_lr_scheduler", {"name": "cosine", "warmup_steps": 3}, {"lr_scheduler_type": "cosine", "warmup_steps": 3}),
    ("set_lr_scheduler", {"warmup_ratio": 0.2}, {"warmup_steps": 0.2}),
    ("set_dataloader", {"num_workers": 2, "prefetch_factor": 4}, {"dataloader_prefetch_factor": 4, "data_seed": None}),
]


@pytest.mark.parametrize(
    ("name", "given_", "expected"), SETTERS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_setters_set_and_return_the_arguments(name, given_, expected):
    args = BaseArguments("out")
    assert getattr(args, name)(**given_) is args
    assert {field: getattr(args, field) for field in expected} == expected


def test_a_setter_without_arguments_sets_the_defaults():
    args = BaseArguments("out")
    assert args.set_logging() == args.set_save() == args.set_optimizer().set_lr_scheduler() == BaseArguments("out")


def test_a_setter_that_makes_no_sense_changes_nothing():
    args = BaseArguments("out", seed=7)
    with pytest.raises(ArgumentsError, match="prefetch_factor"):
        args.set_dataloader(train_batch_size=2, prefetch_factor=4)
    assert args == BaseArguments("out", seed=7)
    with pytest.raises(ArgumentsError, match="hub_strategy"):
        args.set_push_to_hub("name", strategy="sometimes")
    assert args.push_to_hub is False
    args.set_push_to_hub("name", strategy="end")
    assert (args.push_to_hub, args.hub_model_id, args.hub_strategy) == (True, "name", "end")
