"""Masked language modelling: predicting tokens that were masked."""

from __future__ import annotations

from dataclasses import dataclass

from ..args.field import Group, arg, between
from ..errors import ModelError
from .declaration import Materials, Task
from .language import METRICS, CorpusData, read_blocks, token_metrics
from .request import Request


@dataclass
class MaskFields(Group):
    """Options of masking."""

    title = "data"

    mask_probability: float = arg(0.15, "Fraction of the tokens that are masked.", check=between(0, 1, below=True))


@dataclass
class MaskedData(MaskFields, CorpusData):
    """The block `data` of masked language modelling."""


def build(request: Request) -> Materials:
    """Model and data of masked language modelling."""
    from ..pt.data.collators import DataCollatorForLanguageModeling
    from .model.models import load_model, load_tokenizer

    data: MaskedData = request.data
    tokenizer = load_tokenizer(request)
    if tokenizer.mask_token is None:
        raise ModelError(f"{request.place('model.name')}: its tokenizer has no mask token; use the task causal-lm")
    notes: list[str] = []
    train, held = read_blocks(request, tokenizer, notes)
    return Materials(
        model=load_model(request, "AutoModelForMaskedLM"),
        train_dataset=train,
        eval_dataset=held,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=data.mask_probability),
        notes=notes,
        **token_metrics(request.metrics, shift=False),
    )


TASK = Task(
    name="masked-lm",
    help="train a masked language model on texts",
    data=MaskedData,
    metrics=METRICS,
    default_metrics=("perplexity", "token_accuracy"),
    build=build,
    example={
        "model": "distilbert/distilbert-base-uncased",
        "data": {"train": "train.txt", "validation_share": 0.05, "max_length": 256},
    },
)
