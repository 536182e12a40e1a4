"""QLoRA with the real bitsandbytes, on the CPU: adapters on quantized weights train, resume exactly and are merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from loopwright import Trainer, TrainingArguments
from loopwright.cli.commands import export
from loopwright.config import build_trainer, load_config
from loopwright.errors import ArgumentsError, ModelError
from tests.tasks import tiny
from tests.tasks.cases import write_config

STEPS, SAVED = 4, 2
LORA = {"r": 2, "quantization": "nf4", "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model wide enough for the CPU kernels of bitsandbytes."""
    path = tmp_path_factory.mktemp("quantized")
    tiny.save_model(path / "wide", "llama", hidden_size=64, intermediate_size=64)
    tiny.save_tokenizer(path / "wide", chat_template=tiny.CHATML)
    return path


def config_of(folder: Path, run: str, **values: Any) -> Path:
    given = {"model": str(folder / "wide"), "lora": LORA, "max_steps": STEPS, "save_steps": SAVED, "eval_steps": 1}
    return write_config(folder, "chat", output_dir=f"runs/{run}", **{**given, "eval_strategy": "steps", **values})


@pytest.fixture(scope="module")
def trained(folder: Path) -> Any:
    trainer = build_trainer(load_config(config_of(folder, "whole")))
    trainer.train()
    return trainer


def values_of(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def test_an_evaluation_changes_nothing(folder, trained):
    """Without care bitsandbytes repacks the weights in an evaluation: other scales, and no gradients afterwards."""
    quiet = build_trainer(load_config(config_of(folder, "quiet", eval_strategy="no")))
    quiet.train()
    assert values_of(quiet, "loss") == values_of(trained, "loss")
    assert values_of(quiet, "grad_norm") == values_of(trained, "grad_norm")
    assert quiet.evaluate()["eval_loss"] == values_of(trained, "eval_loss")[-1]


def test_a_run_resumes_exactly_from_its_adapter_alone(folder, trained):
    checkpoint = Path(trained.args.output_dir) / f"checkpoint-{SAVED}"
    names = {path.name for path in checkpoint.iterdir()}
    assert "adapter_model.safetensors" in names and not {"model.safetensors", "module.safetensors"} & names
    resumed = build_trainer(load_config(config_of(folder, "resumed")))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert values_of(resumed, "loss") == values_of(trained, "loss")
    assert values_of(resumed, "eval_loss") == values_of(trained, "eval_loss")
    pairs = zip(resumed.model.parameters(), trained.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_an_export_says_how_far_it_is_from_the_quantized_model(folder, trained, capsys):
    path = config_of(folder, "whole")
    assert export.run([str(path), "--to", str(folder / "merged"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["difference"] < 1e-5 < data["difference_to_quantized"] < 1
    import transformers

    merged = transformers.AutoModelForCausalLM.from_pretrained(str(folder / "merged"))
    assert getattr(merged, "hf_quantizer", None) is None


@pytest.mark.parametrize("how", ["from_scratch", "import path"])
def test_weights_that_cannot_be_quantized_are_refused(folder, how):
    (folder / "mine.py").write_text("from torch import nn\ndef build():\n    return nn.Linear(2, 1)\n")
    name = str(folder / "wide") if how == "from_scratch" else "mine.py:build"
    model = {"name": name, "from_scratch": how == "from_scratch", "tokenizer": str(folder / "wide")}
    path = config_of(folder, "never", model=model)
    with pytest.raises(ArgumentsError, match=r"lora.quantization is for the weights of a model folder or name, but"):
        build_trainer(load_config(path))


def load(folder: Path, **options: Any) -> Any:
    import transformers

    quantization = transformers.BitsAndBytesConfig(**options)
    return transformers.AutoModelForCausalLM.from_pretrained(str(folder / "wide"), quantization_config=quantization)


def test_a_quantized_model_without_an_adapter_is_evaluated_but_not_trained(folder):
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    args = TrainingArguments(str(folder / "pure"), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)
    trainer = Trainer(load(folder, load_in_4bit=True), args, train_dataset=data, eval_dataset=data)
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(ModelError, match=r"are quantized \(bitsandbytes\) and cannot be trained. Add adapters"):
        trainer.train()


def test_a_model_repacked_before_training_is_reported_and_trained(folder, caplog):
    import peft

    model = load(folder, load_in_4bit=True)
    with torch.no_grad():
        model.eval()(torch.arange(8)[None])
    layer = model.model.layers[0].mlp.up_proj
    if not getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
        pytest.skip("this CPU has no AVX512-BF16, for which bitsandbytes repacks")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    args = TrainingArguments(str(folder / "packed"), max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True)
    trainer = Trainer(adapted, args, train_dataset=data)
    trainer.train()
    assert not layer.weight.quant_state.packing_format_for_cpu
    assert "repacked 7 layers of the model for inference on a CPU" in caplog.text
