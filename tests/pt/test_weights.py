"""Weights under the module's own names in checkpoints, in transformers' format elsewhere, and both come back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import loopwright
from loopwright.errors import CheckpointError
from tests import models
from tests.models import Tokens, made, samples, trainer_of
from tests.pt.families import model_of

transformers = pytest.importorskip("transformers")
DATA = samples((5, 9, 6, 12))
RUN = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "per_device_train_batch_size": 2, "speed": "off"}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


def blank(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(7)
    return model


# ---- formats ---------------------------------------------------------------------------------------------------------


def mixtral() -> nn.Module:
    return model_of("mixtral")  # its kernel knows no double precision


def saved(model: nn.Module, folder: Path, **options: Any) -> Any:
    trainer = trainer_of(model, DATA, folder, **{**RUN, **options})
    trainer.train()
    return trainer


def test_a_native_checkpoint_holds_the_modules_own_names(tmp_path: Path) -> None:
    trainer = saved(mixtral(), tmp_path)
    checkpoint = tmp_path / "checkpoint-2"
    assert load_file(checkpoint / "model.safetensors").keys() == trainer.model.state_dict().keys()
    trainer.save_model(str(tmp_path / "exported"))
    assert any("experts.0.w1" in name for name in load_file(tmp_path / "exported/model.safetensors"))


@pytest.mark.parametrize("form", ["native", "exported", "older", "transformers"])
def test_every_format_loads(form: str, tmp_path: Path) -> None:
    trainer = saved(mixtral(), tmp_path, checkpoint_format="transformers" if form == "transformers" else "native")
    folder = tmp_path / "checkpoint-2"
    if form in ("exported", "older"):
        trainer.save_model(str(tmp_path / "exported"))
        folder = tmp_path / "exported"
    if form == "older":  # a native checkpoint of before: everything else, and what save_pretrained writes
        for file in (tmp_path / "exported").iterdir():
            (tmp_path / "checkpoint-2" / file.name).write_bytes(file.read_bytes())
        (tmp_path / "checkpoint-2" / "weights.json").unlink()
        (tmp_path / "checkpoint-2" / "manifest.json").unlink()
        folder = tmp_path / "checkpoint-2"
    assert_equal(state(loopwright.load_model(blank(mixtral()), folder)), state(trainer.model))


@pytest.mark.parametrize("form", ["native", "transformers"])
def test_either_format_resumes_to_the_bit(form: str, tmp_path: Path) -> None:
    options = {"checkpoint_format": form, "max_steps": 3}
    whole = saved(mixtral(), tmp_path, **options)
    again = trainer_of(mixtral(), DATA, tmp_path / "again", **{**RUN, **options})
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_equal(state(again.model), state(whole.model))


@pytest.fixture
def transposing(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' table with one row more: a square matrix of Llama is stored transposed, under its own name."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    name = "self_attn.o_proj.weight"
    conversion_mapping.get_checkpoint_conversion_mapping("llama")
    table = conversion_mapping._checkpoint_conversion_mapping_cache
    monkeypatch.setitem(table, "llama", [WeightConverter(name, name, operations=[Transpose(0, 1)])])


@pytest.mark.usefixtures("transposing")
def test_a_square_matrix_that_the_table_transposes_is_never_read_as_it_is(tmp_path: Path) -> None:
    """Names and shapes are those of the module, so nothing but the conversion tells that the values are others."""
    whole = saved(models.llama(), tmp_path, max_steps=3)
    whole.save_model(str(tmp_path / "exported"))
    raw, own = load_file(tmp_path / "exported/model.safetensors"), state(whole.model)
    name = "model.layers.0.self_attn.o_proj.weight"
    assert raw.keys() == own.keys() and raw[name].shape == own[name].shape, "by names and shapes it would fit"
    assert not torch.equal(raw[name], own[name])
    assert_equal(state(loopwright.load_model(blank(models.llama()), tmp_path / "exported")), own)
    assert not (tmp_path / "checkpoint-3/model.safetensors").exists(), "transformers would transpose it"
    assert_equal(state(loopwright.load_model(blank(models.llama()), tmp_path / "checkpoint-3")), own)
    again = trainer_of(models.llama(), DATA, tmp_path / "again", **{**RUN, "max_steps": 3})
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_equal(state(again.model), own)


def test_a_checkpoint_transformers_would_misread_is_in_a_file_it_does_not_look_for(tmp_path: Path) -> None:
    trainer = saved(model_of("qwen3_vl_moe"), tmp_path)
    checkpoint = tmp_path / "checkpoint-2"
    assert (checkpoint / "module.safetensors").is_file() and not (checkpoint / "model.safetensors").exists()
    with pytest.raises(OSError, match="no file named model.safetensors"):
        type(trainer.model).from_pretrained(checkpoint)
    fresh = blank(model_of("qwen3_vl_moe"))
    assert_equal(state(loopwright.load_model(fresh, checkpoint)), state(trainer.model))


def legacy_bert(folder: Path) -> Any:
    """BERT as its early files have it: gamma and beta instead of weight and bias."""
    model = models.bert_tokens()
    model.save_pretrained(folder)
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    return type(model).from_pretrained(folder).double()


def test_a_model_from_files_with_gamma_and_beta_resumes(tmp_path: Path) -> None:
    whole = saved(legacy_bert(tmp_path / "hub"), tmp_path / "run", max_steps=3)
    assert not [text for text in whole._loopwright.notices.told if "save_pretrained" in text]
    again = trainer_of(legacy_bert(tmp_path / "hub"), DATA, tmp_path / "again", **{**RUN, "max_steps": 3})
    again.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-1"))
    assert_equal(state(again.model), state(whole.model))
    whole.save_model(str(tmp_path / "exported"))
    assert any(name.endswith("LayerNorm.gamma") for name in load_file(tmp_path / "exported/model.safetensors"))
    assert_equal(state(loopwright.load_model(blank(models.bert_tokens()), tmp_path / "exported")), state(whole.model))


def test_names_a_user_has_mapped_come_back(tmp_path: Path) -> None:
    model = models.llama()
    model.save_pretrained(tmp_path / "hub")
    renamed = {f"old_{name}": value for name, value in load_file(tmp_path / "hub/model.safetensors").items()}
    save_file(renamed, tmp_path / "hub/model.safetensors", metadata={"format": "pt"})
    loaded = type(model).from_pretrained(tmp_path / "hub", key_mapping={"^old_": ""}).double()
    assert_equal(state(loaded), state(model))
    trainer = saved(loaded, tmp_path / "run", checkpoint_format="transformers")
    fresh = type(model).from_pretrained(tmp_path / "hub", key_mapping={"^old_": ""}).double()
    assert_equal(state(loopwright.load_model(fresh, tmp_path / "run/checkpoint-2")), state(trainer.model))


# ---- models that write themselves ------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """A user's module around a model, which saves the inner one only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.extra = models.llama(), nn.Linear(2, 2).double()

    def forward(self, **inputs: Any) -> Any:
        outputs = self.inner(**inputs)
        outputs["loss"] = outputs["loss"] + self.extra.weight.square().sum()
        return outputs

    def save_pretrained(self, folder: str, state_dict: Any = None) -> None:
        self.inner.save_pretrained(folder)


