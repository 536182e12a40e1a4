"""Generation in evaluation on lazy XLA: the tokens of the CPU, in graphs that do not grow with their number."""

from __future__ import annotations

from typing import Any

import pytest

import loopwright
from loopwright.xla import runtime
from tests.models import CPU, gpt2, llama, pad, samples, t5

RAGGED = (11, 3, 29, 8, 17, 5, 20)
MODELS = {"t5": t5, "llama": llama, "gpt2": gpt2}
NEURON = (loopwright.Seq2SeqNeuronTrainer, loopwright.Seq2SeqNeuronTrainingArguments)
PLAIN = (loopwright.Seq2SeqTrainer, loopwright.Seq2SeqTrainingArguments)


def generating(name: str, folder: Any, *, kind: Any = NEURON, width: int = 32, **options: Any) -> Any:
    data = samples(RAGGED)
    for row in data:
        row["labels"][:2] = -100  # the prompt of a decoder-only model
    base = {**CPU, "use_cpu": False, "static_lengths": [width], "num_train_epochs": 1, "optim": "adamw_torch",
            "learning_rate": 1e-2, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
            "predict_with_generate": True, "generation_max_length": 9}  # fmt: skip
    trainer_class, made_of = kind
    model = MODELS[name]().float()
    model.generation_config.pad_token_id = 0
    args = made_of(output_dir=str(folder), **{**base, **options})
    return trainer_class(model, args, pad, data, data)


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("t5", NEURON, {}),
        ("llama", NEURON, {"eval_strategy": "epoch"}),
        ("llama", PLAIN, {"generation_num_beams": 2}),
        ("t5", PLAIN, {"generation_num_beams": 3, "eval_strategy": "epoch"}),
        ("gpt2", PLAIN, {}),
    ],
)
def test_generated_tokens_are_those_of_the_cpu(name: str, kind: Any, options: dict[str, Any], tmp_path: Any) -> None:
    cpu, xla = (generating(name, tmp_path / str(use), kind=kind, use_cpu=use, **options) for use in (True, False))
    assert xla._loopwright.device.type == "xla"
    outputs = []
    for each in (cpu, xla):
        each.train()
        outputs.append(each.predict(each.eval_dataset))
    theirs, ours = outputs
    assert ours.predictions.shape == theirs.predictions.shape and (ours.predictions == theirs.predictions).all()
    assert (ours.label_ids == theirs.label_ids).all() and len(ours.predictions) == len(RAGGED)
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], abs=1e-6)


@pytest.mark.parametrize(("name", "allowed"), [("llama", 3), ("t5", 5)])
def test_longer_answers_need_no_more_graphs(name: str, allowed: int, tmp_path: Any) -> None:
    """Prompt, token and loss; T5 also has its encoder, and a first token of its own."""
    for width, tokens in ((40, 6), (48, 24)):  # widths no other test has compiled
        run = generating(name, tmp_path / str(width), width=width, generation_max_length=tokens)
        before = runtime.graphs()
        predicted = run.predict(run.eval_dataset).predictions
        first = runtime.graphs() - before
        assert first <= allowed and predicted.shape[1] >= tokens
        run.predict(run.eval_dataset)
        assert runtime.graphs() - before == first, "another time, nothing is compiled"


def test_a_cache_the_user_chooses_is_used(tmp_path: Any) -> None:
    run = generating("llama", tmp_path)
    for options in ({"use_cache": False}, {"cache_implementation": "dynamic"}):
        assert run._loopwright.evaluation._with_fixed_cache(run.model, dict(options)) == options
    fixed = run._loopwright.evaluation._with_fixed_cache(run.model, {"max_new_tokens": 2})
    assert fixed.get("cache_implementation") == "static"
    tokens = run.predict(run.eval_dataset).predictions
    assert (run.predict(run.eval_dataset, use_cache=False, max_new_tokens=9).predictions == tokens).all()
