"""Trainers of third-party libraries with tiny models, run on transformers' Trainer or on loopwright's."""

from __future__ import annotations

import contextlib
import os
import random
from typing import Any

from .running import Recipes

RECIPES: Recipes = {}


def recipe(function: Any) -> Any:
    RECIPES[function.__name__] = function
    return function


WORDS = ["<pad>", "<eos>", "<unk>", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(58))]


def tokenizer(**special: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=64,
        **special,
    )
    fast.chat_template = (
        "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} <eos> {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    return fast


def sentences(number: int, low: int = 4, high: int = 16, seed: int = 0) -> list[str]:
    drawn = random.Random(seed)
    return [" ".join(f"w{drawn.randrange(58)}" for _ in range(drawn.randint(low, high))) for _ in range(number)]


def llama(**changes: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**llama_config(), **changes}))


def saved_llama(folder: str) -> str:
    """A folder with the model: a reference model is loaded from it."""
    place = os.path.join(folder, "llama")
    llama().save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


def llama_config() -> dict[str, Any]:
    return {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 1,
        "bos_token_id": 1,
    }  # fmt: skip


def classifier(labels: int = 1) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**llama_config(), num_labels=labels))


def bert_folder(folder: str, kind: str = "BertModel", **changes: Any) -> str:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **changes
    )  # fmt: skip
    place = os.path.join(folder, kind)
    getattr(transformers, kind)(config).save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


OPTIONS: dict[str, Any] = {
    "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1,
    "report_to": "none", "use_cpu": True, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2, "seed": 1,
    "disable_tqdm": True,
}  # fmt: skip
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


def options(folder: str, **changes: Any) -> dict[str, Any]:
    return {"output_dir": os.path.join(folder, "run"), **OPTIONS, **changes}


def rows_of(trainer: Any, resume: bool = True) -> list[dict[str, Any]]:
    """The rows of a run, and those of the same run resumed from its first checkpoint."""
    trainer.train()
    rows = [dict(row) for row in trainer.state.log_history]
    if resume:
        trainer.train(resume_from_checkpoint=os.path.join(trainer.args.output_dir, "checkpoint-2"))
        rows += [{f"resumed_{name}": value for name, value in row.items()} for row in trainer.state.log_history]
    return rows


# ---- TRL ------------------------------------------------------------------------------------------------------------


def _sft(folder: str, data: Any, **changes: Any) -> list[dict[str, Any]]:
    from trl import SFTConfig, SFTTrainer

    extra = {name: changes.pop(name) for name in ("peft_config", "model") if name in changes}
    args = SFTConfig(**{**options(folder, max_length=64, bf16=False), **changes})
    evaluation = {"eval_dataset": data.select(range(8))} if args.eval_strategy != "no" else {}
    model = extra.pop("model", None) or llama()
    return rows_of(SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer(), **evaluation, **extra))


def _texts() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"text": sentences(32)})


@recipe
def sft(folder: str) -> list[dict[str, Any]]:
    return _sft(folder, _texts(), **EVALUATED)


@recipe
def sft_packing(folder: str) -> list[dict[str, Any]]:
    return _sft(folder, _texts(), packing=True, max_length=32, num_train_epochs=3)


@recipe
def sft_padding_free(folder: str) -> list[dict[str, Any]]:
    return _sft(folder, _texts(), padding_free=True, max_length=None)


