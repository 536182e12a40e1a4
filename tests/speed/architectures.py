"""Tiny models of many transformers architectures, and ragged data for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH = 64, 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = {"num_key_value_heads": 2}
NO_DROPOUT = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "classifier_dropout": 0.0,
    "classifier_dropout_prob": 0.0,
    "pooler_dropout": 0.0,
    "pooler_hidden_size": 32,
    "dropout_rate": 0.0,
    "seq_classif_dropout": 0.0,
    "resid_dropout": 0.0,
    "embedding_dropout": 0.0,
    "mlp_dropout": 0.0,
}

DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
          "decoder_layers")  # fmt: skip
"""Names under which configurations keep how many layers there are."""

DECODERS: dict[str, dict[str, Any]] = {
    "llama": GQA,
    "qwen2": GQA,
    "qwen3": {**GQA, "head_dim": 8},
    "mistral": {**GQA, "sliding_window": 7},
    "gemma": {**GQA, "head_dim": 8},
    "gemma2": {**GQA, "head_dim": 8, "sliding_window": 64, "query_pre_attn_scalar": 8},
    "gemma3_text": {**GQA, "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8},
    "phi": {},
    "phi3": GQA,
    "granite": {**GQA, "logits_scaling": 4.0},
    "cohere": {**GQA, "logit_scale": 0.5},
    "olmo2": GQA,
    "starcoder2": {**GQA, "sliding_window": None},
    "stablelm": GQA,
    "smollm3": GQA,
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_positions": 64},
    "gptj": {"n_embd": 32, "n_head": 4, "n_positions": 64, "rotary_dim": 4, "n_inner": 48},
    "gpt_bigcode": {"n_embd": 32, "n_head": 4, "n_positions": 64},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "bloom": {"n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "max_seq_len": 64},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"max_position_embeddings": 72, "pad_token_id": 0},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_heads": 4},
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 16},
    "camembert": {"max_position_embeddings": 72, "pad_token_id": 0},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
}
PAIRS: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "decoder_start_token_id": 0},
    "mt5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "decoder_start_token_id": 0},
    "umt5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "decoder_start_token_id": 0},
    "bart": {
        "d_model": 32, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 1,
    },
    **{
        kind: {
            "d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48, "decoder_start_token_id": 1, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
            **({"decoder_vocab_size": VOCABULARY} if kind == "marian" else {}),
        }
        for kind in ("marian", "mbart", "m2m_100", "blenderbot-small")
    },
    "pegasus": {
        "d_model": 32, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 1,
    },
}  # fmt: skip


def config(kind: str, extra: dict[str, Any], *, layers: int = 2, **more: Any) -> Any:
    from transformers import AutoConfig

    made = AutoConfig.for_model(kind)
    for name, value in {**SIZES, **dict.fromkeys(DEPTHS, layers), **NO_DROPOUT, **extra, **more}.items():
        if name in extra or hasattr(made, name):
            setattr(made, name, value)
    values = made.to_dict()
    values.pop("model_type", None)
    values.pop("layer_types", None)
    return AutoConfig.for_model(kind, **values)


def build(kind: str, task: str, layers: int = 1, **more: Any) -> nn.Module:
    """A model in double precision, its weights large enough that a wrong mask shows."""
    import transformers

    head = {
        "causal": transformers.AutoModelForCausalLM,
        "class": transformers.AutoModelForSequenceClassification,
        "masked": transformers.AutoModelForMaskedLM,
        "tokens": transformers.AutoModelForTokenClassification,
        "pair": transformers.AutoModelForSeq2SeqLM,
    }[task]
    extra = {**DECODERS, **ENCODERS, **PAIRS}[kind] | more
    torch.manual_seed(0)
    model = head.from_config(config(kind, extra, layers=layers, num_labels=3))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.double()


def samples(count: int, task: str, *, seed: int = 0, longest: int = WIDTH) -> list[dict[str, Any]]:
    """Ragged samples."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(3, longest + 1, (), generator=generator))
        ids = torch.randint(5, VOCABULARY, (length,), generator=generator)
        made.append({"input_ids": ids, "labels": LABELS[task](ids, generator)})
    return made


def _masked(ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    chosen = torch.rand(ids.shape, generator=generator) < 0.3
    chosen[0] = True
    return torch.where(chosen, ids, -100)


def _class(ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 3, (), generator=generator)


def _target(ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    length = int(torch.randint(2, 13, (), generator=generator))
    return torch.randint(5, VOCABULARY, (length,), generator=generator)


LABELS: dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    "causal": lambda ids, generator: ids.clone(),
    "masked": _masked,
    "tokens": lambda ids, generator: ids % 3,
    "class": _class,
    "pair": _target,
}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads to the longest of the batch, on the right."""
    batch = {
        "input_ids": _padded([row["input_ids"] for row in rows], 0),
        "attention_mask": _padded([torch.ones_like(row["input_ids"]) for row in rows], 0),
    }
    labels = [row["labels"] for row in rows]
    batch["labels"] = _padded(labels, -100) if labels[0].dim() else torch.stack(labels)
    return batch


def _padded(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def on_the_left(made: dict[str, Any]) -> dict[str, Any]:
    """A batch padded on the right, padded on the left."""
    for row, length in enumerate(made["attention_mask"].sum(1).tolist()):
        for name in made:
            if made[name].dim() > 1:
                made[name][row] = made[name][row].roll(-length)
    return made


class WithFeatures(nn.Module):
    """Classifies by its tokens and by twelve numbers of each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.albert = build("albert", "class").albert
        self.config, self.head = self.albert.config, nn.Linear(32 + 12, 3).double()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, features: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        first = self.albert(input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
        return {
            "loss": nn.functional.cross_entropy(self.head(torch.cat([first, features.to(first.dtype)], -1)), labels)
        }
