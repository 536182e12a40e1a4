"""Tiny models with windows and chunks in their masks, and rows of documents for them without any proof."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from loopwright.speed.layouts.candidates import make_layout
from loopwright.speed.layouts.rows import Limits
from loopwright.speed.layouts.samples import take_apart
from loopwright.speed.planner.decision import COLLATED, FLAT, GROUPED, UNMASKED
from tests.speed.architectures import GQA, NO_DROPOUT, SIZES, collate

WINDOW = 5
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1, "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 48,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention"]


def made(kind: str, task: str = "causal", **extra: Any) -> nn.Module:
    """A tiny model in double precision, its weights large enough that a wrong mask shows."""
    import transformers

    configured = transformers.AutoConfig.for_model(kind)
    values = {**SIZES, **NO_DROPOUT, **GQA, "head_dim": 8}
    chosen = {name: value for name, value in values.items() if name == "vocab_size" or hasattr(configured, name)}
    config = transformers.AutoConfig.for_model(kind, **{**chosen, **extra})
    config._experts_implementation = "eager"  # grouped matmuls have no float64
    head = {"causal": "CausalLM", "masked": "MaskedLM", "class": "SequenceClassification"}[task]
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model if kind == "gemma2" else model.double()  # its mask overflows its softmax in double precision


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama4": partial(made, "llama4_text", **EXPERTS, attention_chunk_size=WINDOW, attn_temperature_tuning=False,
                      layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0]),
    "llama4 with temperature": partial(made, "llama4_text", **EXPERTS, attention_chunk_size=WINDOW, floor_scale=8,
                                       attn_temperature_tuning=True, no_rope_layers=[1, 0],
                                       layer_types=["chunked_attention", "full_attention"]),
    "qwen2_moe": partial(made, "qwen2_moe", **EXPERTS, sliding_window=WINDOW, use_sliding_window=True,
                         max_window_layers=1),
    "qwen2_moe by layers": partial(made, "qwen2_moe", **EXPERTS, sliding_window=WINDOW, use_sliding_window=True,
                                   layer_types=MIXED),
    "qwen2": partial(made, "qwen2", sliding_window=WINDOW, use_sliding_window=True, layer_types=MIXED),
    "qwen3": partial(made, "qwen3", sliding_window=WINDOW, use_sliding_window=True, layer_types=MIXED),
    "mistral": partial(made, "mistral", sliding_window=WINDOW),
    "mixtral": partial(made, "mixtral", **EXPERTS, sliding_window=WINDOW),
    "starcoder2": partial(made, "starcoder2", sliding_window=WINDOW),
    "phi3 with a window": partial(made, "phi3", sliding_window=WINDOW),
    "gemma2": partial(made, "gemma2", sliding_window=WINDOW, query_pre_attn_scalar=8, layer_types=MIXED),
    "gemma3": partial(made, "gemma3_text", sliding_window=WINDOW, query_pre_attn_scalar=8, layer_types=MIXED),
    "gemma3, seen from both sides": partial(made, "gemma3_text", sliding_window=WINDOW, query_pre_attn_scalar=8,
                                            layer_types=MIXED, use_bidirectional_attention=True),
    "gpt_oss": partial(made, "gpt_oss", **EXPERTS, sliding_window=WINDOW, layer_types=MIXED),
    "cohere2": partial(made, "cohere2", sliding_window=WINDOW, layer_types=MIXED),
    "exaone4": partial(made, "exaone4", sliding_window=WINDOW, layer_types=MIXED),
    "smollm3": partial(made, "smollm3", sliding_window=WINDOW, use_sliding_window=True, layer_types=MIXED,
                       no_rope_layers=[1, 0]),
    "olmo3": partial(made, "olmo3", sliding_window=WINDOW, layer_types=MIXED),
    "ministral": partial(made, "ministral", sliding_window=WINDOW, layer_types=MIXED),
    "modernbert": partial(made, "modernbert", "masked", local_attention=2 * WINDOW, global_attn_every_n_layers=2),
    "modernbert by class": partial(made, "modernbert", "class", local_attention=2 * WINDOW,
                                   global_attn_every_n_layers=2, num_labels=3),
    "LongRoPE": partial(made, "phi3", max_position_embeddings=64, original_max_position_embeddings=16,
                        rope_parameters=LONGROPE),
    "dynamic NTK": partial(made, "llama", max_position_embeddings=16,
                           rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
}  # fmt: skip
FLAT_OF = {
    **dict.fromkeys(MODELS, (FLAT,)),
    "llama4 with temperature": (UNMASKED, GROUPED),
    "gpt_oss": (UNMASKED, GROUPED),  # has sinks
    "gemma3, seen from both sides": (FLAT, GROUPED),
    "modernbert by class": (GROUPED,),
    "LongRoPE": (COLLATED,),
    "dynamic NTK": (COLLATED,),
}

AS_THEY_ARE: dict[str, Callable[[], nn.Module]] = {
    **{name: MODELS[name] for name, expected in FLAT_OF.items() if expected == (FLAT,)},
    # In training its router draws numbers.
    "phimoe": partial(made, "phimoe", **EXPERTS, sliding_window=WINDOW),
    "phimoe without a window": partial(made, "phimoe", **EXPERTS, sliding_window=None),
}


def rows_of(model: nn.Module, data: list[dict[str, Any]], **options: Any) -> Tensor:
    """The loss of samples in one row, attention switched over, without any proof."""
    layout = make_layout(FLAT, model)
    assert not isinstance(layout, str), layout
    taken = take_apart([collate(data)], is_pair=False)
    shifts = "CausalLM" in type(model).__name__
    laid = layout.lay(taken, Limits(budget=1 << 30, overhead=0), shifts=shifts, fill=options.get("fill", False))
    assert len(laid.batches) == 1
    here = next(model.parameters()).device
    batch = {name: value.to(here) if isinstance(value, Tensor) else value for name, value in laid.batches[0].items()}
    with layout.active():
        return model(**layout.for_model(batch)).loss