@recipe
def sft_lora(folder: str) -> list[dict[str, Any]]:
    from peft import LoraConfig

    return _sft(folder, _texts(), peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


@recipe
def sft_chat(folder: str) -> list[dict[str, Any]]:
    from datasets import Dataset

    said = sentences(64)
    rows = [
        [{"role": "user", "content": said[2 * each]}, {"role": "assistant", "content": said[2 * each + 1]}]
        for each in range(32)
    ]
    return _sft(folder, Dataset.from_dict({"messages": rows}), **EVALUATED)


@recipe
def sft_iterable(folder: str) -> list[dict[str, Any]]:
    return _sft(folder, _texts().to_iterable_dataset())


def _pairs() -> Any:
    from datasets import Dataset

    said = sentences(96)
    return Dataset.from_dict({"prompt": said[:32], "chosen": said[32:64], "rejected": said[64:]})


@recipe
def dpo(folder: str) -> list[dict[str, Any]]:
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(**options(folder, max_length=64, bf16=False, **EVALUATED))
    data, model = _pairs(), saved_llama(folder)
    trainer = DPOTrainer(
        model, None, args, train_dataset=data, eval_dataset=data.select(range(8)), processing_class=tokenizer()
    )
    return rows_of(trainer)


@recipe
def reward(folder: str) -> list[dict[str, Any]]:
    from trl import RewardConfig, RewardTrainer

    args = RewardConfig(**options(folder, max_length=64, bf16=False, **EVALUATED))
    data = _pairs().remove_columns("prompt")
    trainer = RewardTrainer(
        classifier(), args, train_dataset=data, eval_dataset=data.select(range(8)), processing_class=tokenizer()
    )
    return rows_of(trainer)


@recipe
def kto(folder: str) -> list[dict[str, Any]]:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    said = sentences(64)
    data = Dataset.from_dict(
        {"prompt": said[:32], "completion": said[32:], "label": [each % 2 == 0 for each in range(32)]}
    )
    args = KTOConfig(**options(folder, max_length=64, bf16=False, per_device_train_batch_size=4))
    return rows_of(KTOTrainer(saved_llama(folder), args=args, train_dataset=data, processing_class=tokenizer()))


def _score(completions: list[Any], **ignored: Any) -> list[float]:
    return [float(len(set(str(each).split()))) for each in completions]


@recipe
def grpo(folder: str) -> list[dict[str, Any]]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        **options(folder, bf16=False, per_device_train_batch_size=4, num_generations=4, max_completion_length=6)
    )
    data = Dataset.from_dict({"prompt": sentences(16)})
    trainer = GRPOTrainer(llama(), reward_funcs=_score, args=args, train_dataset=data, processing_class=tokenizer())
    return rows_of(trainer)


@recipe
def rloo(folder: str) -> list[dict[str, Any]]:
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    args = RLOOConfig(
        **options(folder, bf16=False, per_device_train_batch_size=4, num_generations=4, max_completion_length=6)
    )
    data = Dataset.from_dict({"prompt": sentences(16)})
    model = saved_llama(folder)
    trainer = RLOOTrainer(model, reward_funcs=_score, args=args, train_dataset=data, processing_class=tokenizer())
    return rows_of(trainer)


# ---- sentence-transformers ------------------------------------------------------------------------------------------


def _scored_pairs() -> Any:
    from datasets import Dataset

    said = sentences(64)
    return Dataset.from_dict(
        {"sentence1": said[:32], "sentence2": said[32:], "score": [each % 5 / 4 for each in range(32)]}
    )


@recipe
def sentence_transformer(folder: str) -> list[dict[str, Any]]:
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments as Arguments,
    )
    from sentence_transformers.losses import CosineSimilarityLoss

    model, data = SentenceTransformer(bert_folder(folder), device="cpu"), _scored_pairs()
    args = Arguments(**options(folder, **EVALUATED))
    trainer = SentenceTransformerTrainer(
        model, args, train_dataset=data, eval_dataset=data.select(range(8)), loss=CosineSimilarityLoss(model)
    )
    return rows_of(trainer)


@recipe
def cross_encoder(folder: str) -> list[dict[str, Any]]:
    from sentence_transformers.cross_encoder import (
        CrossEncoder,
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments as Arguments,
    )
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    place = bert_folder(folder, "BertForSequenceClassification", num_labels=1)
    model, data = CrossEncoder(place, num_labels=1, device="cpu"), _scored_pairs()
    args = Arguments(**options(folder, **EVALUATED))
    trainer = CrossEncoderTrainer(
        model, args, train_dataset=data, eval_dataset=data.select(range(8)), loss=BinaryCrossEntropyLoss(model)
    )
    return rows_of(trainer)


@recipe
def sparse_encoder(folder: str) -> list[dict[str, Any]]:
    from sentence_transformers.sparse_encoder import (
        SparseEncoder,
        SparseEncoderTrainer,
        SparseEncoderTrainingArguments as Arguments,
    )
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

    model = SparseEncoder(bert_folder(folder, "BertForMaskedLM"), device="cpu")
    data = _scored_pairs().remove_columns("score").rename_columns({"sentence1": "anchor", "sentence2": "positive"})
    args = Arguments(**options(folder, **EVALUATED))
    loss = SpladeLoss(
        model,
        loss=SparseMultipleNegativesRankingLoss(model),
        query_regularizer_weight=1e-3,
        document_regularizer_weight=1e-3,
    )
    trainer = SparseEncoderTrainer(model, args, train_dataset=data, eval_dataset=data.select(range(8)), loss=loss)
    return rows_of(trainer)


# ---- others ---------------------------------------------------------------------------------------------------------


def _accuracy(predicted: Any, expected: Any) -> dict[str, float]:
    return {"accuracy": float(sum(int(a) == int(b) for a, b in zip(predicted, expected, strict=True)) / len(expected))}


