"""The blocks of a configuration that all tasks have: model, data, lora."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..args.field import Group, arg, between, list_of_names, names_or_pattern, one_of, options, positive


def sources(value: Any) -> str | None:
    """A text, or a mapping of names to texts."""
    texts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else [value]
    if texts and all(isinstance(text, str) and text for text in texts):
        return None
    return "must be a file, a folder or a name, or a mapping of names to them; put texts in quotes"


@dataclass
class ModelFields(Group):
    """The block `model`."""

    title = "model"

    name: str | None = arg(
        None, "A folder, a name on the Hugging Face Hub, or an import path: file.py:function, package.module:Class."
    )
    tokenizer: str | None = arg(None, "Folder or name of the tokenizer or processor; defaults to that of the model.")
    from_scratch: bool = arg(False, "Random weights with the model's configuration, instead of its trained weights.")
    dtype: str = arg(
        "float32",
        "The dtype of the weights.",
        choices=("float32", "bfloat16", "float16"),
    )
    options: dict[str, Any] | None = arg(
        None, "Values for the model's configuration, or keyword arguments of an import path.", check=options
    )


@dataclass
class DataFields(Group):
    """The part of the block `data` that all tasks have."""

    title = "data"

    train: str | Mapping[str, str] | None = arg(
        None,
        "Training data: a file, a folder, or the name of a dataset for `datasets`; several by name are mixed.",
        check=sources,
    )
    validation: str | None = arg(None, "Validation data: a file, a folder or the name of a dataset.", check=sources)
    validation_share: float | None = arg(
        None,
        "Fraction of the training data that is held out for validation, chosen by the seed.",
        check=between(0, 1, below=True),
    )
    train_split: str = arg("train", "The split to train on, for a dataset of `datasets`.")
    validation_split: str = arg("validation", "The split to validate on, for a dataset of `datasets`.")
    subset: str | None = arg(None, "The configuration of a dataset of `datasets`.")
    max_train_samples: int | None = arg(
        None,
        "Use only this many training samples, the first ones; of several sources, of each; of images, of the classes "
        "in turn.",
        check=positive,
    )
    max_validation_samples: int | None = arg(
        None, "Use only this many validation samples, chosen in the same way.", check=positive
    )


@dataclass
class LoraFields(Group):
    """The block `lora`: train an adapter through PEFT instead of all weights."""

    title = "lora"

    r: int = arg(16, "Rank of the adapter's matrices.", check=positive)
    alpha: float = arg(32, "Scale of the adapter: alpha / r.", check=positive)
    dropout: float = arg(0.0, "Dropout on the adapter's input.", check=between(0, 1, below=True))
    target_modules: str | list[str] | None = arg(
        None,
        "Names of the modules that get an adapter, or 'all-linear'; defaults to those PEFT has for the model.",
        check=names_or_pattern,
    )
    modules_to_save: list[str] | None = arg(
        None, "Names of modules that are trained and saved in full.", check=list_of_names
    )
    bias: str = arg("none", "Which biases are trained.", choices=("none", "all", "lora_only"))
    dora: bool = arg(False, "Weight-decomposed adapters (DoRA).")
    rslora: bool = arg(False, "Scale by alpha / sqrt(r) (rank-stabilized LoRA).")
    quantization: str | None = arg(
        None, "Load the frozen weights in 4 bits through bitsandbytes (QLoRA): nf4 or fp4.", check=one_of("nf4", "fp4")
    )


@dataclass
class LengthFields(Group):
    """The length of tokenized samples."""

    title = "data"

    max_length: int = arg(512, "Tokens of a sample; longer ones are truncated.", check=positive)
