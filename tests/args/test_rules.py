"""Rules between arguments, what is not available yet, and what has no effect."""

from __future__ import annotations

import pytest

from loopwright.args.base import BaseArguments
from loopwright.args.effects import IDLE
from loopwright.args.field import specs
from loopwright.args.rules import RULES
from loopwright.errors import ArgumentsError
from loopwright.pt.arguments import Seq2SeqTrainingArguments

BROKEN = {
    "one_half_precision": {"fp16": True, "bf16": True},
    "fp8_beside_bf16": {"fp8": True, "fp16": True},
    "token_budgets_need_layouts": {"per_device_train_batch_tokens": 64, "speed": "off"},
    "packing_needs_a_token_budget": {"batch_packing": "across_updates"},
    "micro_batches_are_made_one_way": {
        "batch_packing": "across_updates",
        "per_device_train_batch_tokens": 64,
        "train_sampling_strategy": "batch_rebalance",
    },
    "one_evaluation_precision": {"fp16_full_eval": True, "bf16_full_eval": True},
    "apex_needs_fp16": {"half_precision_backend": "apex"},
    "some_duration": {"num_train_epochs": 0},
    "logging_interval": {"logging_steps": 0},
    "saving_interval": {"save_steps": 0},
    "evaluation_interval": {"eval_strategy": "steps", "logging_steps": 0, "logging_strategy": "no"},
    "best_model_needs_evaluation": {"load_best_model_at_end": True},
    "saving_best_needs_evaluation": {"save_strategy": "best"},
    "metric_schedule_needs_evaluation": {"lr_scheduler_type": "reduce_lr_on_plateau"},
    "prefetching_needs_workers": {"dataloader_prefetch_factor": 2},
    "persistence_needs_workers": {"dataloader_persistent_workers": True},
    "optimizers_step_after_the_backward": {"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear"},
    "low_rank_optimizers_need_targets": {"optim": "apollo_adamw"},
    "trackers_exist": {"report_to": ["tensorbord"]},
    "sharding_makes_sense": {"fsdp": "full_shart"},
    "parallel_sizes_make_sense": {"parallelism_config": {"tp": 2}},
    "batches_are_spread_one_way": {"accelerator_config": {"gradient_accumulation_kwargs": {"steps": 2}}},
}
AVAILABLE = [
    {"torch_compile": True},
    {"torch_compile_backend": "eager"},
    {"torch_compile": True, "torch_compile_scope": "model", "max_recompiles": 0},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"policy": "selective"}},
    {"auto_find_batch_size": True},
    {"skip_memory_metrics": False},
    {"neftune_noise_alpha": 5},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    {"async_save": False},
    {"checkpoint_format": "transformers"},
    {"max_runtime": 60, "save_minutes": 1, "save_samples": 100, "save_trigger_file": "save_now"},
    {"enable_jit_checkpoint": False},
    {"accelerator_config": {"non_blocking": True, "even_batches": False}},
    {"bf16": True, "use_cpu": True},
    {"speed": "off"},
    {"use_liger_kernel": True, "liger_kernel_config": {"rope": True}},
    {"train_sampling_strategy": "batch_rebalance", "length_column_name": "n"},
    {"debug": "underflow_overflow tpu_metrics_debug"},
    {"speed": "max", "per_device_train_batch_tokens": 4096},
    {"batch_packing": "across_updates", "per_device_train_batch_tokens": 4096},
    {"fsdp": "", "fsdp_config": {}},
    {"fsdp": True},
    {"fsdp": "full_shard auto_wrap", "fsdp_config": '{"version": 2}'},
    {"deepspeed": {"zero_optimization": {"stage": 2}}},
    {"parallelism_config": {"tp_size": 2}},
    {"eval_use_gather_object": True},
    {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "epoch"},
    {"num_train_epochs": 0, "max_steps": 5},
    {"logging_strategy": "no", "logging_steps": 0},
]


def test_every_rule_is_tried_and_says_what_it_is():
    assert [function.__name__ for _, function in RULES] == list(BROKEN)
    assert all(function.__doc__ for _, function in RULES)


def test_rules_name_arguments_that_exist():
    known = specs(BaseArguments)
    assert {name for names, _ in RULES for name in names} <= set(known)
    assert {name for row in IDLE for name in row.names} <= set(specs(Seq2SeqTrainingArguments))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_the_one_problem(name):
    function = next(function for _, function in RULES if function.__name__ == name)
    with pytest.raises(ArgumentsError) as caught:
        BaseArguments(**BROKEN[name])
    assert len(caught.value.problems) == 1
    assert function(_unchecked(BROKEN[name])) == caught.value.problems[0]


def _unchecked(values: dict[str, object]) -> BaseArguments:
    args = BaseArguments()
    for name, value in values.items():
        setattr(args, name, value)
    return args


def test_what_is_there_is_accepted():
    assert {str(given): said for given in AVAILABLE if (said := refusal(given))} == {}


