"""Models of every shape: outputs, labels, ties, adapters, factories, columns, compiled and checkpointed blocks."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import loopwright
from loopwright.notices import Notices
from loopwright.pt.data.columns import ColumnFilter, find_labels, forward_parameters, innermost
from loopwright.pt.model.neftune import add_embedding_noise
from loopwright.speed.compile.blocks import repeated_blocks
from tests import models
from tests.models import SilentTokens, Tokens, made, pad, samples, summed, trainer_of, weights

DATA = samples((5, 8, 3, 9))
BRIEF = {"per_device_train_batch_size": 2, "num_train_epochs": 1}


# ---- outputs --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


def as_output(loss: Any, logits: Tensor) -> Any:
    from transformers.modeling_outputs import TokenClassifierOutput

    return TokenClassifierOutput(loss=loss, logits=logits)


SHAPES = {
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "tuple": lambda loss, logits: (loss, logits),
    "list": lambda loss, logits: [loss, logits],
    "dataclass": Output,
    "ModelOutput": as_output,
}


def shaped(name: str) -> nn.Module:
    class Shaped(Tokens):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            inner = super().forward(input_ids, labels=labels)
            return SHAPES[name](inner["loss"], inner["logits"])

    return made(Shaped)


@pytest.mark.parametrize("name", SHAPES)
def test_a_loss_is_found_in_any_output(name: str, tmp_path: Any) -> None:
    trainer = trainer_of(shaped(name), DATA, tmp_path, eval_dataset=DATA, **BRIEF)
    plain = trainer_of(made(Tokens), DATA, tmp_path, eval_dataset=DATA, **BRIEF)
    trainer.train(), plain.train()
    for mine, theirs in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    mine, theirs = trainer.predict(DATA), plain.predict(DATA)
    np.testing.assert_array_equal(mine.predictions, theirs.predictions)
    np.testing.assert_array_equal(mine.label_ids, theirs.label_ids)
    assert mine.predictions.shape == (4, 9, models.VOCAB)


def test_a_bare_loss_is_a_loss(tmp_path: Any) -> None:
    class Bare(Tokens):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(input_ids, labels=labels)["loss"]

    trainer = trainer_of(made(Bare), DATA, tmp_path, **BRIEF)
    assert trainer.train().training_loss > 0


# ---- labels ---------------------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """Two targets under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 4)

    def forward(self, x: Tensor, start_labels: Any = None, end_labels: Any = None) -> dict[str, Tensor]:
        y = self.line(x)
        if start_labels is None or end_labels is None:
            return {"start": y[:, :2], "end": y[:, 2:]}
        entropy = nn.functional.cross_entropy
        return {
            "loss": entropy(y[:, :2], start_labels) + entropy(y[:, 2:], end_labels),
            "start": y[:, :2],
            "end": y[:, 2:],
        }


def two_targets(n: int = 6) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(3, generator=g), "start_labels": i % 2, "end_labels": (i + 1) % 2} for i in range(n)]


def test_several_labels_are_found_and_kept(tmp_path: Any) -> None:
    seen = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction)
        return {"n": len(prediction.label_ids)}

    trainer = trainer_of(TwoHeads(), two_targets(), tmp_path, collator=None, eval_dataset=two_targets(),
                         compute_metrics=metrics, **BRIEF)  # fmt: skip
    trainer.train()
    assert trainer.label_names == ["start_labels", "end_labels"]
    result = trainer.evaluate()
    assert result["eval_n"] == 2 and result["eval_loss"] > 0
    assert [part.shape for part in seen[0].predictions] == [(6, 2), (6, 2)]
    assert seen[0].label_ids[0].tolist() == [0, 1, 0, 1, 0, 1]


