"""Data, models and code of users that cannot be trained: one line that says what, where, and what to do; code 2."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopwright.cli.main import main
from tests.tasks import tiny
from tests.tasks.cases import model_folder, write_config

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model of each kind."""
    path = tmp_path_factory.mktemp("wrong")
    for kind in ("bert", "vit", "llama", "wav2vec2", "gpt2", "t5"):
        model_folder(path, kind)
    return path


def refused(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that a command prints when it refuses its input."""
    capfd.readouterr()
    assert main(words) == 2
    shown = [line for line in capfd.readouterr().err.splitlines() if line.startswith("loopwright: ")]
    assert len(shown) == 1, shown
    return shown[0]


def rows(*values: dict[str, Any]) -> str:
    return "".join(json.dumps(each) + "\n" for each in values)


GOOD = [{"text": "red cat", "label": index % 2} for index in range(8)]
USER, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    ("task", "name", "content", "problem"),
    [
        ("table-regression", "a.csv", "a;target\n1;2\n3;4\n", "a.csv:1: the columns are separated by ';'; separate"),
        ("table-regression", "a.csv", "a\ttarget\n1\t2\n", "separate them by ',', or name the file .tsv"),
        ("table-regression", "a.csv", "a,a,target\n1,2,3\n", "a.csv:1: the header has the column 'a' more than once"),
        ("table-regression", "a.csv", 'a,target\n1,2\n"3,4\n5,6\n', "a.csv:3: not CSV (unexpected end of data)"),
        ("table-regression", "a.csv", "a,target\n1,2\n3,4,5\n", "a.csv:3: not the 2 columns of the header; correct"),
        ("table-regression", "a.csv", "a,target\n1,2\n1e300,2\n", "a='1e300' is not a finite number of 32 bits"),
        ("table-regression", "a.jsonl", "[" * 100_000, "a.jsonl:1: not JSON"),
        ("table-regression", "a.json", "[" * 100_000, "a.json: not JSON"),
        ("table-regression", "a.npz", "PK\x03\x04 cut off", "is not a file of numpy's savez"),
        ("table-regression", "a.jsonl", rows({"a": 10**400, "target": 1}, {"a": 1, "target": 1}), "row 1: a=1000000"),
        ("table-regression", "a.csv", "a,target\n1,2\n3,nan\n", "row 2: target='nan' is not a finite number"),
        ("text-classification", "a.jsonl", '{"text": "a", "text": "b"}', "a.jsonl:1: not JSON (the key 'text' is"),
        ("text-classification", "a.json", '[{"text": "a", "text": "b"}]', "a.json: not JSON (the key 'text' is"),
        (
            "text-classification", "a.jsonl", rows(*GOOD, {"text": "red \ud800", "label": 1}),
            "a.jsonl:9: '\\ud800' is half of a character (a surrogate); write the whole one",
        ),
        (
            "text-classification", "a.jsonl", rows(*GOOD, {"text": "red cat " * 80, "label": 1}),
            "data.max_length: a sample has 240 tokens, and the model has 128 positions; set data.max_length to 128 or",
        ),
        ("seq2seq", "a.jsonl", rows(*[{"source": "a", "target": ""}] * 4), "the tokenizer makes no token of target=''"),
        ("causal-lm", "a.jsonl", rows(*[{"text": ""}] * 4), "all 3 texts are empty; there is nothing to train on"),
        ("text-classification", "a.jsonl", rows(*GOOD, {"text": "a", "label": float("nan")}), "row 9: label=nan is"),
        ("text-classification", "a.jsonl", rows(*GOOD, {"text": "a", "label": float("inf")}), "row 9: label=inf is"),
        ("text-classification", "a.jsonl", rows(*GOOD, {"text": "", "label": 1}), "row 9: the tokenizer makes"),
        (
            "token-classification", "a.jsonl",
            rows(*[{"tokens": ["a"], "tags": [tag]} for tag in "OOOXXX"], {"tokens": [1], "tags": ["O"]}),
            "row 7: the word 1 is not text; put it in quotes",
        ),
        (
            "token-classification", "a.jsonl",
            rows(*[{"tokens": ["a"], "tags": [tag]} for tag in "OOOXXX"], {"tokens": [], "tags": []}),
            "row 7: the tokenizer makes no token of tokens=[]; remove the row",
        ),
        (
            "chat", "a.jsonl", rows(*[{"messages": [USER, {"role": "assistant", "content": 5}]}] * 3),
            "message 2 (assistant) has the content 5, which is not text",
        ),
        (
            "chat", "a.jsonl", rows(*[{"messages": [USER, {"role": "asistant", "content": "a"}]}] * 3),
            "check the roles of the messages (user, asistant): the answers of 'assistant' are trained",
        ),
    ],
)  # fmt: skip
def test_wrong_data(
    task: str, name: str, content: str, problem: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / name).write_text(content)
    assert problem in refused(["train", str(write_config(folder, task)), f"data.train={folder / name}"], capfd)


@pytest.mark.parametrize(
    ("target", "features", "problem"),
    [
        (
            np.zeros((8, 3)),
            np.zeros((8, 2)),
            "'target' has 3 numbers in each row, and the target of a regression is one",
        ),
        (np.zeros(8), np.full((8, 2), np.nan), "x has a value that is not a finite number of 32 bits; replace it"),
        (np.zeros(8), np.full((8, 2), 1e300), "x has a value that is not a finite number of 32 bits; replace it"),
        (np.zeros(8), np.full((8, 2), "a"), "has <U1 of shape (6, 2); the inputs must be at least one real number"),
        (np.zeros(8), np.zeros((8, 0)), "has float64 of shape (6, 0); the inputs must be at least one real number"),
        (np.zeros(0), np.zeros((0, 2)), "has no rows"),
    ],
)
def test_arrays_that_are_no_table(
    target: Any, features: Any, problem: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "a.npz", x=features, target=target)
    path = write_config(tmp_path, "table-regression")
    assert problem in refused(["train", str(path), f"data.train={tmp_path / 'a.npz'}"], capfd)


@pytest.mark.parametrize(
    ("answers", "question", "problem"),
    [
        (
            {"text": "cat", "answer_start": 4},
            "what",
            "needs the lists text, of texts, and answer_start, of as many int",
        ),
        ({"text": ["cat"], "answer_start": ["4"]}, "what", "needs the lists text"),
        ({"text": ["cat", "cat"], "answer_start": [4]}, "what", "needs the lists text"),
        ({"text": [None], "answer_start": [4]}, "what", "needs the lists text"),
        (
            {"text": [], "answer_start": []},
            "what is " * 30,
            "which leaves 0 of data.max_length=40 for the context, not",
        ),
    ],
)
def test_questions_that_have_no_answer(
    answers: Any, question: str, problem: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    row = {"question": question, "context": "red cat sees the blue dog", "answers": answers}
    (folder / "asked.jsonl").write_text(rows(*[row] * 4))
    path = write_config(folder, "question-answering")
    assert problem in refused(["train", str(path), f"data.train={folder / 'asked.jsonl'}"], capfd)


def test_rows_have_their_numbers_of_the_file_although_some_are_held_out(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = {"text": None, "label": 1}
    path = write_config(folder, "text-classification")
    for number in range(1, 9):
        (folder / "numbered.jsonl").write_text(rows(*GOOD[: number - 1], bad, *GOOD[number:]))
        assert f"row {number}: text=None" in refused(
            ["train", str(path), f"data.train={folder / 'numbered.jsonl'}"], capfd
        )


def _bomb() -> bytes:
    """The beginning of a picture of 60,000 times 60,000 pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["text", "empty", "truncated", "bomb"])
