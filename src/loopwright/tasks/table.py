"""The tasks by name."""

from __future__ import annotations

from . import (
    causal_lm,
    chat,
    image_classification,
    masked_lm,
    question_answering,
    seq2seq,
    speech_to_text,
    tables,
    text_classification,
    token_classification,
)
from .declaration import Task

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        text_classification.TASK,
        token_classification.TASK,
        causal_lm.TASK,
        chat.TASK,
        seq2seq.TASK,
        masked_lm.TASK,
        question_answering.TASK,
        image_classification.TASK,
        speech_to_text.TASK,
        tables.REGRESSION,
        tables.CLASSIFICATION,
    )
}