def test_a_save_pretrained_that_leaves_things_out_is_completed_and_told(tmp_path: Path) -> None:
    whole = saved(made(Wrapped), tmp_path, max_steps=3, remove_unused_columns=False)
    assert [text for text in whole._loopwright.notices.told if "Wrapped.save_pretrained omits or converts" in text]
    checkpoint = tmp_path / "checkpoint-1"
    assert set(load_file(checkpoint / "module.safetensors")) <= {"extra.weight", "extra.bias", "inner.lm_head.weight"}
    again = trainer_of(made(Wrapped), DATA, tmp_path / "again", **{**RUN, "max_steps": 3})
    again.train(resume_from_checkpoint=str(checkpoint))
    assert_equal(state(again.model), state(whole.model))


def tied_by_hand() -> Any:
    model = models.llama()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    return model


def test_weights_a_user_has_tied_are_saved_and_the_export_is_warned_of(tmp_path: Path) -> None:
    whole = saved(tied_by_hand(), tmp_path, max_steps=3)
    assert len([text for text in whole._loopwright.notices.told if "cannot load" in text and "up_proj" in text]) == 1
    again = trainer_of(tied_by_hand(), DATA, tmp_path / "again", **{**RUN, "max_steps": 3})
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_equal(state(again.model), state(whole.model))


