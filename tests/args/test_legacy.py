"""Old names: each works, warns once, and sets the new argument only."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field

import pytest

from loopwright.args.base import BaseArguments
from loopwright.args.field import UNSET, specs
from loopwright.args.legacy import OLD_VALUES, LegacyArgs
from loopwright.errors import ArgumentsError

OLD = specs(LegacyArgs)

# old argument, what else is given, what it becomes
BECOMES = [
    ({"evaluation_strategy": "epoch"}, {"eval_strategy": "epoch", "do_eval": True}),
    ({"evaluate_during_training": True}, {"eval_strategy": "steps", "eval_steps": 500}),
    ({"per_gpu_train_batch_size": 4}, {"per_device_train_batch_size": 4}),
    ({"per_gpu_eval_batch_size": 4}, {"per_device_eval_batch_size": 4}),
    (
        {"include_inputs_for_metrics": True, "include_for_metrics": ["loss"]},
        {"include_for_metrics": ["loss", "inputs"]},
    ),
    ({"no_cuda": True}, {"use_cpu": True, "dataloader_pin_memory": False}),
    ({"fp16_backend": "apex", "fp16": True}, {"half_precision_backend": "apex"}),
    ({"fp16_backend": "amp"}, {"half_precision_backend": "torch"}),
    ({"torchdynamo": "eager"}, {"torch_compile": True, "torch_compile_backend": "eager"}),
    ({"adafactor": True}, {"optim": "adafactor"}),
    ({"warmup_ratio": 0.1}, {"warmup_steps": 0.1}),
    ({"warmup_ratio": "0.1"}, {"warmup_steps": 0.1}),
    (
        {"packing": "across_updates", "per_device_train_batch_tokens": 64},
        {"batch_packing": "across_updates", "per_device_train_batch_tokens": 64},
    ),
    ({"group_by_length": True}, {"train_sampling_strategy": "group_by_length"}),
    ({"include_tokens_per_second": True}, {"include_num_input_tokens_seen": "all"}),
    ({"push_to_hub_model_id": "name"}, {"hub_model_id": "name"}),
    ({"push_to_hub_organization": "org", "output_dir": "a/run"}, {"hub_model_id": "org/run"}),
    ({"push_to_hub_organization": "org", "push_to_hub_model_id": "name"}, {"hub_model_id": "org/name"}),
    ({"push_to_hub_token": "secret"}, {"hub_token": "secret"}),
    ({"xpu_backend": "ccl"}, {"ddp_backend": "xccl"}),
    ({"overwrite_output_dir": True}, {"resume_from_checkpoint": False}),
    ({"overwrite_output_dir": True, "resume_from_checkpoint": "auto"}, {"resume_from_checkpoint": "auto"}),
    ({"use_mps_device": True}, {}),
    ({"use_ipex": True}, {}),
    ({"use_legacy_prediction_loop": True}, {}),
    ({"tpu_metrics_debug": True}, {"debug": ["tpu_metrics_debug"]}),
    ({"fsdp_min_num_params": 100}, {"fsdp_config": {"min_num_params": 100}}),
    ({"fsdp_transformer_layer_cls_to_wrap": "Block"}, {"fsdp_config": {"transformer_layer_cls_to_wrap": "Block"}}),
]
UNSUITED = ("dispatch_batches", "split_batches")
REFUSED = {
    "jit_mode_eval": True,
    "past_index": 0,
    "tpu_num_cores": 8,
    "save_safetensors": False,
    "sharded_ddp": "simple",
    "mp_parameters": "{}",
    "ray_scope": "all",
}
# What a configuration saved by 4.x holds when nobody asked for anything.
OLD_DEFAULTS = {
    "overwrite_output_dir": False,
    "per_gpu_train_batch_size": None,
    "per_gpu_eval_batch_size": None,
    "no_cuda": False,
    "use_mps_device": False,
    "use_ipex": False,
    "save_safetensors": True,
    "fp16_backend": "auto",
    "jit_mode_eval": False,
    "torchdynamo": None,
    "tpu_num_cores": None,
    "tpu_metrics_debug": False,
    "past_index": -1,
    "fsdp_min_num_params": 0,
    "fsdp_transformer_layer_cls_to_wrap": None,
    "adafactor": False,
    "use_legacy_prediction_loop": False,
    "include_inputs_for_metrics": False,
    "include_tokens_per_second": False,
    "push_to_hub_model_id": None,
    "push_to_hub_organization": None,
    "push_to_hub_token": None,
    "mp_parameters": "",
    "ray_scope": "last",
    "packing": None,
    "group_by_length": False,
    "warmup_ratio": 0.0,
    "sharded_ddp": "",
    "xpu_backend": None,
    "dispatch_batches": None,
    "split_batches": False,
    "evaluate_during_training": False,
    "evaluation_strategy": None,
}


def test_the_cases_below_cover_the_whole_table():
    tried = {name for given, _ in BECOMES for name in given} | set(REFUSED) | set(UNSUITED)
    assert set(OLD) - tried == set() and set(OLD) == set(OLD_DEFAULTS)


@pytest.mark.parametrize(
    ("given", "becomes"), BECOMES, ids=lambda value: ",".join(value) if isinstance(value, dict) else ""
)
def test_an_old_name_becomes_the_new_one(given, becomes):
    args = BaseArguments(**given)
    assert {name: getattr(args, name) for name in becomes} == becomes
    assert all(getattr(args, name) is UNSET for name in OLD if name != "save_safetensors")
    assert args.save_safetensors is True, "what is true of every run"
    assert not set(OLD) & set(args.to_dict())


@pytest.mark.parametrize("name", UNSUITED)
def test_an_old_name_for_something_that_does_not_fit_says_so_under_its_new_name(name, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ArgumentsError, match=f"accelerator_config: {name}=True"):
        BaseArguments(**{name: True})


@pytest.mark.parametrize("name", REFUSED)
def test_an_old_name_that_cannot_be_honoured_is_refused(name):
    with pytest.raises(ArgumentsError, match=f"^{name}="):
        BaseArguments(**{name: REFUSED[name]})


def test_an_old_default_asks_for_nothing():
    assert [name for name, value in OLD_DEFAULTS.items() if BaseArguments(**{name: value}) != BaseArguments()] == []


def test_a_whole_configuration_of_4x_is_read():
    args = BaseArguments("out", learning_rate=1e-3, **OLD_DEFAULTS)
    assert args == BaseArguments("out", learning_rate=1e-3)


def test_each_use_says_one_line(caplog):
    unlike = []
    for name in OLD:
        if name == "save_safetensors":
            continue  # True is what copies of arguments pass
        caplog.clear()
        with caplog.at_level(logging.WARNING, "loopwright"):
            BaseArguments(**{name: OLD_DEFAULTS[name]})
        if [(record.name, name in record.message) for record in caplog.records] != [("loopwright", True)]:
            unlike.append((name, caplog.text))
    assert unlike == []


def test_copies_do_not_say_it_again(caplog):
    args = BaseArguments(warmup_ratio=0.1)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "loopwright"):
        assert dataclasses.replace(args, seed=1).warmup_steps == 0.1
    assert caplog.records == []


def test_in_strict_mode_an_old_name_is_an_error():
    with pytest.raises(ArgumentsError, match="strict=True"):
        BaseArguments(no_cuda=True, strict=True)


def test_old_and_new_name_may_agree():
    assert BaseArguments(evaluation_strategy="steps", eval_strategy="steps").eval_strategy == "steps"


@pytest.mark.parametrize(
    "given",
    [
        {"evaluation_strategy": "epoch", "eval_strategy": "steps"},
        {"warmup_ratio": 0.1, "warmup_steps": 100},
        {"per_gpu_train_batch_size": 4, "per_device_train_batch_size": 2},
        {"adafactor": True, "optim": "sgd"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_old_and_new_name_with_two_values_are_a_problem(given):
    with pytest.raises(ArgumentsError, match="was given too; keep only"):
        BaseArguments(**given)


def test_a_wrong_value_under_an_old_name_is_a_problem():
    with pytest.raises(ArgumentsError, match="'stps' is not one of"):
        BaseArguments(evaluation_strategy="stps")
    with pytest.raises(ArgumentsError, match="warmup_ratio='much'"):
        BaseArguments(warmup_ratio="much")


def test_a_warmup_over_the_whole_run_stays_one():
    assert BaseArguments(warmup_ratio=1.0).get_warmup_steps(1000) == 1000


@pytest.mark.parametrize(("name", "old"), OLD_VALUES)
def test_an_old_value_becomes_the_new_one(name, old):
    new = OLD_VALUES[name, old][0]
    assert BaseArguments(**{name: old}) == BaseArguments(**{name: new})


@dataclass
class OwnArguments(BaseArguments):
    """A user's class, written for 4.x."""

    cache_dir: str | None = None
    group_by_length: bool = field(default=True, metadata={"help": "Group sequences."})
    warmup_ratio: float = 0.03
    learning_rate: float = field(default=2e-4, metadata={"help": "The learning rate."})


def test_old_names_work_in_a_users_dataclass():
    args = OwnArguments("out", evaluation_strategy="epoch", cache_dir="x", no_cuda=True)
    assert (args.eval_strategy, args.use_cpu, args.cache_dir, args.learning_rate) == ("epoch", True, "x", 2e-4)


def test_defaults_of_a_users_dataclass_count_under_their_old_names():
    args = OwnArguments("out")
    assert (args.train_sampling_strategy, args.warmup_steps) == ("group_by_length", 0.03)
    assert OwnArguments(**args.to_dict()) == args == dataclasses.replace(args)


def test_a_new_name_that_was_passed_wins_over_a_default_under_an_old_name():
    assert OwnArguments("out", warmup_steps=20).warmup_steps == 20


def test_checks_hold_in_a_users_dataclass():
    with pytest.raises(ArgumentsError, match="learning_rate=-1"):
        OwnArguments("out", learning_rate=-1)
