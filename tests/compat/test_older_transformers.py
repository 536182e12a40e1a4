"""transformers 4.57: the same numbers in an environment that has it, and its arguments in any.

Set LOOPWRIGHT_TRANSFORMERS_4 to the Python of an environment with transformers 4.57, adapters, span-marker and gliner,
which do not work with the newest transformers: adapters requires 4.57; span-marker requires a version below 5 (with 5.x
its configuration has no labels, so no model can be made); gliner requires one below 5.17.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

import loopwright

from .running import compare, results_of

PYTHON = os.environ.get("LOOPWRIGHT_TRANSFORMERS_4", "")
GONE = (
    "adafactor", "fp16_backend", "fp16_opt_level", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap",
    "group_by_length", "half_precision_backend", "include_inputs_for_metrics", "include_tokens_per_second",
    "jit_mode_eval", "logging_dir", "mp_parameters", "no_cuda", "overwrite_output_dir", "past_index",
    "per_gpu_eval_batch_size", "per_gpu_train_batch_size", "push_to_hub_model_id", "push_to_hub_organization",
    "push_to_hub_token", "ray_scope", "save_safetensors", "torchdynamo", "tpu_metrics_debug", "tpu_num_cores",
    "use_legacy_prediction_loop", "use_mps_device", "warmup_ratio",
)  # fmt: skip
"""Arguments of 4.57.6 that 5.x has removed."""
RUNS = {
    "recipes": ("adapters", "span_marker", "gliner"),
    "scripts": ("token_classification", "translation", "image_classification"),
    "patterns": ("weighted_loss", "early_stopping", "several_evaluation_sets", "flags_of_a_command_line", "resume"),
}
ROUNDED = 2e-4
"""4.57 rounds the losses it logs to four digits."""


def test_arguments_of_4_57_are_known() -> None:
    assert {*GONE} <= {each.name for each in fields(loopwright.Seq2SeqTrainingArguments)}


@pytest.mark.skipif(not PYTHON, reason="LOOPWRIGHT_TRANSFORMERS_4 names no Python with transformers 4.57")
@pytest.mark.parametrize("module", RUNS)
def test_the_same_numbers_on_4_57(module: str, tmp_path: Path) -> None:
    command = [PYTHON, "-c", "import transformers; print(transformers.__version__)"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("4.57")
    results = results_of({module: RUNS[module]}, tmp_path, python=PYTHON)
    for name in RUNS[module]:
        compare(name, results, rel=ROUNDED)
