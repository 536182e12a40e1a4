"""Which options of `generate` give a row the same tokens in another batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "num_return_sequences": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0,
    "guidance_scale": 1,
    "penalty_alpha": 0,
    "cache_implementation": "hybrid",  # a default of older models that transformers removes
}
"""Values without effect, of options that are refused otherwise; None and False have none for any option."""

SERVED = {
    *("max_new_tokens", "min_new_tokens", "num_beams", "length_penalty", "early_stopping", "use_cache", "low_memory"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
    *("renormalize_logits", "remove_invalid_values", "disable_compile", "transformers_version"),
    # without effect unless do_sample or an assistant is set, which are refused
    *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"),
}
"""Options under which the tokens of a row depend on its own prompt only."""

SERVED_WITH_ENCODER = {
    *("max_length", "min_length", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias"),
    *("exponential_decay_length_penalty", "is_multilingual", "language", "task", "lang_to_id", "task_to_id"),
    *("return_timestamps", "no_timestamps_token_id", "max_initial_timestamp_index", "prev_sot_token_id"),
    *("alignment_heads", "median_filter_width", "forced_decoder_ids"),
}
"""Options that read the decoder's tokens: of decoder-only models, these are the prompt and its padding as well."""


@dataclass(frozen=True)
class GenerationOptions:
    """The options of a call of `generate`, over those of the model."""

    values: dict[str, Any]

    @classmethod
    def of(cls, model: Any, given: Mapping[str, Any]) -> GenerationOptions:
        """Those that are set: of the model's configuration, of a configuration that is passed, and of the call."""
        values: dict[str, Any] = {}
        passed = {name: value for name, value in given.items() if name != "generation_config"}
        for source in (vars(model.generation_config), vars(given.get("generation_config") or object), passed):
            values.update((k, v) for k, v in source.items() if v is not None and not k.startswith("_"))
        return cls(values)

    def why_not(self, *, has_encoder: bool) -> str | None:
        """Why the tokens of a row may depend on the batch that it is in; None if they do not."""
        served = SERVED | SERVED_WITH_ENCODER if has_encoder else SERVED
        if not has_encoder and not self.values.get("max_new_tokens"):
            return "the number of new tokens depends on the batch's width; set generation_max_length or max_new_tokens"
        for name, value in self.values.items():
            if name in served or (name == "max_length" and not has_encoder):  # max_new_tokens takes precedence
                continue
            if value is False or (name in NEUTRAL and value == NEUTRAL[name]):
                continue
            return f"{name}={_short(value)} is set"
        return None

    @property
    def beams(self) -> int:
        return int(self.values.get("num_beams") or 1)

    @property
    def longest(self) -> int:
        """The largest number of new tokens."""
        return int(self.values.get("max_new_tokens") or self.values.get("max_length") or 20)

    @property
    def ends(self) -> list[int]:
        """The ids that end a row."""
        found = self.values.get("eos_token_id")
        return [] if found is None else [int(each) for each in (found if isinstance(found, (list, tuple)) else [found])]

    @property
    def filler(self) -> int:
        """The id that `generate` writes after the end of a row."""
        found = self.values.get("pad_token_id")
        return int(found) if found is not None else (self.ends or [0])[0]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
