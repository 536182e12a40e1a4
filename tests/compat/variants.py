"""Options of TRL's and sentence-transformers' trainers that change what they override or how often they call it."""

from __future__ import annotations

from typing import Any

from .recipes import (
    EVALUATED,
    _pairs,
    _score,
    _scored_pairs,
    bert_folder,
    classifier,
    llama,
    options,
    rows_of,
    saved_llama,
    sentences,
    tokenizer,
)
from .running import Recipes, Rows

RECIPES: Recipes = {}


def recipe(function: Any) -> Any:
    RECIPES[function.__name__] = function
    return function


def _adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


# ---- TRL ------------------------------------------------------------------------------------------------------------


@recipe
def sft_of_completions(folder: str) -> Rows:
    from trl import SFTConfig, SFTTrainer

    data = _pairs().rename_column("chosen", "completion").remove_columns("rejected")
    args = SFTConfig(**options(folder, max_length=64, bf16=False, completion_only_loss=True, **EVALUATED))
    parts = {"a": data.select(range(6)), "b": data.select(range(6, 12))}
    return rows_of(SFTTrainer(llama(), args, train_dataset=data, eval_dataset=parts, processing_class=tokenizer()))


@recipe
def sft_formatted(folder: str) -> Rows:
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(
        **options(
            folder, max_length=32, bf16=False, packing=True, eval_packing=False, gradient_checkpointing=True,
            **EVALUATED,
        )
    )  # fmt: skip
    data = _pairs().rename_columns({"prompt": "first", "chosen": "second"})
    return rows_of(
        SFTTrainer(
            llama(), args, train_dataset=data, eval_dataset=data.select(range(8)), processing_class=tokenizer(),
            formatting_func=lambda row: f"{row['first']} {row['second']}",
        ),
        resume=False,
    )  # fmt: skip


@recipe
def sft_dft_loss(folder: str) -> Rows:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(**options(folder, max_length=64, bf16=False, loss_type="dft"))
    data = Dataset.from_dict({"text": sentences(32)})
    return rows_of(SFTTrainer(llama(), args, train_dataset=data, processing_class=tokenizer()))


@recipe
def sft_bfloat16(folder: str) -> Rows:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(**options(folder, max_length=64, bf16=True, gradient_accumulation_steps=1))
    data = Dataset.from_dict({"text": sentences(32, 10, 10)})
    return rows_of(SFTTrainer(llama(), args, train_dataset=data, processing_class=tokenizer()), resume=False)


@recipe
def dpo_lora(folder: str) -> Rows:
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(**options(folder, max_length=64, bf16=False, **EVALUATED))
    data = _pairs()
    trainer = DPOTrainer(
        saved_llama(folder), None, args, train_dataset=data, eval_dataset=data.select(range(8)),
        processing_class=tokenizer(), peft_config=_adapter(),
    )  # fmt: skip
    return rows_of(trainer)


@recipe
def dpo_precomputed(folder: str) -> Rows:
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(
        **options(folder, max_length=64, bf16=False, precompute_ref_log_probs=True, loss_type=["sigmoid", "sft"])
    )
    return rows_of(DPOTrainer(saved_llama(folder), None, args, train_dataset=_pairs(), processing_class=tokenizer()))


@recipe
def dpo_padding_free_synced(folder: str) -> Rows:
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(
        **options(folder, max_length=64, bf16=False, sync_ref_model=True, ref_model_sync_steps=1, loss_type="ipo")
    )
    trainer = DPOTrainer(llama(), llama(), args, train_dataset=_pairs(), processing_class=tokenizer())
    return rows_of(trainer, resume=False)


@recipe
def reward_centered_lora(folder: str) -> Rows:
    from peft import LoraConfig
    from trl import RewardConfig, RewardTrainer

    args = RewardConfig(**options(folder, max_length=64, bf16=False, center_rewards_coefficient=0.01))
    adapter = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["score"], task_type="SEQ_CLS")
    data = _pairs().remove_columns("prompt")
    return rows_of(
        RewardTrainer(classifier(), args, train_dataset=data, processing_class=tokenizer(), peft_config=adapter)
    )


@recipe
def grpo_several_iterations(folder: str) -> Rows:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        **options(
            folder, bf16=False, per_device_train_batch_size=4, num_generations=4, max_completion_length=6, beta=0.1,
            num_iterations=2, steps_per_generation=2, reward_weights=[0.7, 0.3], max_steps=8,
        )
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": sentences(16), "wanted": sentences(16, seed=4)})
    trainer = GRPOTrainer(
        saved_llama(folder), reward_funcs=[_score, _overlap], args=args, train_dataset=data,
        processing_class=tokenizer(),
    )  # fmt: skip
    return rows_of(trainer, resume=False)


