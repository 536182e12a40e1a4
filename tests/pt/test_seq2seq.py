"""Generation in evaluation: real tasks, learnt for real, by an encoder-decoder and by a decoder-only model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from loopwright import Seq2SeqTrainer, Seq2SeqTrainingArguments

transformers = pytest.importorskip("transformers")

PAD, EOS, START = 0, 1, 2
pytestmark = pytest.mark.xdist_group("seq2seq")  # its two models are trained once, not once per process


def exact_match(prediction: Any) -> dict[str, float]:
    """The share of answers generated without a mistake."""
    right = 0
    for generated, labels in zip(prediction.predictions, prediction.label_ids, strict=True):
        wanted = [token for token in labels.tolist() if token not in (-100, PAD, EOS)]
        got = [token for token in generated.tolist() if token not in (-100, PAD, START)]
        got = got[: got.index(EOS)] if EOS in got else got
        right += got == wanted
    return {"exact_match": right / len(prediction.label_ids)}


def arguments(folder: Any, **options: Any) -> Seq2SeqTrainingArguments:
    defaults = {"per_device_train_batch_size": 64, "per_device_eval_batch_size": 50, "use_cpu": True,
                "save_strategy": "no", "predict_with_generate": True, "disable_tqdm": True,
                "lr_scheduler_type": "constant"}  # fmt: skip
    return Seq2SeqTrainingArguments(str(folder), **{**defaults, **options})


# ---- reversing a sequence, with a tiny T5 ---------------------------------------------------------------------------


def tiny_t5(width: int = 32) -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=12, d_model=width, d_kv=16, d_ff=2 * width, num_layers=2, num_heads=2, dropout_rate=0.0,
        pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=START,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def reversal(n: int, seed: int = 0) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(n):
        length = int(torch.randint(2, 5, (1,), generator=g))
        ids = torch.randint(3, 12, (length,), generator=g).tolist()
        samples.append({"input_ids": [*ids, EOS], "labels": [*ids[::-1], EOS]})
    return samples


def pad_seq2seq(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    def padded(name: str, fill: int) -> torch.Tensor:
        width = max(len(sample[name]) for sample in samples)
        return torch.tensor([sample[name] + [fill] * (width - len(sample[name])) for sample in samples])

    ids = padded("input_ids", PAD)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": padded("labels", -100)}


@pytest.fixture(scope="module")
def reverser(tmp_path_factory: Any) -> Seq2SeqTrainer:
    args = arguments(
        tmp_path_factory.mktemp("reverse"), max_steps=450, learning_rate=5e-3, generation_max_length=8, seed=1
    )
    trainer = Seq2SeqTrainer(
        tiny_t5(), args, pad_seq2seq, reversal(4000), reversal(100, seed=9), compute_metrics=exact_match
    )
    trainer.train()
    return trainer


def test_a_tiny_t5_learns_to_reverse(reverser: Seq2SeqTrainer) -> None:
    metrics = reverser.evaluate()
    assert metrics["eval_exact_match"] > 0.95
    assert metrics["eval_loss"] < 0.2


def test_predictions_do_not_depend_on_the_batch_size(reverser: Seq2SeqTrainer) -> None:
    data = reversal(23, seed=5)
    whole = reverser.predict(data)
    reverser.args.per_device_eval_batch_size = 3
    parts = reverser.predict(data)
    reverser.args.per_device_eval_batch_size = 50
    np.testing.assert_array_equal(whole.predictions, parts.predictions)
    assert whole.metrics["test_loss"] == pytest.approx(parts.metrics["test_loss"], rel=1e-5)
    assert len(whole.predictions) == 23


def test_options_of_a_call_reach_generation(reverser: Seq2SeqTrainer) -> None:
    data = reversal(4, seed=5)
    for options, longest in (({"max_length": 3}, 3), ({"max_new_tokens": 3, "num_beams": 2}, 4), ({}, 8)):
        generated = reverser.predict(data, **options).predictions
        assert generated.shape == (4, 20)  # the width the model's own generation config allows, as transformers pads
        assert (generated[:, longest:] == PAD).all()
        assert (generated[:, 1:3] != PAD).all()


def test_the_loss_beside_generation_is_the_overridden_one(tmp_path: Any) -> None:
    class Doubled(Seq2SeqTrainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:
            return model(**inputs).loss * 0 + 7.0

    data = reversal(6)
    trainer = Doubled(tiny_t5(), arguments(tmp_path, generation_max_length=4), pad_seq2seq, None, data)
    trainer.compute_metrics = exact_match
    assert trainer.evaluate()["eval_loss"] == pytest.approx(7.0)

    def loss_func(outputs: Any, labels: Any) -> Any:
        return outputs.logits.sum() * 0 + 3.0

    other = Seq2SeqTrainer(
        tiny_t5(), arguments(tmp_path, generation_max_length=4), pad_seq2seq, None, data, compute_loss_func=loss_func,
        compute_metrics=exact_match, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}),
    )  # fmt: skip
    assert other.evaluate()["eval_loss"] == pytest.approx(3.0)


def test_a_generation_config_is_taken_from_object_file_and_folder(tmp_path: Any) -> None:
    config = transformers.GenerationConfig(
        max_length=5, pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=START
    )
    config.save_pretrained(tmp_path / "config")
    for given in (config, str(tmp_path / "config"), tmp_path / "config" / "generation_config.json"):
        trainer = Seq2SeqTrainer(tiny_t5(), arguments(tmp_path, generation_config=given), pad_seq2seq)
        assert trainer.model.generation_config.max_length == 5
        assert trainer.predict(reversal(3)).predictions.shape == (3, 5)


def test_sortish_sampler_really_sorts(tmp_path: Any) -> None:
    data = reversal(400)
    trainer = Seq2SeqTrainer(
        tiny_t5(), arguments(tmp_path, sortish_sampler=True, per_device_train_batch_size=10), pad_seq2seq, data
    )
    lengths = [len(data[i]["input_ids"]) for i in trainer.get_train_dataloader().sampler]
    spread = [max(lengths[i : i + 10]) - min(lengths[i : i + 10]) for i in range(0, 400, 10)]
    assert sorted(i for i in trainer.get_train_dataloader().sampler) == list(range(400))
    assert sum(spread) / len(spread) < 0.5


def test_numbers_equal_transformers(tmp_path: Any) -> None:
    data = reversal(21, seed=3)
    model = tiny_t5()
    options = {"generation_max_length": 6, "per_device_eval_batch_size": 4}
    ours = Seq2SeqTrainer(
        model, arguments(tmp_path, **options, eval_loss_reduction="batch_mean"),
        pad_seq2seq, compute_metrics=exact_match,
    ).predict(data)  # fmt: skip
    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, generation_max_length=6, per_device_eval_batch_size=4, use_cpu=True
    )
    theirs = transformers.Seq2SeqTrainer(model, args, pad_seq2seq, compute_metrics=exact_match).predict(data)
    np.testing.assert_array_equal(ours.predictions, theirs.predictions)
    # transformers pads labels with the padding token where we keep -100
    width = ours.label_ids.shape[1]
    np.testing.assert_array_equal(ours.label_ids, np.where(theirs.label_ids == PAD, -100, theirs.label_ids)[:, :width])
    for name in ("test_loss", "test_exact_match"):
        assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-6)


# ---- adding two numbers as text, with a tiny Llama ------------------------------------------------------------------

DIGITS = {character: 3 + i for i, character in enumerate("0123456789+=")}


def tiny_llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, max_position_embeddings=32, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=START,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def additions(numbers: list[tuple[int, int]]) -> list[dict[str, Any]]:
    samples = []
    for a, b in numbers:
        prompt = [START, *(DIGITS[c] for c in f"{a}+{b}=")]
        answer = [*(DIGITS[c] for c in str(a + b)), EOS]
        samples.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return samples


def pad_causal(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return pad_seq2seq(samples)


@pytest.fixture(scope="module")
def adder(tmp_path_factory: Any) -> Seq2SeqTrainer:
    every = [(a, b) for a in range(20) for b in range(20)]
    args = arguments(
        tmp_path_factory.mktemp("add"), max_steps=500, learning_rate=3e-3, generation_max_length=4, seed=1,
        lr_scheduler_type="cosine",
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        tiny_llama(), args, pad_causal, additions(every), additions(every[::7]), compute_metrics=exact_match
    )
    trainer.train()
    return trainer


def test_a_tiny_llama_learns_to_add(adder: Seq2SeqTrainer) -> None:
    metrics = adder.evaluate()
    assert metrics["eval_exact_match"] > 0.95
    assert metrics["eval_loss"] < 0.2


def test_prompts_of_different_lengths_do_not_change_each_other(adder: Seq2SeqTrainer) -> None:
    data = additions([(1, 2), (19, 19), (3, 14), (0, 0), (12, 7)])
    together = adder.predict(data)
    alone = [adder.predict([sample]) for sample in data]
    for row, single in zip(together.predictions, alone, strict=True):
        np.testing.assert_array_equal(row, single.predictions[0])


def test_labels_of_a_causal_model_are_its_answers(adder: Seq2SeqTrainer) -> None:
    output = adder.predict(additions([(1, 2), (20, 9)]))
    assert output.label_ids.tolist() == [[DIGITS["3"], EOS, -100], [DIGITS["2"], DIGITS["9"], EOS]]