def test_images_that_are_no_images(kind: str, tmp_path: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL")
    images = tiny.images(tmp_path / "images")
    for file in images.rglob("*.png"):
        content = file.read_bytes()
        file.write_bytes(
            {"text": b"hello", "empty": b"", "truncated": content[: len(content) // 2], "bomb": _bomb()}[kind]
        )
    path = write_config(folder, "image-classification", output_dir=str(tmp_path / "out"))
    shown = refused(["train", str(path), f"data.train={images}"], capfd)
    assert ".png is not a readable image (" in shown and shown.endswith("; replace or remove it")


def test_an_image_that_a_worker_of_the_loader_cannot_read(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL")
    images = tiny.images(tmp_path / "images")
    for file in images.rglob("*.png"):
        file.write_bytes(b"hello")
    path = write_config(folder, "image-classification", output_dir=str(tmp_path / "out"), dataloader_num_workers=1)
    shown = refused(["train", str(path), f"data.train={images}"], capfd)
    assert shown.startswith(f"loopwright: {images}") and "is not a readable image (" in shown


def test_a_size_that_the_model_does_not_take(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL")
    path = write_config(folder, "image-classification")
    assert "data.image_size=7: the model does not take" in refused(["train", str(path), "data.image_size=7"], capfd)


@pytest.mark.parametrize("content", ["{", "[]", '{"size": "big"}'])
def test_a_damaged_file_of_an_image_processor(
    content: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL")
    shutil.copytree(folder / "models" / "vit", tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text(content)
    path = write_config(folder, "image-classification")
    shown = refused(["train", str(path), f"model={tmp_path / 'vit'}"], capfd)
    assert "preprocessor_config.json cannot be used (" in shown


@pytest.mark.parametrize(("kept", "problem"), [(0, "it ends too early"), (20, "it ends too early"), (44, "no samples")])
def test_sounds_that_are_no_sounds(
    kept: int, problem: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tiny.recordings(tmp_path / "sounds")
    for file in data.parent.rglob("*.wav"):
        file.write_bytes(file.read_bytes()[:kept])
    path = write_config(folder, "speech-to-text")
    assert problem in refused(["train", str(path), f"data.train={data}"], capfd)


def _shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _small_vocabulary(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 420', '"vocab_size": 50'))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"xxxx"), "cannot be loaded: Error while deserial"),
        (lambda folder: _shorten(folder / "model.safetensors"), "cannot be loaded: Error while deserial"),
        (
            lambda folder: [each.unlink() for each in folder.glob("tok*")],
            "has no vocabulary of a tokenizer; set",
        ),
        (_small_vocabulary, "but the model has embeddings for 50 tokens (0 to 49); set model.tokenizer to"),
    ],
)
def test_models_that_cannot_be_used(
    change: Callable[[Path], Any], problem: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(folder / "models" / "bert", tmp_path / "bert"))
    change(model)
    path = write_config(folder, "text-classification")
    assert problem in refused(["train", str(path), f"model={model}"], capfd)


@pytest.mark.parametrize("task", ["text-classification", "chat", "seq2seq", "image-classification"])
def test_a_folder_without_a_model(
    task: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    shown = refused(["train", str(write_config(folder, task)), f"model={empty}"], capfd)
    assert f"model.name='{empty}' has no config.json; name the folder of a model" in shown


@pytest.mark.parametrize(
    ("task", "kind", "problem"),
    [
        ("seq2seq", "bert", "is a bert model, for which transformers has no AutoModelForSeq2SeqLM; choose a model for"),
        ("chat", "t5", "is a t5 model, for which transformers has no AutoModelForCausalLM; choose a model for"),
        ("image-classification", "bert", "transformers has no AutoModelForImageClassification; choose a model for"),
        ("text-classification", "vit", "has no vocabulary of a tokenizer; set model.tokenizer to a folder or name"),
    ],
)
def test_a_model_of_another_task(
    task: str, kind: str, problem: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_config(folder, task)
    assert problem in refused(["train", str(path), f"model={model_folder(folder, kind)}"], capfd)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import nothing_here\n", "mine.py cannot be imported: ModuleNotFoundError: No module named 'nothing_here' ("),
        ("x = 1\ndef build(:\n", "mine.py cannot be imported: SyntaxError: invalid syntax ("),
        ("def build():\n    return 1 / 0\n", "mine.py:build raised ZeroDivisionError: division by zero ("),
    ],
)
def test_code_of_the_user_that_fails(
    code: str, problem: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(code)
    shown = refused(["train", str(write_config(tmp_path, "table-regression")), "model=mine.py:build"], capfd)
    line = 1 if code.startswith("import") else 2
    assert problem in shown and f"mine.py:{line})" in shown


MODULES = """
import torch
from torch import nn

class Broken(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs.reshape(-1, 5))

def too_wide(): return nn.Linear(7, 1)
def broken(): return Broken(5, 1)
def five(): return nn.Linear(2, 5)
def as_many_as_rows(): return nn.Linear(2, 8)
def no_tensor():
    return nn.LSTM(2, 1)
"""


@pytest.mark.parametrize("command", ["train", "check"])
@pytest.mark.parametrize(
    ("task", "name", "problem"),
    [
        (
            "table-regression",
            "too_wide",
            "'mine.py:too_wide' cannot compute these data: RuntimeError: mat1 and mat2 sh",
        ),
        ("table-regression", "broken", "mine.py:7); raised in Broken.forward"),
        ("table-regression", "five", "the module Linear returned outputs of shape (8, 5) for 8 rows; for a regression"),
        ("table-regression", "as_many_as_rows", "it must return a tensor of shape (8, 1)"),
        ("table-regression", "no_tensor", "the module LSTM returned tuple for 8 rows"),
        ("table-classification", "five", "for 2 classes it must return a tensor of shape (8, 2)"),
    ],
)
def test_a_module_of_the_user_that_does_not_fit_the_data(
    command: str, task: str, name: str, problem: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(MODULES)
    assert problem in refused([command, str(write_config(tmp_path, task)), f"model=mine.py:{name}"], capfd)


def test_an_error_of_a_model_after_the_first_update_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Late(nn.Linear):\n"
        "    def forward(self, inputs):\n"
        "        if self.training and (self.weight != self.first).any():\n"
        "            raise RuntimeError('late')\n"
        "        return super().forward(inputs)\n"
        "def late():\n"
        "    made = Late(2, 1)\n"
        "    made.register_buffer('first', made.weight.detach().clone())\n"
        "    return made\n"
    )
    path = write_config(tmp_path, "table-regression")
    with pytest.raises(RuntimeError, match="late"):
        main(["train", str(path), "model=mine.py:late"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["lora={r: 4}"], "lora adapts trained weights, and 'mlp' has none; remove it"),
        (["model.name=mlp", "model.dtype=bfloat16"], "model.dtype is not for the model 'mlp'; remove it"),
    ],
)
def test_what_a_perceptron_would_ignore_is_refused(
    words: list[str], problem: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert problem in refused(["train", str(write_config(tmp_path, "table-regression")), *words], capfd)


def test_a_template_that_is_not_utf8(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.jinja").write_bytes("é".encode("latin-1"))
    path = write_config(folder, "chat")
    shown = refused(["train", str(path), f"data.chat_template={tmp_path / 'mine.jinja'}"], capfd)
    assert "is not UTF-8 text; save it as UTF-8" in shown


def test_words_of_commands_that_cannot_be_done(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(write_config(tmp_path, "table-regression"))
    assert main(["train", path]) == 0
    run = str(tmp_path / "runs" / "table-regression")
    assert "needs a value: --learning_rate=VALUE" in refused(["train", path, "--learning_rate"], capfd)
    assert "so the run has no adapter" in refused(["export", path, "--to", str(tmp_path / "x"), "--adapter"], capfd)
    assert "there is no folder" in refused(["report", run, "-o", str(tmp_path / "no" / "x.html")], capfd)
    assert "is a folder; name a file in it" in refused(["report", run, "-o", str(tmp_path)], capfd)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["lora={modules_to_save: [clasifier]}"], "the model has no module 'clasifier'; did you mean 'classifier'?"),
        (
            ["model.options={hidden_dropout_prob: much}", "model.name=MODEL"],
            "model.options: hidden_dropout_prob='much'",
        ),
        (["model.options={num_labels: 7}"], "model.options: num_labels=7: with these data it is 2; remove it"),
        (["eval_strategy=epoch", "data.validation_share=null"], "but there is no validation data; set data.validation"),
    ],
)
def test_options_that_do_not_fit_the_model_or_the_data(
    words: list[str], problem: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("MODEL", model_folder(folder, "bert")) for word in words]
    assert problem in refused(["train", str(write_config(folder, "text-classification")), *words], capfd)


@pytest.mark.parametrize("task", ["causal-lm", "chat"])
def test_a_model_that_sees_the_next_token_is_no_causal_one(
    task: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(write_config(folder, task))
    model = f"model.name={model_folder(folder, 'bert')}"
    assert "is a bert model, in which a token sees the later ones" in refused(["train", path, model], capfd)
    assert main(["train", path, model, "model.options={is_decoder: true}", "max_steps=1"]) == 0
