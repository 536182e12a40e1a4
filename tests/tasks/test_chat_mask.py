"""The trained tokens of conversations: five shapes of templates against masks made by hand, and broken templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from loopwright.config import build_trainer, load_config
from loopwright.errors import DataError
from loopwright.tasks.chat_mask import TemplateError, answer_spans, masked
from tests.tasks import tiny

CHATML = tiny.CHATML
LLAMA3 = (
    "<bos>{% for message in messages %}<|start|>{{ message.role }}<|end|>\n\n{{ message.content | trim }}<turn>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
GEMMA = (
    "<bos>{% for message in messages %}{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "<|start|>{{ role }}\n{{ message.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>model\n{% endif %}"
)
MOVED = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if message.role == 'user' %}[INST] "
    "{% if loop.first and system %}<<{{ system }}>> {% endif %}{{ message.content }} [/INST]"
    "{% else %} {{ message.content }}[EOS]{% endif %}{% endfor %}"
)
"""The system prompt is moved into the first user message, and there is no generation prompt."""
TOOLS = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for message in messages %}<|start|>{{ message.role }}\n"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}call {{ call.function | tojson }}{% endfor %}"
    "{% else %}{{ message.content }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SYSTEM = {"role": "system", "content": "very small"}
TALK = [
    {"role": "user", "content": "what is red"},
    {"role": "assistant", "content": "the cat"},
    {"role": "user", "content": "and blue"},
    {"role": "assistant", "content": "not the dog"},
]
CALL = {"function": {"name": "sum", "arguments": {"of": 2}}}
TOOL_TALK = [
    {"role": "user", "content": "sum of 1 and 1"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "yes 2"},
]
SHAPES: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "ChatML": (
        CHATML,
        [SYSTEM, *TALK],
        (
            "<|im_start|>system\nvery small<|im_end|>\n<|im_start|>user\nwhat is red<|im_end|>\n<|im_start|>assistant\n"
            "«the cat<|im_end|>»\n<|im_start|>user\nand blue<|im_end|>\n<|im_start|>assistant\n"
            "«not the dog<|im_end|>»\n"
        ),
    ),
    "Llama 3": (
        LLAMA3,
        [SYSTEM, *TALK],
        (
            "<bos><|start|>system<|end|>\n\nvery small<turn><|start|>user<|end|>\n\nwhat is red<turn>"
            "<|start|>assistant<|end|>\n\n«the cat<turn>»<|start|>user<|end|>\n\nand blue<turn>"
            "<|start|>assistant<|end|>\n\n«not the dog<turn>»"
        ),
    ),
    "Gemma": (
        GEMMA,
        TALK,
        (
            "<bos><|start|>user\nwhat is red<|end|>\n<|start|>model\n«the cat<|end|>»\n<|start|>user\nand blue<|end|>\n"
            "<|start|>model\n«not the dog<|end|>»\n"
        ),
    ),
    "system prompt moved": (
        MOVED,
        [SYSTEM, *TALK],
        "[INST] <<very small>> what is red [/INST]« the cat[EOS]»[INST] and blue [/INST]« not the dog[EOS]»",
    ),
    "tool calls": (
        TOOLS,
        TOOL_TALK,
        (
            'tools: [{"name": "sum"}]\n<|start|>user\nsum of 1 and 1<|end|>\n<|start|>assistant\n'
            '«call {"name": "sum", "arguments": {"of": 2}}<|end|>»\n<|start|>tool\n2<|end|>\n'
            "<|start|>assistant\n«yes 2<|end|>»\n"
        ),
    ),
    "instruction and response": (
        (
            "{% for m in messages %}{% if m.role == 'user' %}### Instruction:\n{{ m.content }}\n\n"
            "{% elif m.role == 'assistant' %}### Response:\n{{ m.content }}[EOS]\n\n{% else %}{{ m.content }}\n\n"
            "{% endif %}{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
        ),
        [SYSTEM, *TALK],
        (
            "very small\n\n### Instruction:\nwhat is red\n\n### Response:\n«the cat[EOS]»\n\n"
            "### Instruction:\nand blue\n\n### Response:\n«not the dog[EOS]»\n\n"
        ),
    ),
    "names with colons": (
        (
            "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% else %}ASSISTANT: {{ m.content }}"
            "[EOS]{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
        ),
        TALK,
        "USER: what is red ASSISTANT:« the cat[EOS]»USER: and blue ASSISTANT:« not the dog[EOS]»",
    ),
    "without a generation prompt": (
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}",
        TALK[:2],
        "<|start|>user\nwhat is red<|end|>\n«<|start|>assistant\nthe cat<|end|>»\n",
    ),
    "marks of transformers": (
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
            "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
        TALK[:2],
        "<|im_start|>user\nwhat is red<|im_end|><|im_start|>assistant\n«the cat<|im_end|>»",
    ),
    "two answers in a row": (
        CHATML,
        [TALK[0], TALK[1], TALK[3]],
        (
            "<|im_start|>user\nwhat is red<|im_end|>\n<|im_start|>assistant\n«the cat<|im_end|>»\n"
            "<|im_start|>assistant\n«not the dog<|im_end|>»\n"
        ),
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.save_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=CHATML)


def renderer(tokenizer: Any, template: str, tools: Any = None) -> Any:
    def render(messages: list[dict[str, Any]], prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=prompt
        )

    return render


@pytest.mark.parametrize("shape", SHAPES)
def test_masks_are_those_made_by_hand(shape: str, tokenizer: Any) -> None:
    template, messages, by_hand = SHAPES[shape]
    tools = [{"name": "sum"}] if shape == "tool calls" else None
    found = masked(messages, renderer(tokenizer, template, tools), tokenizer)
    assert found.text == by_hand.replace("«", "").replace("»", "")
    # The labels made by hand: each marked part tokenized where it is in the whole text.
    expected, position, is_trained = [], 0, False
    flags = {}
    for character in by_hand:
        if character in "«»":
            is_trained = character == "«"
        else:
            flags[position] = is_trained
            position += 1
    encoding = tokenizer(found.text, add_special_tokens=False, return_offsets_mapping=True)
    for token, (start, end) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
        expected.append(token if all(flags[index] for index in range(start, end)) else -100)
    assert found.input_ids == encoding["input_ids"] and found.labels == expected
    assert 0 < found.trained < len(found.input_ids) and found.split == 0
    shown = "".join(f"«{text}»" if trained else text for text, trained in found.pieces()).replace("»«", "")
    assert shown == by_hand


@pytest.mark.parametrize("shape", SHAPES)
def test_the_prompt_of_each_answer_is_what_a_model_is_given(shape: str, tokenizer: Any) -> None:
    template, messages, _ = SHAPES[shape]
    render = renderer(tokenizer, template)
    text, spans = answer_spans(messages, render)
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(spans) == len(answers)
    for index, (start, _) in zip(answers, spans, strict=True):
        assert text[:start] == render(messages[:index], True)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        # The answers before the last one lose a part, as reasoning does in some templates.
        (
            CHATML.replace("{{ message.content }}", "{{ message.content if loop.last else message.content[:3] }}"),
            "the conversation up to message 3 is not a prefix of the whole one",
        ),
        # The generation prompt begins an answer with words that the answers do not have.
        (CHATML.replace("assistant\n", "assistant\nthink:"), "the generation prompt before message 3 is not a prefix"),
        # The system prompt is put before the last message of the user.
        (
            (
                "{% for m in messages %}{% if m.role == 'user' and loop.index0 >= messages|length - 2 %}[small]"
                "{% endif %}"
                "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
            ),
            "message 3",
        ),
        # The generation prompt is there although it was not asked for.
        (f"{CHATML}<|im_start|>assistant\n", "the conversation up to message 3 is not a prefix of the whole one"),
        # The last message ends in another way than the others.
        (
            CHATML.replace("<|im_end|>", "{% if loop.last %}[EOS]{% else %}<|im_end|>{% endif %}"),
            "the conversation up to message 3 is not a prefix of the whole one",
        ),
        ("{{ messages | length }}" + CHATML, "the conversation up to message 3 is not a prefix of the whole one"),
        (CHATML.replace("in messages", "in messages | reverse"), "message 3"),
        (
            CHATML.replace("in messages", "in messages if message.role == 'user'"),
            "the generation prompt before message 3",
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}[EOS]{% endfor %}",
            "leaves out message 3 (assistant), so there is nothing to train",
        ),
        ("hello", "leaves out message 3 (assistant), so there is nothing to train"),
        ("{{ raise_exception('roles must alternate') }}", "(roles must alternate)"),
        ("{% for m in messages %}{{ m.content.upper }", "cannot render the conversation up to message 5"),
    ],
)
def test_a_broken_template_is_refused_with_the_message(template: str, problem: str, tokenizer: Any) -> None:
    with pytest.raises(TemplateError) as caught:
        masked([SYSTEM, *TALK], renderer(tokenizer, template), tokenizer)
    assert problem in str(caught.value) and "data.chat_template" in str(caught.value)


WITH_DEFAULT = "{% if messages[0].role != 'system' %}<|im_start|>system\nvery small<|im_end|>\n{% endif %}" + CHATML
"""It cannot be rendered without a message."""


@pytest.mark.parametrize("template", [CHATML, WITH_DEFAULT], ids=["chatml", "default system prompt"])
def test_of_a_first_message_that_is_an_answer_only_its_words_are_trained(template: str, tokenizer: Any) -> None:
    for answer in (TALK[1], {**TALK[1], "content": "a cat"}):
        found = masked([answer], renderer(tokenizer, template), tokenizer)
        assert "".join(text for text, trained in found.pieces() if trained) == f"{answer['content']}<|im_end|>"


def test_an_answer_of_weight_0_is_not_trained(tmp_path: Path, tokenizer: Any) -> None:
    talk = [TALK[0], {**TALK[1], "weight": 0}, TALK[0], {**TALK[1], "weight": 1}]
    found = masked(talk, renderer(tokenizer, CHATML), tokenizer)
    assert found.trained == masked(TALK[:2], renderer(tokenizer, CHATML), tokenizer).trained
    assert all(label == -100 for label in found.labels[: len(found.labels) // 2])
    path = chat_config(tmp_path, [{"messages": [TALK[0], {**TALK[1], "weight": 0.5}]}])
    with pytest.raises(DataError, match=r"row 1: message 2 \(assistant\) has the weight 0.5; it must be 1, or 0"):
        build_trainer(load_config(path))


CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "sum_of", "arguments": {"a": 1}}}],
}
CALLING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\nCONTENT{% if 'tool_calls' in m %}"
    "{{ m.tool_calls[0].function | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GUARDED = CALLING.replace("CONTENT", "{{ m.content or '' }}")


@pytest.mark.parametrize(
    ("template", "message", "problem"),
    [
        (CHATML, CALL, r"leaves out the call of 'sum_of' in message 2 \(assistant\)"),
        (CHATML, {**CALL, "content": ""}, "leaves out the call of 'sum_of'"),
        (CALLING.replace("CONTENT", "{{ m.content }}"), CALL, "writes 'None' for the missing content of message 2"),
    ],
    ids=["no calls", "no calls and no content", "None"],
)
def test_a_template_that_does_not_render_calls_is_refused(
    template: str, message: Any, problem: str, tokenizer: Any
) -> None:
    with pytest.raises(TemplateError, match=problem):
        masked([TALK[0], message], renderer(tokenizer, template), tokenizer)
    assert masked([TALK[0], message], renderer(tokenizer, GUARDED), tokenizer).trained


def test_keys_that_parquet_adds_are_left_out(tmp_path: Path) -> None:
    """A Parquet file has the same keys in all messages; a template asks whether `tool_calls` is there."""
    talk = [TALK[0], CALL, {"role": "tool", "content": "1"}, TALK[1]]
    path = chat_config(tmp_path, [{"messages": talk}], chat_template="mine.jinja", max_length=200)
    (tmp_path / "mine.jinja").write_text(GUARDED)
    expected = build_trainer(load_config(path)).train_dataset[0]
    full = [{"tool_calls": None, "name": None, **message} for message in talk]
    tiny.write_rows(tmp_path / "chat.jsonl", [{"messages": full}])
    assert build_trainer(load_config(path)).train_dataset[0] == expected


def test_reasoning_that_a_template_leaves_out_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = chat_config(tmp_path, [{"messages": [TALK[0], {**TALK[1], "reasoning_content": "very large"}]}])
    with caplog.at_level("WARNING", logger="loopwright"):
        build_trainer(load_config(path))
    assert "leaves out or changes the text of a message of the role 'assistant'" in caplog.text


def test_tokens_across_the_edge_of_an_answer_are_not_trained_and_counted(tokenizer: Any) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}[EOS]{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    found = masked(TALK, renderer(tokenizer, template), tokenizer)
    assert found.split == 2 and [text for text, trained in found.pieces() if trained][0] == " cat"


def chat_config(folder: Path, rows: list[dict[str, Any]], **data: Any) -> Path:
    if not (folder / "model").exists():
        tiny.save_model(folder / "model", "llama")
        tiny.save_tokenizer(folder / "model", chat_template=CHATML)
    tiny.write_rows(folder / "chat.jsonl", rows)
    config = {
        "task": "chat",
        "model": "model",
        "data": {"train": "chat.jsonl", **data},
        "use_cpu": True,
        "max_steps": 1,
    }
    (folder / "run.json").write_text(json.dumps(config))
    return folder / "run.json"


def test_samples_without_a_trained_token_are_counted_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"messages": TALK}] * 3 + [{"messages": TALK[:1]}] * 2
    path = chat_config(tmp_path, rows, max_length=200)
    with caplog.at_level("WARNING", logger="loopwright"):
        trainer = build_trainer(load_config(path))
    assert len(trainer.train_dataset) == 3
    assert "2 of 5 conversations have no trained token within max_length=200 and are left out" in caplog.text
    with pytest.raises(DataError, match="none of its 5 conversations has a trained token within max_length=3"):
        build_trainer(load_config(path, ["data.max_length=3"]))


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("hello", "row 2: the messages are 'hello'"),
        ([{"content": "a"}], "row 2: message 1 is"),
        ([{"role": "user", "content": None}], r"row 2: message 1 \(user\) has neither content nor tool_calls"),
    ],
)
def test_wrong_messages_are_refused_with_their_row(tmp_path: Path, messages: Any, problem: str) -> None:
    path = chat_config(tmp_path, [{"messages": TALK}, {"messages": messages}])
    with pytest.raises(DataError, match=problem):
        build_trainer(load_config(path))


def test_a_template_of_a_file_is_used(tmp_path: Path) -> None:
    path = chat_config(tmp_path, [{"messages": TALK}], chat_template="mine.jinja")
    (tmp_path / "mine.jinja").write_text(GEMMA)
    trainer = build_trainer(load_config(path))
    text = trainer.processing_class.decode(trainer.train_dataset[0]["input_ids"])
    assert "<|start|>model" in text


def test_a_list_that_a_template_takes_for_a_text_is_refused(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "the cat"}]
    talk = [TALK[0], {"role": "assistant", "content": parts}]
    with pytest.raises(
        TemplateError, match=r"takes the content of message 2 \(assistant\) for a text, but it is a list"
    ):
        masked(talk, renderer(tokenizer, CHATML), tokenizer)
    for_lists = CHATML.replace(
        "{{ message.content }}",
        "{% if message.content is string %}{{ message.content }}{% else %}{{ message.content[0].text }}{% endif %}",
    )
    assert masked(talk, renderer(tokenizer, for_lists), tokenizer).trained == 3


def test_messages_that_a_template_leaves_out_are_counted_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = chat_config(tmp_path, [{"messages": [SYSTEM, *TALK]}] * 2 + [{"messages": TALK}], chat_template="mine.jinja")
    (tmp_path / "mine.jinja").write_text(CHATML.replace("in messages", "in messages if message.role != 'system'"))
    with caplog.at_level("WARNING", logger="loopwright"):
        build_trainer(load_config(path))
    assert (
        "in 2 of 3 conversations the chat template leaves out or changes the text of a message of the role 'system'"
        in (caplog.text)
    )
    caplog.clear()
    (tmp_path / "mine.jinja").write_text(CHATML.replace("message.content", "message.content | trim"))
    with caplog.at_level("WARNING", logger="loopwright"):
        build_trainer(load_config(path))
    assert "leaves out" not in caplog.text


def test_the_sample_that_check_shows_is_one_that_is_trained(tmp_path: Path) -> None:
    path = chat_config(tmp_path, [{"messages": TALK[:1]}, {"messages": TALK}])
    config = load_config(path)
    sample = config.task.build(config.request()).sample
    assert sample is not None and any(trained for _, trained in sample())