# ---- adapters --------------------------------------------------------------------------------------------------------


def adapters(names: tuple[str, ...] = ("default",), base: Callable[[], Any] = models.llama, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(9)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(base(), config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    return model.double()


def unfrozen() -> Any:
    model = adapters()
    model.base_model.model.model.norm.weight.requires_grad_(True)
    return model


def of_transformers() -> Any:
    peft = pytest.importorskip("peft")
    model = models.llama()
    torch.manual_seed(9)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return model.double()


ADAPTERS: dict[str, Callable[[], Any]] = {
    "one": adapters,
    "another name": lambda: adapters(("policy",)),
    "two": lambda: adapters(("policy", "reference")),
    "with a module": lambda: adapters(modules_to_save=["lm_head"]),
    "on converted names": lambda: adapters(base=lambda: model_of("olmoe")).float(),
    "and a part of the base": unfrozen,
    "of transformers": of_transformers,
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_resume_to_the_bit(name: str, tmp_path: Path) -> None:
    whole = saved(ADAPTERS[name](), tmp_path, max_steps=3)
    again = trainer_of(ADAPTERS[name](), DATA, tmp_path / "again", **{**RUN, "max_steps": 3})
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_equal(state(again.model), state(whole.model))
    marker = json.loads((tmp_path / "checkpoint-1/weights.json").read_text())
    assert not marker["complete"] and not any("embed_tokens" in key for key in marker["elsewhere"])
    extra = tmp_path / "checkpoint-1/module.safetensors"
    assert not extra.is_file() or sum(each.numel() for each in load_file(extra).values()) < 200


def test_an_adapter_saved_by_itself_is_loaded(tmp_path: Path) -> None:
    trainer = saved(adapters(), tmp_path)
    trainer.save_model(str(tmp_path / "saved"))
    assert_equal(state(loopwright.load_model(adapters(), tmp_path / "saved")), state(trainer.model))


# ---- before the first step -------------------------------------------------------------------------------------------


class Forgetful(Tokens):
    """Its state dict leaves out the head."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "head" not in name}


class Copying(Tokens):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.detach().clone() for name, value in super().state_dict(*args, **kwargs).items()}


class Talking(Tokens):
    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None: ...


@pytest.mark.parametrize(("kind", "named"), [(Forgetful, "head.weight"), (Copying, "embed.weight"),
                                             (Talking, "_extra_state")])  # fmt: skip
def test_a_checkpoint_that_would_not_come_back_is_an_error_before_the_first_step(
    kind: Any, named: str, tmp_path: Path
) -> None:
    trainer = trainer_of(made(kind), DATA, tmp_path, **RUN)
    with pytest.raises(CheckpointError, match=named):
        trainer.train()
    assert trainer.state.global_step == 0 and not list(tmp_path.glob("checkpoint-*"))


def test_nothing_is_asked_of_a_run_that_saves_nothing(tmp_path: Path) -> None:
    trainer = trainer_of(made(Forgetful), DATA, tmp_path, **{**RUN, "save_strategy": "no"})
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_format_that_would_not_come_back_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    trainer = trainer_of(tied_by_hand(), DATA, tmp_path, **RUN, checkpoint_format="transformers")
    with pytest.raises(CheckpointError, match="up_proj"):
        trainer.train()


def test_values_that_do_not_come_back_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from loopwright.pt.checkpoint import conversion

    model = mixtral()
    kept = conversion.to_exported

    def wrong(model: Any, tensors: Any) -> Any:
        return {name: value + 1 if "w2" in name else value for name, value in kept(model, tensors).items()}

    assert conversion.export_trouble(model, model.state_dict()) is None
    monkeypatch.setattr(conversion, "to_exported", wrong)
    assert "down_proj is read back with different values" in str(conversion.export_trouble(model, model.state_dict()))


def test_a_configuration_that_cannot_be_saved_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    model = models.llama()
    model.generation_config.temperature, model.generation_config.do_sample = 0.5, False
    trainer = trainer_of(model, DATA, tmp_path, **RUN)
    with pytest.raises(CheckpointError, match="temperature"):
        trainer.train()
    assert trainer.state.global_step == 0
