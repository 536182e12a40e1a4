"""NeuronTrainingArguments: every name of the older trainer means something here or is refused with a reason."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import loopwright
from loopwright import NeuronTrainer, NeuronTrainingArguments, Seq2SeqNeuronTrainer, Seq2SeqNeuronTrainingArguments
from loopwright.args.field import specs
from loopwright.neuron.arguments import REFUSED, NeuronArgs
from loopwright.neuron.rounding import ENVIRONMENT, Bf16Weights, bf16_weights
from loopwright.pt.precision import Autocast, Precision, choose_precision
from tests.models import CPU, Tokens, made, pad, samples

ASKING = {
    "pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 4,
    "pipeline_parallel_use_zero1_optimizer": True, "disable_sequence_parallel": False, "kv_size_multiplier": 4,
    "fuse_qkv": True, "recompute_causal_mask": False, "use_xser": True, "num_local_ranks_per_step": 8,
    "skip_cache_push": False, "hub_neuronx_cache": "me/cache", "dataloader_prefetch_size": 2,
}  # fmt: skip
MAPPED = {
    "xla_spmd", "tensor_parallel_size", "tensor_parallel_plan", "zero_1", "use_autocast",
    "stochastic_rounding_enabled", "optimizer_use_master_weights", "optimizer_use_fp32_grad_acc",
    "optimizer_save_master_weights_in_ckpt", "compile_cache_dir",
}  # fmt: skip


def args_of(**options: Any) -> NeuronTrainingArguments:
    return NeuronTrainingArguments("out", **options)


def test_every_name_is_mapped_or_refused() -> None:
    names = {field.name for field in dataclasses.fields(NeuronArgs)}
    assert names == MAPPED | set(REFUSED) and not MAPPED & set(REFUSED)
    assert set(ASKING) == set(REFUSED)


@pytest.mark.parametrize("name", ASKING)
def test_what_is_not_here_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(loopwright.ArgumentsError, match=f"{name}=.*: .{{10}}"):
        args_of(**{name: ASKING[name]})


def test_all_refusals_come_together() -> None:
    with pytest.raises(loopwright.ArgumentsError) as caught:
        args_of(**ASKING)
    assert len(caught.value.problems) == len(ASKING)


def test_defaults_are_accepted_and_an_unknown_name_is_not() -> None:
    assert args_of().async_save and args_of().output_dir == "out"
    assert next(iter(inspect.signature(NeuronTrainingArguments).parameters)) == "output_dir"
    assert set(specs(NeuronArgs)) <= set(specs(Seq2SeqNeuronTrainingArguments))
    with pytest.raises(loopwright.UnknownArgument, match="zero_1"):
        args_of(zero1=True)


FORMATS = [
    ({}, Precision), ({"bf16": True}, Autocast), ({"bf16": True, "use_autocast": True}, Autocast),
    ({"bf16": True, "optimizer_use_master_weights": False}, Bf16Weights),
    ({"bf16": True, "optimizer_use_master_weights": False, "use_autocast": True}, Autocast),
]  # fmt: skip


@pytest.mark.parametrize(("options", "kind"), FORMATS)
def test_formats_are_torchs_own(options: dict[str, Any], kind: type) -> None:
    assert type(choose_precision(args_of(**options), torch.device("cpu"))) is kind


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"optimizer_use_master_weights": False, "gradient_accumulation_steps": 2}, "optimizer_use_fp32_grad_acc=True"),
        ({"optimizer_save_master_weights_in_ckpt": False}, "are the model, so they are saved"),
        (
            {"optimizer_save_master_weights_in_ckpt": True, "optimizer_use_master_weights": False},
            "there are no fp32 copies to save",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(loopwright.ArgumentsError, match=reason):
        args_of(bf16=True, **options)


@pytest.mark.parametrize("wanted", [True, False])
def test_on_neuron_the_runtime_rounds(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    monkeypatch.setattr("loopwright.neuron.rounding._rounds_itself", lambda device: True)
    rounding = bf16_weights(args_of(bf16=True, stochastic_rounding_enabled=wanted), torch.device("xla"))
    assert __import__("os").environ[ENVIRONMENT] == ("1" if wanted else "0")
    assert not rounding.stochastic, "what the hardware does is not done again in software"


def test_several_processes_share_the_optimizer_and_split_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = args_of(tensor_parallel_size=2, tensor_parallel_plan={"a": "colwise"})
    assert args.fsdp == "shard_grad_op"
    assert dict(args.parallelism_config) == {"tp_size": 2, "tp_plan": {"a": "colwise"}}
    assert args_of(zero_1=False).fsdp is None


def test_the_call_styles_of_both_trainers(tmp_path: Any) -> None:
    model, data = made(Tokens), samples()
    plain = loopwright.TrainingArguments(str(tmp_path), **CPU)
    assert NeuronTrainer(model, plain, pad, data).args is plain
    assert isinstance(NeuronTrainer(model=model, train_dataset=data).args, NeuronTrainingArguments)
    assert isinstance(Seq2SeqNeuronTrainer(model).args, Seq2SeqNeuronTrainingArguments)
    assert issubclass(NeuronTrainer, loopwright.Trainer) and issubclass(Seq2SeqNeuronTrainer, loopwright.Seq2SeqTrainer)
    with pytest.raises(loopwright.UnknownArgument, match="peft_config"):
        NeuronTrainer(model, plain, peft_config=object())


def test_without_a_device_the_cpu_is_used_with_a_word(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is a device")
    args = NeuronTrainingArguments(str(tmp_path), **{**CPU, "use_cpu": False})
    with caplog.at_level("WARNING", logger="loopwright"):
        NeuronTrainer(nn.Linear(2, 2), args)
    assert "no accelerator was found" in caplog.text
    assert "pip install torch-neuronx --extra-index-url https://pip.repos.neuron.amazonaws.com" in caplog.text


def test_the_compile_cache_is_where_it_was_asked_for(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "elsewhere")
    args = NeuronTrainingArguments(str(tmp_path), compile_cache_dir=str(tmp_path / "cache"), **CPU)
    NeuronTrainer(nn.Linear(2, 2), args)
    assert __import__("os").environ["NEURON_COMPILE_CACHE_URL"] == str(tmp_path / "cache")


def test_no_vendor_package_is_a_dependency() -> None:
    """Several of these names on the public index are placeholders, and one stops `import torch`."""
    from pathlib import Path

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    words = text.split("[tool.")[0]
    assert not [name for name in ("neuronx", "torch_xla", "torch-xla", "torch-tpu", "libtpu") if name in words]
