"""TRL's other trainers, most of them experimental, with tiny models."""

from __future__ import annotations

import os
from typing import Any

from .recipes import EVALUATED, _pairs, _score, llama, options, rows_of, saved_llama, sentences, tokenizer
from .running import Recipes, Rows

RECIPES: Recipes = {}


def recipe(function: Any) -> Any:
    RECIPES[function.__name__] = function
    return function


def _prompts(**more: list[Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": sentences(16), **more})


SIZE = {"vocab_size": 300}


def _of_bytes() -> Any:
    """A tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", model_max_length=64)
    fast.chat_template = tokenizer().chat_template
    return fast


def _conversations() -> Any:
    from datasets import Dataset

    said = sentences(64)
    rows = [
        [{"role": "user", "content": said[2 * each]}, {"role": "assistant", "content": said[2 * each + 1]}]
        for each in range(32)
    ]
    return Dataset.from_dict({"messages": rows})


@recipe
def online_dpo(folder: str) -> Rows:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    args = OnlineDPOConfig(**options(folder, bf16=False, max_new_tokens=6, max_length=64))
    trainer = OnlineDPOTrainer(
        llama(), reward_funcs=_score, args=args, train_dataset=_prompts(), processing_class=tokenizer()
    )
    return rows_of(trainer)


@recipe
def cpo(folder: str) -> Rows:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    args = CPOConfig(**options(folder, bf16=False, max_length=64, **EVALUATED))
    data = _pairs()
    return rows_of(
        CPOTrainer(llama(), args, train_dataset=data, eval_dataset=data.select(range(8)), processing_class=tokenizer())
    )


@recipe
def orpo(folder: str) -> Rows:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    args = ORPOConfig(**options(folder, bf16=False, max_length=64, **EVALUATED))
    data = _pairs()
    return rows_of(
        ORPOTrainer(llama(), args, train_dataset=data, eval_dataset=data.select(range(8)), processing_class=tokenizer())
    )


@recipe
def tpo(folder: str) -> Rows:
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    args = TPOConfig(**options(folder, bf16=False, max_length=64))
    data = _pairs().add_column("reference", sentences(32, seed=3))
    return rows_of(TPOTrainer(saved_llama(folder), args, train_dataset=data, processing_class=tokenizer()))


@recipe
def gkd(folder: str) -> Rows:
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    args = GKDConfig(**options(folder, bf16=False, max_length=64, max_new_tokens=6, lmbda=0.5))
    teacher = llama()
    return rows_of(GKDTrainer(llama(), teacher, args, train_dataset=_conversations(), processing_class=tokenizer()))


@recipe
def gold(folder: str) -> Rows:
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

    args = GOLDConfig(
        **options(folder, bf16=False, max_length=64, max_completion_length=6, lmbda=0.5, use_uld_loss=False)
    )
    return rows_of(
        GOLDTrainer(llama(**SIZE), llama(**SIZE), args, train_dataset=_conversations(), processing_class=_of_bytes())
    )


@recipe
def distillation(folder: str) -> Rows:
    from trl import DistillationConfig, DistillationTrainer

    args = DistillationConfig(**options(folder, bf16=False, max_completion_length=6))
    return rows_of(DistillationTrainer(llama(), llama(), args, train_dataset=_prompts(), processing_class=tokenizer()))


@recipe
def iw_opd(folder: str) -> Rows:
    from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

    args = IWOPDConfig(**options(folder, bf16=False, max_length=64, max_completion_length=6))
    return rows_of(
        IWOPDTrainer(
            saved_llama(folder), saved_llama(folder), args, train_dataset=_conversations(), processing_class=tokenizer()
        )
    )


@recipe
def sdft(folder: str) -> Rows:
    from trl.experimental.sdft import SDFTConfig, SDFTTrainer

    args = SDFTConfig(
        **options(
            folder, bf16=False, max_completion_length=6, max_prompt_length=48, num_generations=2, distillation_topk=16
        )
    )
    data = _prompts(privileged_context=sentences(16, seed=2))
    return rows_of(SDFTTrainer(saved_llama(folder), args, train_dataset=data, processing_class=tokenizer()))


@recipe
def sdpo(folder: str) -> Rows:
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    args = SDPOConfig(
        **options(folder, bf16=False, max_completion_length=6, num_generations=4, per_device_train_batch_size=4)
    )
    return rows_of(
        SDPOTrainer(
            saved_llama(folder), reward_funcs=_score, args=args, train_dataset=_prompts(), processing_class=tokenizer()
        )
    )


@recipe
def a2po(folder: str) -> Rows:
    from trl.experimental.a2po import A2POConfig, A2POTrainer

    args = A2POConfig(**options(folder, bf16=False, max_completion_length=6, num_value_samples=2))
    return rows_of(
        A2POTrainer(
            saved_llama(folder), reward_funcs=_right, args=args, train_dataset=_prompts(), processing_class=tokenizer()
        ),
        resume=False,
    )


def _right(completions: list[Any], **ignored: Any) -> list[float]:
    return [float(len(str(each)) % 2) for each in completions]


@recipe
def gmpo(folder: str) -> Rows:
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    args = GMPOConfig(
        **options(folder, bf16=False, per_device_train_batch_size=4, num_generations=4, max_completion_length=6)
    )
    return rows_of(
        GMPOTrainer(llama(), reward_funcs=_score, args=args, train_dataset=_prompts(), processing_class=tokenizer())
    )


@recipe
def dpo_with_a_moving_reference(folder: str) -> Rows:
    from trl import DPOConfig
    from trl.experimental.bema_for_ref_model import BEMACallback, DPOTrainer

    args = DPOConfig(**options(folder, max_length=64, bf16=False))
    trainer = DPOTrainer(
        llama(), llama(), args, train_dataset=_pairs(), processing_class=tokenizer(),
        callbacks=[BEMACallback(update_freq=1, update_ref_model=True)],
    )  # fmt: skip
    return rows_of(trainer, resume=False)


@recipe
def sft_with_rich_progress(folder: str) -> Rows:
    from datasets import Dataset
    from trl import RichProgressCallback, SFTConfig, SFTTrainer

    args = SFTConfig(**options(folder, bf16=False, max_length=64, assistant_only_loss=False))
    trainer = SFTTrainer(
        llama(), args, train_dataset=Dataset.from_dict({"text": sentences(32)}), processing_class=tokenizer(),
        callbacks=[RichProgressCallback()],
    )  # fmt: skip
    found = rows_of(trainer, resume=False)
    return [*found, {"files": sorted(set(os.listdir(args.output_dir)) & {"checkpoint-2", "checkpoint-4"})}]
