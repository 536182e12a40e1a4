"""Fine-tuning on conversations: only the assistant's words are trained."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..args.field import Group, arg
from ..args.problems import short
from ..errors import ArgumentsError, DataError, ModelError
from .data.readers import Rows, each_source, missing_file, need_column, read_splits
from .declaration import Materials, Task
from .fields import DataFields, LengthFields
from .language import METRICS, token_metrics
from .request import Request


@dataclass
class ChatColumns(Group):
    """Columns of conversations."""

    title = "data"

    messages_column: str = arg("messages", "The column with the list of messages, each with `role` and `content`.")
    tools_column: str | None = arg(None, "The column with the tools of a conversation, passed to the chat template.")
    chat_template: str | None = arg(None, "A file with a Jinja template, instead of that of the tokenizer.")


@dataclass
class ChatData(LengthFields, ChatColumns, DataFields):
    """The block `data` of conversations."""


def build(request: Request) -> Materials:
    """Model and data of a chat model."""
    from ..pt.data.collators import DataCollatorForSeq2Seq
    from .model.models import load_causal_model, load_tokenizer

    tokenizer = load_tokenizer(request)
    _set_template(tokenizer, request)
    train, held = read_splits(request)
    notes: list[str] = []
    samples = each_source(train, lambda rows: _encoded(rows, tokenizer, request, notes))
    return Materials(
        model=load_causal_model(request),
        train_dataset=samples,
        eval_dataset=None if held is None else _encoded(held, tokenizer, request, notes),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100),
        notes=notes,
        sample=partial(_first_sample, train, tokenizer, request),
        **token_metrics(request.metrics, shift=True),
    )


def _set_template(tokenizer: Any, request: Request) -> None:
    file = request.data.chat_template
    if file is not None:
        place = request.place("data.chat_template")
        if not Path(file).is_file():
            raise missing_file(place, file)
        try:
            tokenizer.chat_template = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ArgumentsError(f"{place}: {file} is not UTF-8 text; save it as UTF-8") from None
    if not tokenizer.chat_template:
        raise ModelError(
            f"{request.place('model.name')}: its tokenizer has no chat template; set data.chat_template to a file "
            "with one"
        )
    if not tokenizer.is_fast:
        raise ModelError(f"{request.place('model.name')}: its tokenizer has no offsets of tokens; use a fast one")


def _encoded(rows: Rows, tokenizer: Any, request: Request, notes: list[str]) -> list[dict[str, Any]]:
    """The conversations as tokens with labels; those without a trained token are left out and counted."""
    need_column(rows, request.data.messages_column, "data.messages_column", request)
    samples, without, split = [], 0, 0
    hidden: Counter[str] = Counter()
    for index in range(len(rows)):
        found = _mask(rows, index, tokenizer, request)
        split += found.split
        hidden.update(found.hidden)
        if found.trained:
            samples.append(
                {"input_ids": found.input_ids, "attention_mask": [1] * len(found.input_ids), "labels": found.labels}
            )
        else:
            without += 1
    if not samples:
        messages = [message for row in rows for message in row[request.data.messages_column]]
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise DataError(
            f"{rows.name}: none of its {len(rows)} conversations has a trained token within max_length="
            f"{request.data.max_length}; raise data.max_length, or check the roles of the messages ({roles}): the "
            "answers of 'assistant' are trained"
        )
    if without:
        notes.append(
            f"{rows.name}: {without} of {len(rows)} conversations have no trained token within max_length="
            f"{request.data.max_length} and are left out"
        )
    for role, count in hidden.items():
        notes.append(
            f"{rows.name}: in {count} of {len(rows)} conversations the chat template leaves out or changes the text of "
            f"a message of the role {role!r}; see a sample with `loopwright check`, or set data.chat_template"
        )
    if split:
        notes.append(
            f"{rows.name}: {split} tokens hold characters of an answer and of the text around it, and are not trained; "
            "end the generation prompt of the chat template with a special token or a line break"
        )
    return samples


def _mask(rows: Rows, index: int, tokenizer: Any, request: Request) -> Any:
    from .chat_mask import TemplateError, masked

    data: ChatData = request.data
    row = rows[index]
    messages = row[data.messages_column]
    _check_messages(messages, rows, index)
    messages = [_without_missing(message) for message in messages]
    tools = row.get(data.tools_column) if data.tools_column is not None else None
    if data.tools_column is not None and data.tools_column not in row:
        need_column(rows, data.tools_column, "data.tools_column", request)

    def render(part: list[dict[str, Any]], prompt: bool) -> str:
        return str(tokenizer.apply_chat_template(part, tools=tools, tokenize=False, add_generation_prompt=prompt))

    try:
        return masked(messages, render, tokenizer, data.max_length)
    except TemplateError as error:
        raise TemplateError(f"{rows.row(index)}: {error}") from None


def _check_messages(messages: Any, rows: Rows, index: int) -> None:
    place = f"{rows.row(index)}"
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{place}: the messages are {short(messages)}; write a list of objects with role and content")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{place}: message {number} is {short(message)}; it needs a role and a content")
        if message.get("content") is None and not message.get("tool_calls"):
            raise DataError(f"{place}: message {number} ({message['role']}) has neither content nor tool_calls")
        if not isinstance(message.get("content"), str | list | None):
            raise DataError(
                f"{place}: message {number} ({message['role']}) has the content {short(message['content'])}, which is "
                "not text; put it in quotes"
            )
        if message.get("weight") not in (None, 0, 1):
            raise DataError(
                f"{place}: message {number} ({message['role']}) has the weight {short(message['weight'])}; it must be "
                "1, or 0 for an answer that is not trained"
            )


def _without_missing(message: dict[str, Any]) -> dict[str, Any]:
    """A message without keys that have no value: Parquet adds them, and templates test only whether a key exists."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _first_sample(rows: Rows, tokenizer: Any, request: Request) -> list[tuple[str, bool]]:
    """The first conversation that is trained."""
    found = (_mask(rows, index, tokenizer, request) for index in range(len(rows)))
    pieces: list[tuple[str, bool]] = next(each for each in found if each.trained).pieces()
    return pieces


TASK = Task(
    name="chat",
    help="fine-tune a chat model on conversations; only the assistant's words are trained",
    data=ChatData,
    metrics=METRICS,
    default_metrics=("perplexity", "token_accuracy"),
    build=build,
    example={
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "data": {"train": "train.jsonl", "validation_share": 0.05, "messages_column": "messages", "max_length": 1024},
        "lora": {"r": 16, "alpha": 32, "target_modules": "all-linear"},
    },
)