def test_label_names_decide(tmp_path: Any) -> None:
    class Target(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(2, 1)

        def forward(self, x: Tensor, target: Any = None) -> dict[str, Tensor]:
            y = self.line(x).squeeze(-1)
            return {"y": y} if target is None else {"loss": ((y - target) ** 2).mean(), "y": y}

    rows = [{"x": torch.ones(2) * i, "target": float(i)} for i in range(4)]
    trainer = trainer_of(Target(), rows, tmp_path, collator=None, eval_dataset=rows, label_names=["target"], **BRIEF)
    trainer.train()
    result = trainer.predict(rows)
    assert result.label_ids.tolist() == [0.0, 1.0, 2.0, 3.0] and "test_loss" in result.metrics


def test_labels_are_read_off_the_forward() -> None:
    assert find_labels(made(Tokens)) == ["labels"] and find_labels(TwoHeads()) == ["start_labels", "end_labels"]
    assert find_labels(nn.Linear(1, 1)) == [] and forward_parameters(nn.Linear(1, 1)) == ["input"]

    class ForQuestionAnswering(nn.Module):
        def forward(self, input_ids: Any, start_positions: Any = None, end_positions: Any = None) -> None: ...

    assert find_labels(ForQuestionAnswering()) == ["start_positions", "end_positions"]

    class Anything(nn.Module):
        def forward(self, **kwargs: Any) -> None: ...

    assert forward_parameters(Anything()) is None and find_labels(Anything()) == []


@pytest.mark.parametrize("name", ["labels", "label", "label_ids"])
def test_a_model_without_a_loss_trains_with_a_function(name: str, tmp_path: Any) -> None:
    rows = [{"input_ids": each["input_ids"][:3], name: each["labels"][:3]} for each in DATA]
    trainer = trainer_of(
        made(SilentTokens), rows, tmp_path, collator=None, eval_dataset=rows,
        compute_loss_func=lambda outputs, labels: torch.div(*summed(outputs["logits"], labels)), **BRIEF,
    )  # fmt: skip
    plain = trainer_of(made(Tokens), rows, tmp_path, collator=None, eval_dataset=rows, **BRIEF)
    trainer.train(), plain.train()
    for mine, theirs in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-12)
    assert trainer.predict(rows).predictions.shape == (4, 3, models.VOCAB)


# ---- evaluation of overrides ----------------------------------------------------------------------------------------


