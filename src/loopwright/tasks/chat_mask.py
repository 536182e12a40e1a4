"""Which tokens of a conversation are trained: the assistant's, found for any chat template.

Most templates do not mark the assistant's words. They are found by rendering: the conversation up to an answer with the
generation prompt, and up to and including the answer. What the second has in addition is what a model has to generate.
This is right only if both are prefixes of the whole conversation, which is checked for each answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import DataError, first_line

Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]
"""Renders messages, with the generation prompt or without."""
Span = tuple[int, int]

IGNORED = -100
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which data have what an assistant thought."""


class TemplateError(DataError):
    """A chat template with which the assistant's words cannot be found."""


@dataclass(frozen=True)
class Masked:
    """A conversation as tokens, with labels for the assistant's."""

    input_ids: list[int]
    labels: list[int]
    offsets: list[Span]
    text: str
    split: int
    """Tokens that are partly inside an answer and partly outside; they are not trained."""
    hidden: tuple[str, ...] = ()
    """The roles of messages whose text is not in the rendered conversation."""

    @property
    def trained(self) -> int:
        """The number of trained tokens; the first token of a sample is never a target."""
        return sum(label != IGNORED for label in self.labels[1:])

    def pieces(self) -> list[tuple[str, bool]]:
        """The text in pieces, each with whether it is trained."""
        found: list[tuple[str, bool]] = []
        position = 0
        for (start, end), label in zip(self.offsets, self.labels, strict=True):
            begin = max(position, start)
            if begin > position:
                found.append((self.text[position:begin], False))
            if end > begin:
                found.append((self.text[begin:end], label != IGNORED))
                position = end
        return found + ([(self.text[position:], False)] if position < len(self.text) else [])


def answer_spans(messages: Sequence[Message], render: Render, ends: Sequence[str] = ()) -> tuple[str, list[Span]]:
    """The rendered conversation, and where each answer of the assistant is in it.

    `ends` are special tokens: white space after one that ends an answer is not generated, so it is not part of it.
    """
    whole = _rendered(render, list(messages), len(messages) - 1, prompt=False)
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        with_answer = _rendered(render, list(messages[: index + 1]), index, prompt=False)
        _check_prefix(with_answer, whole, index, "the conversation up to message {} is not a prefix of the whole one")
        if index:
            before = _rendered(render, list(messages[:index]), index, prompt=True)
        else:
            before = _first_prompt(message, with_answer, render)
        _check_prefix(
            before, with_answer, index, "the generation prompt before message {} is not a prefix of the text with it"
        )
        _check_answer(message, with_answer[len(before) :], index)
        if message.get("weight") != 0:
            spans.append((len(before), _end_of(with_answer, len(before), ends)))
    return whole, spans


def _first_prompt(message: Message, text: str, render: Render) -> str:
    """The text before an answer that is the first message: what the template writes without any message.

    A template may need a message; then it is what the answer's text has in common with that of another answer.
    """
    with suppress(Exception):  # a template may raise anything
        prompt = render([], True)
        if text.startswith(prompt):
            return prompt
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        raise TemplateError(
            "the conversation begins with an answer, and the chat template does not show where it begins; put a "
            "message of the user first"
        )
    other = "b" if content.lstrip().startswith("a") else "a"
    return os.path.commonprefix([text, _rendered(render, [{**message, "content": other}], 0, prompt=False)])


def _check_answer(message: Message, text: str, index: int) -> None:
    """Raise if the template leaves out the content or the calls of an answer, or writes None for a missing content."""
    what = f"message {index + 1} (assistant)"
    calls = [str(_name_of(call)) for call in message.get("tool_calls") or ()]
    if not text and (message.get("content") or calls):
        problem = f"the chat template leaves out {what}, so there is nothing to train"
        raise TemplateError(f"{problem}. Set data.chat_template to a template that renders answers")
    missing = next((name for name in calls if name not in text), None)
    if missing is not None:
        problem = f"the chat template leaves out the call of {missing!r} in {what}"
        raise TemplateError(f"{problem}; set data.chat_template to a template that renders tool_calls")
    if message.get("content") is None and "None" in text and "None" not in str(message.get("tool_calls")):
        raise TemplateError(
            f"the chat template writes 'None' for the missing content of {what}; set it to an empty text"
        )


def _name_of(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, dict) else call
    return function.get("name", "") if isinstance(function, dict) else ""


def _check_parts(messages: Sequence[Message], text: str) -> None:
    """Raise if a content with several parts was rendered as a Python object: the template expects a text."""
    for number, message in enumerate(messages, start=1):
        content = message.get("content")
        if isinstance(content, list) and content and str(content) in text:
            raise TemplateError(
                f"the chat template takes the content of message {number} ({message.get('role')}) for a text, but it "
                "is a list; write it as a text, or set data.chat_template to a template for lists"
            )


def _hidden(messages: Sequence[Message], text: str) -> tuple[str, ...]:
    """The roles of messages that the template does not render as they are written."""
    shown = ("system", "user", "assistant")  # results of tools may be rendered in another form
    return tuple(
        dict.fromkeys(
            message["role"]
            for message in messages
            if message.get("role") in shown
            for key in ("content", *REASONING)
            if isinstance(message.get(key), str) and message[key].strip() not in text
        )
    )


def _rendered(render: Render, messages: list[Message], index: int, *, prompt: bool) -> str:
    if not messages:
        return ""
    try:
        return render(messages, prompt)
    except Exception as error:  # a template may raise anything; its message is shown
        raise TemplateError(
            f"the chat template cannot render the conversation up to message {index + 1} ({first_line(error)}); "
            "correct the conversation, or set data.chat_template to another template"
        ) from None


def _check_prefix(prefix: str, text: str, index: int, problem: str) -> None:
    if text.startswith(prefix):
        return
    common = len(os.path.commonprefix([prefix, text]))
    near, other = prefix[common : common + 20], text[common : common + 20]
    raise TemplateError(
        f"the chat template cannot be used for training: {problem.format(index + 1)} (they differ at character "
        f"{common + 1}: {near!r} and {other!r}). Set data.chat_template to a template that renders messages in order"
    )


def _end_of(text: str, start: int, ends: Sequence[str]) -> int:
    """The end of an answer, without white space after a special token that ends it."""
    stripped = text.rstrip()
    is_ended = any(stripped.endswith(end) for end in ends if end)
    return len(stripped) if is_ended and len(stripped) > start else len(text)


def masked(messages: Sequence[Message], render: Render, tokenizer: Any, max_length: int | None = None) -> Masked:
    """A conversation as tokens; the labels of tokens that are not wholly inside an answer are -100."""
    text, spans = answer_spans(messages, render, _special_tokens(tokenizer))
    _check_parts(messages, text)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoding["input_ids"]), [tuple(each) for each in encoding["offset_mapping"]]
    labels, split = [], 0
    for token, (start, end) in zip(ids, offsets, strict=True):
        is_inside = end > start and any(first <= start and end <= last for first, last in spans)
        labels.append(token if is_inside else IGNORED)
        split += not is_inside and any(start < edge < end for span in spans for edge in span)
    hidden = _hidden(messages, text)
    return Masked(ids[:max_length], labels[:max_length], offsets[:max_length], text, split, hidden)


def _special_tokens(tokenizer: Any) -> list[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = [str(token) for token in added.values() if getattr(token, "special", True)]
    return [*special, *map(str, getattr(tokenizer, "all_special_tokens", []))]
