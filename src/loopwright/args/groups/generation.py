"""Generating text during evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..field import Group, arg, configuration, positive


@dataclass
class GenerationArgs(Group):
    """Generating text during evaluation."""

    title = "Generation"

    sortish_sampler: bool = arg(False, "Batch samples of similar length together, with some randomness.")
    predict_with_generate: bool = arg(False, "Generate text in evaluation and prediction.")
    generation_max_length: int | None = arg(
        None, "Maximum length of generated sequences; defaults to the model's own.", check=positive
    )
    generation_num_beams: int | None = arg(None, "Number of beams; defaults to the model's own.", check=positive)
    generation_config: Path | str | Any | None = arg(
        None, "A GenerationConfig, or the name or path of one.", as_given=True, check=configuration
    )
