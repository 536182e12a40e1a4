"""Tiny models of every row in transformers' conversion table, built from default configurations made small."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
conversion_mapping = pytest.importorskip("transformers.conversion_mapping")

VOCAB, IMAGE = 64, 32
SMALL = {
    **dict.fromkeys(["hidden_size", "d_model", "dim", "embed_dim", "embedding_dim", "n_embd", "width", "projection_dim",
                     "encoder_hidden_dim", "feature_size", "fusion_hidden_size", "mask_feature_size",
                     "decoder_hidden_size", "text_hidden_size", "vision_hidden_size", "out_hidden_size"], 32),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "dim_feedforward", "d_inner",
                     "mlp_dim", "ffn_hidden_size", "dense_intermediate_size", "feedforward_dim",
                     "decoder_intermediate_size"], 48),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
                     "moe_shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "index_head_dim"], 16),
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
                     "depth", "num_encoder_layers", "num_decoder_layers", "decoder_num_hidden_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "n_heads",
                     "decoder_attention_heads", "decoder_num_attention_heads", "index_n_heads"], 4),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_key_value_heads", "n_group", "moe_k"], 2),
    **dict.fromkeys(["topk_group", "n_shared_experts", "first_k_dense_replace"], 1),
    **dict.fromkeys(["head_dim", "v_head_dim", "qk_nope_head_dim"], 8),
    **dict.fromkeys(["vocab_size", "max_position_embeddings", "original_max_position_embeddings",
                     "vocab_size_per_layer_input"], VOCAB),
    "qk_rope_head_dim": 4, "qk_head_dim": 12, "image_size": IMAGE, "patch_size": 8, "num_queries": 6,
    "num_nextn_predict_layers": 0, "index_topk": 4, "mamba_num_heads": 4, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "hidden_size_per_layer_input": 8,
}  # fmt: skip
"""Sizes by the names configurations give them; what is smaller already stays."""

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HEAD = {"upsample_out_channels": [8, 8], "upsample_kernel_sizes": [4, 4], "conv_out_channels": [8],
        "conv_kernel_sizes": [1], "scale_conv_out_channels": [8, 8], "scale_conv_kernel_sizes": [1, 1],
        "scale_final_input_size": 32, "scale_final_hidden_sizes": [8, 8]}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "esm": {"vocab_size": VOCAB, "pad_token_id": 1},
    "swin": {"embed_dim": 24, "image_size": 64, "window_size": 2, "depths": [1, 1, 1, 1]},
    "yolos": {"image_size": [IMAGE, IMAGE]},
    "cosmos3_edge": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}},
    **dict.fromkeys(["qwen2_vl_text", "qwen2_5_vl_text", "paddleocr_vl_text"],
                    {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}}),
    "paligemma": {"text_config": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}},
    "NemotronH_Omni_Reasoning_V3": {"vision_config": {"video_temporal_patch_size": 2}},
    "hunyuan_vl": {"text_config": {"head_dim": 8}},
    "hunyuan_v1_moe": {"head_dim": 8},
    "BeitForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "lw_detr": {"backbone_config": {"num_windows": 4}},
    "glm5_next": {"text_config": {"num_key_value_heads": 4, "index_kpool": 4}},
    "glm5_next_text": {"num_key_value_heads": 4, "index_kpool": 4},
    "mimi": {"upsample_groups": 32},
    "mimi_decoder": {"upsample_groups": 32},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [16, 16], "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}}
    },
    "maskformer": {"backbone_config": {"embed_dim": 24}},
    "d_fine": {"backbone_config": {"out_features": ["stage2", "stage3", "stage4"]}},
    "sapiens2": {"head_config": HEAD, "num_key_value_heads_per_layer": [4, 4]},
    "detr": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "conditional_detr": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": 32}, "num_key_value_heads": 4},
    "nemo_speechlm": {"audio_config": {"head_config": {"audio_hidden_size": 32}}},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0, "num_hidden_layers": 6},
}
"""What default configurations lack, or what must fit together, by row or by model type."""

AUTOS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ",
         "OBJECT_DETECTION", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "PRETRAINING", "UNIVERSAL_SEGMENTATION",
         "BACKBONE")  # fmt: skip


def rows() -> list[str]:
    """Model types and class names of the table."""
    table = conversion_mapping._build_checkpoint_conversion_mapping()
    return [name for name in table if name != "legacy"]


def class_of(row: str) -> type[Any] | None:
    """The class of models a row of the table is for, one with a head where there is one."""
    if row not in transformers.CONFIG_MAPPING:
        return _class_named(row)
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    tables = [getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}) for kind in AUTOS] + [auto.MODEL_MAPPING_NAMES]
    for table in tables:
        named = table.get(row)
        for name in named if isinstance(named, (list, tuple)) else [named]:
            found = getattr(transformers, name, None) if name else None
            if found is not None and found.config_class is transformers.CONFIG_MAPPING[row]:
                return found
    return None


def _class_named(name: str) -> type[Any] | None:
    if hasattr(transformers, name):
        return getattr(transformers, name)
    root = Path(transformers.__file__).parent
    for path in root.glob("models/*/modeling_*.py"):
        if re.search(rf"^class {name}\(", path.read_text(), re.M):
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            return getattr(importlib.import_module(f"transformers.{module}"), name)
    return None


def config_of(row: str, kind: type[Any]) -> Any:
    """A small configuration; what transformers derives from sizes is derived from the small ones."""
    made = transformers.CONFIG_MAPPING[row] if row in transformers.CONFIG_MAPPING else kind.config_class
    return _small(made(), {**OPTIONS.get(made.model_type, {}), **OPTIONS.get(row, {})})


def _small(config: Any, given: dict[str, Any]) -> Any:
    if config.model_type == "timm_backbone":
        return transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1],
                                         out_features=["stage2", "stage3", "stage4"])  # fmt: skip
    options: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            nested = {**OPTIONS.get(value.model_type, {}), **given.get(name, {})}
            options[name] = _small(value, nested)
        elif name in SMALL and type(value) is int and value > SMALL[name]:
            options[name] = SMALL[name]
        elif name.endswith(("_token_id", "_token_index")) and type(value) is int and value >= VOCAB:
            options[name] = 3
    options.update(_fitting(vars(config)))
    options.update({name: value for name, value in given.items() if name not in options or type(value) is not dict})
    return type(config)(**options)


def _fitting(values: dict[str, Any]) -> dict[str, Any]:
    """Sizes that depend on each other."""
    fitting: dict[str, Any] = {}
    if "kv_lora_rank" in values and type(values.get("num_key_value_heads")) is int:  # latent attention has no groups
        fitting["num_key_value_heads"] = SMALL["num_attention_heads"]
    if "qk_rope_head_dim" in values and "head_dim" in values:
        fitting["head_dim"] = SMALL["qk_rope_head_dim"]
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        fitting["rope_parameters"] = {**rope, "mrope_section": [1, 1, 2]}
    if "use_cache" in values:
        fitting["use_cache"] = False
    return fitting


def model_of(row: str, *, most: int = 60_000_000) -> Any:
    """A small model of a row, always with the same weights."""
    kind = class_of(row)
    if kind is None:
        raise LookupError("transformers has no class for it")
    config = config_of(row, kind)
    with torch.device("meta"):
        size = sum(each.numel() for each in kind(config).parameters())
    if size > most:
        raise LookupError(f"{size / 1e6:,.0f} million parameters however small its configuration")
    torch.manual_seed(0)
    return kind(config_of(row, kind)).float()


# ---- inputs ----------------------------------------------------------------------------------------------------------


def candidates(model: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs a model may take, of one sample each."""
    wanted = inspect.signature(model.forward).parameters
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(8, VOCAB, (8,), generator=g)
    if "decoder_input_ids" in wanted and "input_ids" in wanted:
        yield {"input_ids": ids, "decoder_input_ids": ids}
    if "input_ids" in wanted:
        yield {"input_ids": ids}
        yield {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": torch.ones_like(ids)}
    if "pixel_values" in wanted:
        config = getattr(model.config, "vision_config", None) or model.config
        size = getattr(config, "image_size", IMAGE)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(config, "num_channels", 3)
        frames = getattr(config, "num_frames", 2)
        for h, w in ((height, width), (64, 64)):
            yield {"pixel_values": torch.randn(channels, h, w, generator=g)}
            yield {"pixel_values": torch.randn(frames, channels, h, w, generator=g)}
            yield {"input_ids": ids, "pixel_values": torch.randn(channels, h, w, generator=g)}
    for name in ("input_values", "input_features"):
        if name in wanted:
            bins = getattr(model.config, "num_mel_bins", 80)
            for shape in ((bins, 64), (64, bins), (1, 640), (640,)):
                yield {name: torch.randn(*shape, generator=g)}


def floats(output: Any) -> list[Tensor]:
    """Every floating-point tensor in what a model returns."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = list(output.values())
    return [each for part in output for each in floats(part)] if isinstance(output, (list, tuple)) else []


def sample_for(model: nn.Module) -> dict[str, Tensor] | None:
    """A sample the model takes and learns from, or None if none of the usual ones is."""
    for sample in candidates(model):
        try:
            batch = {name: torch.stack([value] * 2) for name, value in sample.items()}
            outputs = floats(model(**batch))
            loss = sum(each.square().mean() for each in outputs)
            loss.backward()  # type: ignore[union-attr]
        except Exception:
            continue
        finite = bool(torch.isfinite(loss.detach()))  # type: ignore[union-attr]
        gradients = [each.grad for each in model.parameters() if each.grad is not None and each.numel()]
        steepest = max(float(each.abs().max()) for each in gradients)
        model.zero_grad()
        if finite and steepest > 1e-3:
            return sample
    return None
