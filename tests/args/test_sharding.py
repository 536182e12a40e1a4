"""FSDP's options and parallel sizes in every spelling, and DeepSpeed's configuration filled in and checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loopwright.args.base import BaseArguments
from loopwright.args.nested.sharding import GONE, FsdpOptions, ParallelSizes, read_fsdp, read_parallelism, unneeded_keys
from loopwright.args.nested.zero import FILLED, autos, contradictions, filled_config, get

READ: list[tuple[Any, Any, FsdpOptions]] = [
    (True, None, FsdpOptions()),
    ("full_shard", None, FsdpOptions()),
    ("full_shard auto_wrap", {"fsdp_transformer_layer_cls_to_wrap": "A, B"}, FsdpOptions(layer_classes=("A", "B"))),
    ("shard_grad_op", None, FsdpOptions(reshard_after_forward=False)),
    (["hybrid_shard", "offload"], None, FsdpOptions(hybrid=True, cpu_offload=True)),
    (True, {"reshard_after_forward": "false"}, FsdpOptions(reshard_after_forward=False)),
    (True, {"reshard_after_forward": 2}, FsdpOptions(reshard_after_forward=2)),
    (True, {"state_dict_type": "FULL_STATE_DICT"}, FsdpOptions(whole_checkpoints=True)),
    (True, {"state_dict_type": "SHARDED_STATE_DICT"}, FsdpOptions()),
    (True, {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 10},
     FsdpOptions(wrap="SIZE_BASED_WRAP", min_num_params=10)),
    (True, {"cpu_offload": True, "activation_checkpointing": "true", "cpu_ram_efficient_loading": 1},
     FsdpOptions(cpu_offload=True, activation_checkpointing=True, cpu_ram_efficient_loading=True)),
    (True, {"param_dtype": "torch.bfloat16", "reduce_dtype": "float32"},
     FsdpOptions(param_dtype="bfloat16", reduce_dtype="float32")),
    (True, {"version": 2, "xla": False, "use_orig_params": True}, FsdpOptions()),
]  # fmt: skip


@pytest.mark.parametrize(("fsdp", "config", "expected"), READ)
def test_fsdp_is_read_in_every_spelling(fsdp: Any, config: Any, expected: FsdpOptions) -> None:
    assert read_fsdp(fsdp, config) == expected


@pytest.mark.parametrize(
    ("fsdp", "config", "words"),
    [
        ("full_shart", None, "did you mean"),
        ("no_shard", None, "DistributedDataParallel"),
        (True, {"version": 1}, "version 1 is not supported"),
        (True, {"xla": True}, "XLA"),
        (True, {"auto_wrap_policy": "SOME_WRAP"}, "is not one of"),
        (True, {"min_num_parms": 1}, "did you mean"),
        (True, {"param_dtype": "int8"}, "is not one of"),
    ],
)
def test_what_makes_no_sense_says_why(fsdp: Any, config: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_fsdp(fsdp, config)


def test_keys_of_the_first_fsdp_are_named_with_a_reason() -> None:
    assert unneeded_keys({"fsdp_forward_prefetch": True, "cpu_offload": True}) == {
        "forward_prefetch": GONE["forward_prefetch"]
    }


def test_parallel_sizes_come_from_dicts_and_from_objects_of_that_shape() -> None:
    assert read_parallelism(None) == ParallelSizes()
    assert read_parallelism({"tp_size": 2, "cp_backend": "torch"}) == ParallelSizes(tp_size=2)
    other = SimpleNamespace(tp_size=2, dp_shard_size=None, tp_handler=None, device_mesh=None)
    assert read_parallelism(other) == ParallelSizes(tp_size=2)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True])
def test_sizes_are_whole_numbers(size: Any) -> None:
    with pytest.raises(ValueError, match="tp_size="):
        read_parallelism({"tp_size": size})


# ---- DeepSpeed -------------------------------------------------------------------------------------------------------

ARGS = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "learning_rate": 0.5, "bf16": True,
        "weight_decay": 0.25, "max_grad_norm": 2.0, "use_cpu": True}  # fmt: skip
FULL: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}},
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "checkpoint": {"use_node_local_storage": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


def test_auto_values_are_filled_in_from_the_arguments() -> None:
    config = filled_config(FULL, BaseArguments(**ARGS), world=4, hidden_size=100)
    assert autos(config) == []
    assert (config["train_micro_batch_size_per_gpu"], config["train_batch_size"]) == (3, 24)
    assert config["gradient_clipping"] == 2.0
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (True, False)
    assert config["zero_optimization"]["reduce_bucket_size"] == 10000
    assert config["zero_optimization"]["stage3_prefetch_bucket_size"] == 9000
    assert config["zero_optimization"]["stage3_param_persistence_threshold"] == 1000
    assert "optimizer" not in config and "scheduler" not in config, "those are the trainer's own"
    assert FULL["train_batch_size"] == "auto", "what the user gave stays as it is"


OTHER = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3, "train_batch_size": 7,
         "gradient_clipping": 1.0, "optimizer.params.lr": 0.1, "optimizer.params.betas": [0.1, 0.2],
         "optimizer.params.eps": 0.1, "optimizer.params.weight_decay": 0.1, "scheduler.params.warmup_max_lr": 0.1,
         "fp16.enabled": True, "bf16.enabled": False, "checkpoint.use_node_local_storage": True}  # fmt: skip


def nested(values: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for path, value in values.items():
        place = config
        *parents, last = path.split(".")
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = value
    return config


@pytest.mark.parametrize("path", FILLED)
def test_each_contradiction_is_found_and_its_argument_named(path: str) -> None:
    args = BaseArguments(**ARGS)
    (problem,) = contradictions(nested({path: OTHER[path]}), args, world=4)
    argument, value = FILLED[path]
    assert problem.startswith(f"{path} is {OTHER[path]!r}, but {argument} is ")
    assert contradictions(nested({path: value(args, 4)}), args, world=4) == []
    assert get(nested({path: OTHER[path]}), path) == OTHER[path]


def test_all_contradictions_are_listed_together() -> None:
    with pytest.raises(ValueError) as caught:
        filled_config(nested(OTHER), BaseArguments(**ARGS), world=4, hidden_size=None)
    assert str(caught.value).count(" is ") >= 2 * len(OTHER) - 1


def test_an_auto_nobody_can_fill_in_is_named() -> None:
    with pytest.raises(ValueError, match="zero_optimization.reduce_bucket_size: 'auto' cannot be filled in"):
        filled_config({"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}}, BaseArguments(**ARGS), 2, None)


def test_an_optimizer_of_deepspeeds_own_is_refused() -> None:
    args = BaseArguments(**ARGS)
    assert "set optim" in contradictions({"optimizer": {"type": "OneBitAdam"}}, args, 1)[0]
    assert "but optim is" in contradictions({"optimizer": {"type": "AdamW"}}, BaseArguments(optim="sgd"), 1)[0]