def refusal(given: dict[str, object]) -> str:
    """What is said about arguments that are refused; nothing if they are accepted."""
    try:
        BaseArguments("out", **given)
    except ArgumentsError as error:
        return str(error)
    return ""


IDLE_CASES = [
    ({"do_train": True, "do_predict": True, "do_eval": True}, []),
    ({"local_rank": 0}, ["local_rank"]),
    ({"save_on_interrupt": True}, []),
    ({"save_on_interrupt": True, "enable_jit_checkpoint": False}, ["save_on_interrupt"]),
    ({"eval_strategy": "epoch"}, []),
    ({"ddp_timeout": 10, "ddp_backend": "gloo"}, ["ddp_backend", "ddp_timeout"]),
    ({"average_tokens_across_devices": False}, ["average_tokens_across_devices"]),
    ({"save_on_each_node": True, "log_on_each_node": False}, ["log_on_each_node", "save_on_each_node"]),
    ({"hub_model_id": "x", "hub_strategy": "end"}, ["hub_strategy"]),
    ({"push_to_hub": True, "hub_strategy": "end", "hub_always_push": True}, ["hub_always_push"]),
    ({"project": "x", "trackio_space_id": "y"}, ["project", "trackio_space_id"]),
    ({"logging_dir": "x"}, ["logging_dir"]),
    ({"logging_dir": "x", "report_to": "tensorboard"}, []),
    ({"project": "x", "trackio_space_id": "y", "hub_private_repo": True, "report_to": "trackio"}, []),
    ({"hub_private_repo": True}, []),
    ({"run_name": "x"}, ["run_name"]),
    ({"max_steps": 5, "num_train_epochs": 1}, ["num_train_epochs"]),
    ({"logging_strategy": "epoch", "logging_steps": 5}, ["logging_steps"]),
    ({"eval_steps": 5}, ["eval_steps"]),
    ({"save_strategy": "no", "save_steps": 5}, ["save_steps"]),
    ({"lr_scheduler_type": "constant", "warmup_steps": 5}, ["warmup_steps"]),
    ({"optim": "sgd", "adam_beta1": 0.5}, ["adam_beta1"]),
    ({"optim_target_modules": "all-linear"}, ["optim_target_modules"]),
    ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, ["gradient_checkpointing_kwargs"]),
    ({"max_recompiles": 0, "torch_compile_scope": "model", "use_cpu": True}, ["torch_compile_scope", "max_recompiles"]),
    ({"max_recompiles": 0, "torch_compile_scope": "model", "torch_compile_mode": "default"}, []),
    ({"liger_kernel_config": {"rope": True}}, ["liger_kernel_config"]),
    ({"fp16": True, "fp16_opt_level": "O2"}, ["fp16_opt_level"]),
    ({"fp16": True, "fp16_opt_level": "O2", "half_precision_backend": "apex"}, []),
    ({"length_column_name": "n"}, ["length_column_name"]),
    ({"length_column_name": "n", "group_by_length": True}, []),
    ({"length_column_name": "n", "batch_packing": "across_updates", "per_device_train_batch_tokens": 64}, []),
    (
        {"per_device_train_batch_size": 3, "batch_packing": "across_updates", "per_device_train_batch_tokens": 64},
        ["per_device_train_batch_size"],
    ),
    ({"dataloader_in_order": False}, ["dataloader_in_order"]),
    ({"accelerator_config": {"even_batches": False}}, ["accelerator_config.even_batches"]),
    ({"accelerator_config": {"dispatch_batches": False}}, ["accelerator_config.dispatch_batches"]),
    ({"fsdp_config": {"version": 2}}, ["fsdp_config"]),
    ({"eval_use_gather_object": True}, ["eval_use_gather_object"]),
    ({"generation_num_beams": 2}, ["generation_num_beams"]),
    ({"generation_num_beams": 2, "predict_with_generate": True}, []),
    ({}, []),
]


def test_arguments_without_effect_are_named(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    named = [(given, Seq2SeqTrainingArguments("out", **given).without_effect()) for given, _ in IDLE_CASES]
    assert [found for found, case in zip(named, IDLE_CASES, strict=True) if found != case] == []


def test_plain_arguments_know_no_generation():
    assert BaseArguments("out").without_effect() == []


def test_with_several_processes_their_options_count(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert BaseArguments("out", ddp_timeout=10, save_on_each_node=True).without_effect() == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"split_batches": True}, "divide it yourself"),
        ({"dispatch_batches": True}, "loads its own batches"),
        ({"gradient_accumulation_kwargs": {"sync_each_batch": True}}, "once per update"),
        ({"gradient_accumulation_kwargs": {"num_step": 2}}, "no key 'num_step'.*num_steps"),
    ],
)
def test_ways_of_spreading_batches_that_do_not_fit_say_why(given, words, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ArgumentsError, match=words):
        BaseArguments("out", accelerator_config=given)
