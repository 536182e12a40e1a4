"""Causal language modelling: predicting the next token."""

from __future__ import annotations

from .declaration import Materials, Task
from .language import METRICS, CorpusData, read_blocks, token_metrics
from .request import Request


def build(request: Request) -> Materials:
    """Model and data of causal language modelling."""
    from ..pt.data.collators import DataCollatorForSeq2Seq
    from .model.models import load_causal_model, load_tokenizer

    tokenizer = load_tokenizer(request)
    notes: list[str] = []
    train, held = read_blocks(request, tokenizer, notes, fewest=2, with_labels=True)
    return Materials(
        model=load_causal_model(request),
        train_dataset=train,
        eval_dataset=held,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100),
        notes=notes,
        **token_metrics(request.metrics, shift=True),
    )


TASK = Task(
    name="causal-lm",
    help="train a language model on texts",
    data=CorpusData,
    metrics=METRICS,
    default_metrics=("perplexity", "token_accuracy"),
    build=build,
    example={
        "model": "HuggingFaceTB/SmolLM2-135M",
        "data": {"train": "train.txt", "validation_share": 0.05, "max_length": 512},
    },
)