class LossAlone(loopwright.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        labels = inputs.pop("labels")
        total, count = summed(model(**inputs)["logits"], labels)
        return total / count


class TwoArguments(loopwright.Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        return LossAlone.compute_loss(self, model, inputs)  # type: ignore[arg-type]


class PairOfTwo(loopwright.Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        labels = inputs.pop("labels")
        return summed(model(**inputs)["logits"], labels)


class PairWithFlag(loopwright.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        return PairOfTwo.compute_loss(self, model, inputs)  # type: ignore[arg-type]


class PairAndOutputs(loopwright.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        pair = summed(outputs["logits"], labels)
        return (pair, outputs) if return_outputs else pair


@pytest.mark.parametrize("cls", [LossAlone, TwoArguments, PairOfTwo, PairWithFlag, PairAndOutputs])
def test_overrides_that_return_the_loss_alone_still_give_logits(cls: type, tmp_path: Any) -> None:
    trainer = trainer_of(made(Tokens), DATA, tmp_path, cls=cls, per_device_eval_batch_size=2)
    plain = trainer_of(made(Tokens), DATA, tmp_path, per_device_eval_batch_size=2)
    mine, theirs = trainer.predict(DATA), plain.predict(DATA)
    np.testing.assert_array_equal(mine.predictions, theirs.predictions)
    assert mine.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=1e-12)
    assert not trainer.model._forward_hooks


def test_evaluation_keeps_the_models_mode(tmp_path: Any) -> None:
    trainer = trainer_of(made(Tokens), DATA, tmp_path, eval_dataset=DATA)
    trainer.model.train()
    trainer.evaluate()
    assert trainer.model.training
    trainer.model.eval()
    trainer.evaluate()
    assert not trainer.model.training


# ---- ties -----------------------------------------------------------------------------------------------------------


class Tied(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    "make", [lambda: made(Tied), lambda: models.llama(tie_word_embeddings=True), models.gpt2, models.t5]
)
def test_ties_survive_saving_and_loading(make: Any, tmp_path: Any) -> None:
    trainer = trainer_of(make(), DATA, tmp_path, **BRIEF)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    fresh = make()
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    assert loopwright.load_model(fresh, tmp_path / "saved") is fresh
    for (name, mine), (_, theirs) in zip(
        fresh.named_parameters(remove_duplicate=False),
        trainer.model.named_parameters(remove_duplicate=False),
        strict=True,
    ):
        assert torch.equal(mine, theirs), name
    places = [{n: p.data_ptr() for n, p in m.named_parameters(remove_duplicate=False)} for m in (fresh, trainer.model)]
    groups = [sorted(sorted(n for n in p if p[n] == place) for place in set(p.values())) for p in places]
    assert groups[0] == groups[1] and max(map(len, groups[0])) >= 2, "what was tied is tied again"


# ---- adapters -------------------------------------------------------------------------------------------------------


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(9)
    options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(models.llama(), peft.LoraConfig(**options)).double()


def test_an_adapter_trains_evaluates_saves_and_resumes(tmp_path: Any) -> None:
    options = {"eval_dataset": DATA, "eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 3,
               "per_device_train_batch_size": 2, "metric_for_best_model": "loss",
               "load_best_model_at_end": True}  # fmt: skip
    trainer = trainer_of(lora(), DATA, tmp_path / "run", **options)
    before = weights(trainer.model)
    trainer.train()
    after = weights(trainer.model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all("lora_" in name for name in moved), "the base stays as it is"
    assert trainer.label_names == ["labels"] and trainer.evaluate()["eval_loss"] > 0
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert (checkpoint / "adapter_model.safetensors").is_file() and not (checkpoint / "model.safetensors").exists()
    again = trainer_of(lora(), DATA, tmp_path / "run", **options)
    again.train(resume_from_checkpoint=str(checkpoint))
    for name, value in weights(again.model).items():
        assert torch.equal(value, after[name]), name


def test_an_adapter_hides_no_column_and_no_shift(tmp_path: Any) -> None:
    model = lora()
    assert innermost(model) is model.get_base_model()
    trainer = trainer_of(
        model, DATA, tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=1, max_steps=1
    )
    trainer.train()
    assert trainer._loopwright.run.accounting.shifts and not [
        text for text in trainer._loopwright.notices.told if "removed columns" in text
    ]


# ---- factories ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [0, 1])
def test_a_factory_is_asked_anew_at_every_train(arguments: int, tmp_path: Any) -> None:
    built = []

    def build(*trial: Any) -> nn.Module:
        built.append(trial)
        return Tokens().double()

    factory = (lambda trial: build(trial)) if arguments else (lambda: build())
    trainer = trainer_of(None, DATA, tmp_path, model_init=factory, **BRIEF)  # type: ignore[arg-type]
    assert len(built) == 1
    trainer.train()
    first, model = weights(trainer.model), trainer.model
    trainer.train()
    assert len(built) == 3 and trainer.model is not model
    assert built[0] == ((None,) if arguments else ())
    for name, value in weights(trainer.model).items():
        assert torch.equal(value, first[name]), "the same seed, the same model, the same run"
    assert trainer.callback_handler.context["model"] is trainer.model
    assert trainer._loopwright.strategy.model is trainer.model


@pytest.mark.parametrize(
    ("factory", "error"),
    [(lambda: None, loopwright.ModelError), (lambda a, b: None, loopwright.ArgumentsError)],
    ids=["nothing", "two arguments"],
)
def test_a_factory_that_cannot_work_says_so(factory: Any, error: type[Exception], tmp_path: Any) -> None:
    with pytest.raises(error, match="model_init"):
        trainer_of(None, DATA, tmp_path, model_init=factory)  # type: ignore[arg-type]


def test_training_twice_goes_on_with_the_model(tmp_path: Any) -> None:
    trainer = trainer_of(made(Tokens), DATA, tmp_path, **BRIEF)
    trainer.train()
    first = weights(trainer.model)
    trainer.train()
    assert trainer.state.global_step == 2, "a new run"
    assert any(not torch.equal(value, first[name]) for name, value in weights(trainer.model).items())


# ---- columns --------------------------------------------------------------------------------------------------------


def test_columns_are_withheld_and_reported_once(tmp_path: Any) -> None:
    rows = [{"input_ids": each["input_ids"][:3], "labels": each["labels"][:3], "id": 7, "text": "x"} for each in DATA]
    trainer = trainer_of(made(Tokens), rows, tmp_path, collator=None, eval_dataset=rows, num_train_epochs=3,
                         eval_strategy="epoch", per_device_train_batch_size=1)  # fmt: skip
    trainer.train()
    told = [text for text in trainer._loopwright.notices.told if "removed columns" in text]
    assert len(told) == 2 and all(text.endswith(": id, text") for text in told)
    assert "training" in told[0] and "evaluation" in told[1]
    assert rows[0].keys() == {"input_ids", "labels", "id", "text"}, "the dataset is the user's"


def test_a_users_collator_sees_every_column(tmp_path: Any) -> None:
    seen = set()

    def collate(features: Any) -> Any:
        seen.update(features[0])
        return {**pad(features), "also": 1}

    rows = [{**each, "note": "x"} for each in DATA]
    trainer = trainer_of(made(Tokens), rows, tmp_path, collator=collate, **BRIEF)
    trainer.train()
    assert "note" in seen
    assert [text for text in trainer._loopwright.notices.told if "removed columns" in text and text.endswith(": also")]


def test_nothing_is_withheld_when_that_is_asked_for(tmp_path: Any) -> None:
    rows = [{"input_ids": each["input_ids"][:3], "labels": each["labels"][:3], "id": 7} for each in DATA]
    trainer = trainer_of(made(Tokens), rows, tmp_path, collator=None, remove_unused_columns=False, **BRIEF)
    with pytest.raises(TypeError, match="id"):
        trainer.train()


def test_columns_that_match_nothing_show_both_lists(tmp_path: Any) -> None:
    rows = [{"ids": each["input_ids"][:3], "labels": each["labels"][:3]} for each in DATA]
    trainer = trainer_of(made(Tokens), rows, tmp_path, collator=None, **BRIEF)
    with pytest.raises(loopwright.DataError) as caught:
        trainer.train()
    text = str(caught.value)
    assert "columns: ids, labels;" in text and "arguments: attention_mask, input_ids, label" in text


def test_a_model_that_takes_anything_gets_everything(tmp_path: Any) -> None:
    class Anything(Tokens):
        def forward(self, **kwargs: Any) -> Any:  # type: ignore[override]
            assert kwargs.keys() >= {"input_ids", "labels", "id"}
            return super().forward(kwargs["input_ids"], labels=kwargs["labels"])

    rows = [{"input_ids": each["input_ids"][:3], "labels": each["labels"][:3], "id": 7} for each in DATA]
    trainer = trainer_of(made(Anything), rows, tmp_path, collator=None, eval_dataset=rows, **BRIEF)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


def test_a_column_filter_travels_to_a_worker() -> None:
    keep = ColumnFilter(pad, {"input_ids", "labels", "attention_mask"}, notices=Notices(quiet=True))
    there = pickle.loads(pickle.dumps(keep))
    assert there([{**each, "extra": torch.zeros(1)} for each in DATA]).keys() == pad(DATA).keys()


# ---- options of the model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [None, {"use_reentrant": True}], ids=str)
def test_checkpointed_activations_change_nothing(options: Any, tmp_path: Any) -> None:
    plain = trainer_of(models.llama(), DATA, tmp_path, **BRIEF)
    saving = trainer_of(models.llama(), DATA, tmp_path, gradient_checkpointing=True,
                        gradient_checkpointing_kwargs=options, **BRIEF)  # fmt: skip
    plain.train(), saving.train()
    assert saving.model.is_gradient_checkpointing
    for mine, theirs in zip(saving.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_checkpointing_a_model_that_cannot_says_so(tmp_path: Any) -> None:
    with pytest.raises(loopwright.ModelError, match="gradient_checkpointing_enable"):
        trainer_of(made(Tokens), DATA, tmp_path, gradient_checkpointing=True).train()


@pytest.mark.parametrize("make", [models.llama, lambda: made(Tokens)], ids=["blocks", "whole"])
def test_compiling_keeps_names_and_numbers(make: Any, tmp_path: Any) -> None:
    keys = list(make().state_dict())
    rows = samples((6, 6, 6, 6))
    options = {"torch_compile": True, "torch_compile_backend": "eager", "save_strategy": "epoch", **BRIEF}
    compiled = trainer_of(make(), rows, tmp_path / "a", **options)
    plain = trainer_of(make(), rows, tmp_path / "b", **BRIEF)
    compiled.train(), plain.train()
    assert list(compiled.model.state_dict()) == keys
    blocks = repeated_blocks(compiled.model) or [compiled.model]
    assert all(block._compiled_call_impl is not None for block in blocks)
    for mine, theirs in zip(compiled.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    fresh = loopwright.load_model(make(), tmp_path / "a" / "checkpoint-2")
    for mine, theirs in zip(fresh.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_repeated_blocks_are_the_outermost() -> None:
    inner = nn.Sequential(nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]))
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList([inner, nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]))]),
            "mixed": nn.ModuleList([nn.Linear(1, 1), nn.ReLU()]),
            "single": nn.ModuleList([nn.Linear(1, 1)]),
        }
    )
    assert repeated_blocks(model) == list(model["layers"])


def test_a_block_that_a_model_repeats_is_one_block() -> None:
    block = nn.Linear(1, 1)
    lists = {name: nn.ModuleList([block, block]) for name in ("layers", "again")}
    assert repeated_blocks(nn.ModuleDict(lists)) == [block]


# ---- embedding noise ------------------------------------------------------------------------------------------------


class Embedded(Tokens):
    def get_input_embeddings(self) -> nn.Module:
        return self.embed


def test_noise_has_its_size_and_only_in_training() -> None:
    model = made(Embedded)
    handle = add_embedding_noise(model, 5.0)
    ids = torch.ones(4, 25, dtype=torch.long)
    clean = nn.functional.embedding(ids, model.embed.weight)
    noise = model.train().embed(ids) - clean
    limit = 5.0 / (25 * 6) ** 0.5
    assert noise.abs().max() <= limit and noise.abs().max() > 0.95 * limit
    assert noise.mean().abs() < 0.1 * limit
    assert torch.equal(model.eval().embed(ids), clean)
    handle.remove()
    assert torch.equal(model.train().embed(ids), clean)


def test_noise_is_added_once_and_taken_away_after_training(tmp_path: Any) -> None:
    trainer = trainer_of(made(Embedded), DATA, tmp_path, neftune_noise_alpha=5.0, eval_dataset=DATA, **BRIEF)
    active = []

    class Looks(loopwright.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            active.append(len(model.embed._forward_hooks))

    trainer.add_callback(Looks())
    trainer.train()
    trainer.train()
    assert set(active) == {1}
    assert not trainer.model.embed._forward_hooks


def test_noise_needs_embeddings(tmp_path: Any) -> None:
    with pytest.raises(loopwright.ModelError, match="get_input_embeddings"):
        trainer_of(made(Tokens), DATA, tmp_path, neftune_noise_alpha=5.0).train()


def test_recomputing_that_was_undone_leaves_no_hook() -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    from loopwright.pt.model.options import checkpoint_activations

    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), peft.LoraConfig(r=2, target_modules=["q_proj"]))

    def hooks() -> int:
        return sum(len(module._forward_hooks) for module in model.modules())

    before = hooks()
    undo = checkpoint_activations(model, {"policy": "full"})
    kept = model.register_forward_hook(lambda *given: None)  # of a callback, during training
    undo()
    assert hooks() == before + 1, "the user's hook, and none of transformers'"
    kept.remove()