@recipe
def setfit(folder: str) -> list[dict[str, Any]]:
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    model = SetFitModel.from_pretrained(bert_folder(folder), device="cpu")
    data = Dataset.from_dict({"text": sentences(16), "label": [each % 2 for each in range(16)]})
    args = TrainingArguments(
        output_dir=os.path.join(folder, "run"), batch_size=4, num_epochs=1, max_steps=4, seed=1, report_to="none",
        logging_steps=1, body_learning_rate=1e-2, use_amp=False,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data, metric=_accuracy)
    trainer.train()
    rows = [dict(row) for row in trainer.st_trainer.state.log_history]
    return [*rows, {"metrics": trainer.evaluate()}]


@recipe
def adapters(folder: str) -> list[dict[str, Any]]:
    import adapters as library
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, TrainingArguments

    place = bert_folder(folder, "BertForSequenceClassification", num_labels=2)
    model = AutoModelForSequenceClassification.from_pretrained(place)
    library.init(model)
    model.add_adapter("mine", config="seq_bn")
    model.train_adapter("mine")
    tokens = tokenizer()
    data = Dataset.from_dict({**tokens(sentences(32, 8, 8)), "labels": [each % 2 for each in range(32)]})
    args = TrainingArguments(**options(folder, gradient_accumulation_steps=1, **EVALUATED))
    trainer = library.AdapterTrainer(model=model, args=args, train_dataset=data, eval_dataset=data.select(range(8)))
    rows = rows_of(trainer)
    return [*rows, {"saved": sorted(os.listdir(os.path.join(args.output_dir, "checkpoint-2", "mine")))}]


METRIC = """
import datasets
import evaluate


class Tags(evaluate.Metric):
    def _info(self):
        texts = datasets.Sequence(datasets.Value("string"))
        features = datasets.Features({"predictions": texts, "references": texts})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        right = [a == b for one, other in zip(predictions, references) for a, b in zip(one, other)]
        names = [f"overall_{name}" for name in ("accuracy", "precision", "recall", "f1")]
        return dict.fromkeys(names, sum(right) / len(right))
"""
"""A metric in the place of `seqeval`, which would be downloaded."""


@recipe
def span_marker(folder: str) -> list[dict[str, Any]]:
    place = os.path.join(folder, "seqeval")
    os.makedirs(place)
    with open(os.path.join(place, "seqeval.py"), "w") as file:
        file.write(METRIC)
    with contextlib.chdir(folder):
        return _span_marker(folder)


def _span_marker(folder: str) -> list[dict[str, Any]]:
    import torch
    from datasets import Dataset
    from span_marker import SpanMarkerModel, Trainer
    from transformers import TrainingArguments

    torch.manual_seed(0)
    model = SpanMarkerModel.from_pretrained(
        bert_folder(folder), labels=["O", "B-A", "I-A"], model_max_length=64, marker_max_length=16, entity_max_length=3
    )
    words = [each.split() for each in sentences(24, 6, 6)]
    tags = [[1, 2, 0, 1, 0, 0] if number % 2 else [0, 0, 1, 2, 2, 0] for number in range(24)]
    data = Dataset.from_dict({"tokens": words, "ner_tags": tags})
    args = TrainingArguments(**options(folder, gradient_accumulation_steps=1, **EVALUATED))
    rows: list[dict[str, Any]] = []
    for start in (None, os.path.join(folder, "run", "checkpoint-2")):  # such a trainer trains once
        trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data.select(range(8)))
        trainer.train(resume_from_checkpoint=start)
        prefix = "resumed_" if start else ""
        rows += [{f"{prefix}{name}": each for name, each in row.items()} for row in trainer.state.log_history]
    return rows


@recipe
def gliner(folder: str) -> list[dict[str, Any]]:
    import torch
    from gliner import GLiNER, GLiNERConfig
    from gliner.training import TrainingArguments

    place = bert_folder(folder)
    torch.manual_seed(0)
    config = GLiNERConfig(model_name=place, hidden_size=32, max_width=3, max_len=32, dropout=0.0, max_neg_type_ratio=0)
    model = GLiNER.from_config(config)
    data = [
        {"tokenized_text": each.split(), "ner": [[0, 1, "person"], [3, 3, "person"]]} for each in sentences(24, 6, 6)
    ]  # of one kind, and without negatives: the collator draws others, in evaluations too
    args = TrainingArguments(
        **options(folder, gradient_accumulation_steps=1, others_lr=1e-2, remove_unused_columns=False, **EVALUATED)
    )
    trainer = model.train_model(data, data[:8], training_args=args)
    rows = [dict(row) for row in trainer.state.log_history]
    trainer.train(resume_from_checkpoint=os.path.join(args.output_dir, "checkpoint-2"))
    return [*rows, *({f"resumed_{name}": value for name, value in row.items()} for row in trainer.state.log_history)]
