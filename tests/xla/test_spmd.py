"""SPMD: one process drives four virtual devices as one, and ends where one device ends."""

from __future__ import annotations

import os
from typing import Any

import pytest

import loopwright
from loopwright.xla import runtime
from tests.xla.runs import apart, losses, saved, trainer

CLOSE = 1e-6
pytestmark = pytest.mark.skipif(
    os.environ.get("CPU_NUM_DEVICES") != "4", reason="needs a process with CPU_NUM_DEVICES=4: make test-xla"
)
if os.environ.get("CPU_NUM_DEVICES") == "4":
    runtime.use_spmd()  # before anything is computed, also by the runs on the CPU
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"xla_spmd": "data"},
    "fsdp": {"xla_spmd": "fsdp"},
    "tensor": {"tensor_parallel_size": 4, "tensor_parallel_plan": {"mix": "colwise", "embed": "embedding_rowwise"}},
    "data and tensor": {"xla_spmd": "data", "tensor_parallel_size": 2, "tensor_parallel_plan": {"mix": "colwise"}},
    "fsdp and tensor": {"xla_spmd": "fsdp", "tensor_parallel_size": 2, "tensor_parallel_plan": {"mix": "rowwise"}},
}


def spread(name: str, folder: Any, **options: Any) -> Any:
    return trainer(name, folder, cls=loopwright.NeuronTrainer, kind=loopwright.NeuronTrainingArguments, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_devices_end_where_one_ends(layout: str, tmp_path: Any) -> None:
    one = trainer("wide", tmp_path / "one", use_cpu=True, eval_strategy="epoch")
    one.train()
    options = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 2}
    four = spread("wide", tmp_path / "four", **options, **LAYOUTS[layout])
    four.train()
    assert losses(four) == pytest.approx(losses(one), abs=CLOSE)
    assert apart(four.model, one.model) < CLOSE
    on_cpu = trainer("wide", tmp_path / "cpu", use_cpu=True)
    on_cpu.train(resume_from_checkpoint=saved(tmp_path / "four", 2))
    assert apart(on_cpu.model, one.model) < CLOSE


def test_weights_really_are_spread(tmp_path: Any) -> None:
    import torch_xla

    def spec(run: Any) -> str:
        return str(torch_xla._XLAC._get_xla_sharding_spec(run.model.mix.weight))

    assert "replicated" in spec(spread("wide", tmp_path, xla_spmd="data"))
    assert "devices=[4,1]" in spec(spread("wide", tmp_path, **LAYOUTS["tensor"]))
    assert "devices=" in spec(spread("wide", tmp_path, xla_spmd="fsdp"))


def test_a_layer_that_cannot_be_split_is_an_error(tmp_path: Any) -> None:
    with pytest.raises(loopwright.ModelError, match="does not divide dimension 0 of embed.weight"):
        spread("own", tmp_path, **LAYOUTS["tensor"])


def test_a_model_of_transformers_is_spread_too(tmp_path: Any) -> None:
    one = trainer("llama", tmp_path / "one", use_cpu=True, num_train_epochs=1)
    one.train()
    four = spread("llama", tmp_path / "four", xla_spmd="fsdp", num_train_epochs=1)
    four.train()
    assert losses(four) == pytest.approx(losses(one), abs=CLOSE)


def test_rows_that_cannot_be_spread_are_an_error(tmp_path: Any) -> None:
    with pytest.raises(loopwright.ArgumentsError, match="3 rows cannot be split evenly across 4 devices"):
        spread("wide", tmp_path, xla_spmd="data", per_device_train_batch_size=3).train()