def _overlap(completions: list[Any], wanted: list[str], **ignored: Any) -> list[float]:
    return [float(len({*str(a).split()} & {*b.split()})) for a, b in zip(completions, wanted, strict=True)]


@recipe
def grpo_lora_and_a_reward_model(folder: str) -> Rows:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        **options(
            folder, bf16=False, per_device_train_batch_size=4, num_generations=2, max_completion_length=6,
            loss_type="grpo", scale_rewards="batch", mask_truncated_completions=True, shuffle_dataset=False,
        )
    )  # fmt: skip
    judge = classifier()
    judge.config.pad_token_id = 0
    data = Dataset.from_dict({"prompt": sentences(16)})
    trainer = GRPOTrainer(
        saved_llama(folder), reward_funcs=[judge], args=args, train_dataset=data,
        processing_class=tokenizer(), reward_processing_classes=[tokenizer()], peft_config=_adapter(),
    )  # fmt: skip
    return rows_of(trainer, resume=False)


# ---- sentence-transformers ------------------------------------------------------------------------------------------


def _encoder(folder: str) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(bert_folder(folder), device="cpu")


@recipe
def sentence_sets_with_losses(folder: str) -> Rows:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments as Arguments,
    )
    from sentence_transformers.losses import CosineSimilarityLoss, MatryoshkaLoss, MultipleNegativesRankingLoss
    from sentence_transformers.training_args import BatchSamplers, MultiDatasetBatchSamplers

    model, scored = _encoder(folder), _scored_pairs()
    said = sentences(48, seed=5)
    pairs = Dataset.from_dict({"anchor": said[:24], "positive": said[24:]})
    args = Arguments(
        **options(
            folder, gradient_accumulation_steps=1, batch_sampler=BatchSamplers.NO_DUPLICATES,
            multi_dataset_batch_sampler=MultiDatasetBatchSamplers.ROUND_ROBIN, prompts={"scored": "w1 "}, **EVALUATED,
        )
    )  # fmt: skip
    losses = {
        "scored": CosineSimilarityLoss(model),
        "pairs": MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), [32, 16]),
    }
    sets = {"scored": scored, "pairs": pairs}
    few = {name: each.select(range(8)) for name, each in sets.items()}
    return rows_of(SentenceTransformerTrainer(model, args, train_dataset=sets, eval_dataset=few, loss=losses))


@recipe
def sentences_with_an_evaluator(folder: str) -> Rows:
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments as Arguments,
    )
    from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
    from sentence_transformers.losses import CoSENTLoss

    model, data = _encoder(folder), _scored_pairs()
    some = data.select(range(12))
    judge = EmbeddingSimilarityEvaluator(some["sentence1"], some["sentence2"], some["score"], name="near")
    args = Arguments(
        **options(
            folder, load_best_model_at_end=True, metric_for_best_model="eval_near_spearman_cosine", save_total_limit=2,
            warmup_steps=0.1, gradient_accumulation_steps=1, **EVALUATED,
        )
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        model, args, train_dataset=data, eval_dataset=some, loss=CoSENTLoss(model), evaluator=judge
    )
    found = rows_of(trainer, resume=False)
    again = {name: float(value) for name, value in judge(model).items()}
    return [*found, again, {"best": trainer.state.best_metric}]


@recipe
def sentences_cached_with_adapters(folder: str) -> Rows:
    from datasets import Dataset
    from peft import LoraConfig
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments as Arguments,
    )
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss

    model = _encoder(folder)
    model.add_adapter(LoraConfig(r=4, target_modules=["query", "value"]))
    said = sentences(48, seed=5)
    data = Dataset.from_dict({"anchor": said[:24], "positive": said[24:]})
    args = Arguments(**options(folder, gradient_accumulation_steps=1, per_device_train_batch_size=8))
    loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=3)
    return rows_of(SentenceTransformerTrainer(model, args, train_dataset=data, loss=loss))


@recipe
def sentences_grouped_by_label(folder: str) -> Rows:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments as Arguments,
    )
    from sentence_transformers.losses import BatchAllTripletLoss
    from sentence_transformers.training_args import BatchSamplers

    model = _encoder(folder)
    data = Dataset.from_dict({"sentence": sentences(32), "label": [each % 4 for each in range(32)]})
    args = Arguments(
        **options(
            folder, batch_sampler=BatchSamplers.GROUP_BY_LABEL, per_device_train_batch_size=8, max_steps=-1,
            num_train_epochs=2, gradient_accumulation_steps=1, save_strategy="no",
        )
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(model, args, train_dataset=data, loss=BatchAllTripletLoss(model))
    return rows_of(trainer, resume=False)
