"""Every task trains, evaluates with its metrics and saves, on generated data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from loopwright.config import build_trainer, load_config
from loopwright.config.continuing import may_continue
from loopwright.errors import ArgumentsError, DataError, LoopwrightError, MissingPackage, ModelError
from loopwright.tasks.table import TASKS
from tests.tasks import tiny
from tests.tasks.cases import CASES, write_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tasks")


@pytest.mark.parametrize("task", TASKS)
def test_a_task_trains_and_has_its_metrics(task: str, folder: Path) -> None:
    config = load_config(write_config(folder, task, metrics=list(TASKS[task].metrics)))
    trainer = build_trainer(config)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    output = trainer.train()
    assert output.global_step == 3 and np.isfinite(output.training_loss)
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    row = next(row for row in reversed(trainer.state.log_history) if "eval_loss" in row)
    assert {f"eval_{name}" for name in TASKS[task].metrics} <= {*row}
    assert all(np.isfinite(row[f"eval_{name}"]) for name in TASKS[task].metrics)
    saved = json.loads((Path(str(config.args.output_dir)) / "resolved_config.json").read_text())
    assert saved["values"]["task"]["value"] == task


def test_all_tasks_have_a_case() -> None:
    assert {*CASES} == {*TASKS}


@pytest.mark.parametrize("task", ["text-classification", "table-classification", "image-classification"])
def test_a_task_learns(task: str, folder: Path) -> None:
    trainer = build_trainer(load_config(write_config(folder, task), ["max_steps=60", "save_strategy=no"]))
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.9


@pytest.mark.parametrize(
    ("task", "options"),
    [("chat", {"r": 4, "target_modules": "all-linear"}), ("causal-lm", {"r": 4, "dora": True})],
    ids=["lora", "dora"],
)
def test_an_adapter_is_trained_and_saved_alone(task: str, options: dict[str, Any], folder: Path) -> None:
    config = load_config(write_config(folder, task, lora=options, output_dir=f"runs/lora-{task}"))
    trainer = build_trainer(config)
    trainer.train()
    sizes = [parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad]
    assert 0 < sum(sizes) < sum(parameter.numel() for parameter in trainer.model.parameters()) / 2
    names = {path.name for path in Path(str(config.args.output_dir)).glob("checkpoint-3/*")}
    assert "adapter_model.safetensors" in names and not {"model.safetensors", "module.safetensors"} & names


def test_the_head_of_a_classifier_is_trained_with_its_adapter(folder: Path) -> None:
    for task in ("text-classification", "image-classification"):
        options = {"r": 2, "target_modules": "all-linear"}
        config = load_config(write_config(folder, task, lora=options, output_dir=f"runs/head-{task}"))
        names = [name for name, p in build_trainer(config).model.named_parameters() if p.requires_grad]
        assert any("classifier" in name and "lora" not in name for name in names)


def test_the_lists_of_an_adapter_stay_as_they_were_written(folder: Path) -> None:
    adapter = {"r": 4, "target_modules": ["query"], "modules_to_save": ["dense"]}
    path = write_config(folder, "text-classification", lora=adapter, output_dir="runs/lora-lists")
    config = load_config(path)
    build_trainer(config).train()
    assert config.lora is not None and config.lora.modules_to_save == ["dense"]
    assert may_continue(load_config(path)) is None, "the same configuration resumes"


def test_four_bits_need_bitsandbytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    config = load_config(write_config(folder, "chat", lora={"quantization": "nf4"}))
    with pytest.raises(MissingPackage, match="lora.quantization needs the package 'bitsandbytes'"):
        build_trainer(config)


def test_classes_have_the_order_of_a_trained_model(folder: Path) -> None:
    path = write_config(folder, "text-classification")
    config = load_config(path)
    trainer = build_trainer(config)
    trainer.model.config.id2label, trainer.model.config.label2id = {0: "other", 1: "colour"}, {"other": 0, "colour": 1}
    trainer.model.save_pretrained(str(folder / "trained"))
    trainer.processing_class.save_pretrained(str(folder / "trained"))
    again = build_trainer(load_config(path, [f"model={folder / 'trained'}"]))
    assert again.model.config.id2label == {0: "other", 1: "colour"}


# ---- models by import path -------------------------------------------------------------------------------------------

CODE = (
    "from torch import nn\ndef build(size):\n    return nn.Sequential(nn.Linear(2, size), nn.Linear(size, 1))\nx = 1\n"
)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return write_config(tmp_path, "table-regression", model={"name": "mine.py:build", "options": {"size": 3}})


def test_a_model_of_a_file_beside_the_configuration(table: Path) -> None:
    trainer = build_trainer(load_config(table))
    trainer.train()
    assert sum(parameter.numel() for parameter in trainer.model.parameters()) == 13


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["model.name=mien.py:build"], "there is no file 'mien.py' beside the configuration; did you mean 'mine.py'?"),
        (["model.name=mine.py:biuld"], "mine.py has no 'biuld'; did you mean 'build'?"),
        (["model.name=mine.py:x"], "is int, not a function or a class"),
        (["model.name=sub/mine.py:build"], "is not in the folder of the configuration"),
        (["model.name=os:system"], "'os' is not an installed package"),
        (["model.name=subprocess:run"], "'subprocess' is not an installed package"),
        (["model.name=mine:build"], "'mine' is not an installed package"),
        (["model.name=numpy.nowhere:build"], "the package 'numpy' has no module 'numpy.nowhere'"),
        (["model.name=torch.hub:os"], "is module, not a function"),
        (["model.name=torch.hub:urlopen"], "is imported from 'urllib'"),
        (['model.options={"sise": 3}'], "mine.py:build cannot be called with them"),
    ],
)  # fmt: skip
def test_import_paths_that_are_refused(
    table: Path, words: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (table.parent / "sub").mkdir()
    (table.parent / "sub" / "mine.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(table.parent))
    monkeypatch.chdir(table.parent)
    with pytest.raises(ArgumentsError) as caught:
        build_trainer(load_config(table, words))
    assert problem in str(caught.value)


def test_an_import_path_must_return_a_module(table: Path) -> None:
    (table.parent / "mine.py").write_text("def build(size):\n    return size\n")
    with pytest.raises(ModelError, match="mine.py:build returned int; it must return a torch.nn.Module"):
        build_trainer(load_config(table))


@pytest.mark.parametrize("file", ["model.safetensors", "trainer_state.json", "adapter_config.json", "manifest.json"])
def test_no_code_of_a_checkpoint_or_a_model_folder_is_run(table: Path, file: str) -> None:
    (table.parent / file).write_text("{}")
    (table.parent / "mine.py").write_text("raise SystemExit('the code was run')")
    with pytest.raises(ArgumentsError, match="holds a model or a checkpoint"):
        build_trainer(load_config(table))


def test_code_of_a_model_folder_is_not_run(tmp_path: Path) -> None:
    path = write_config(tmp_path, "text-classification")
    model = tmp_path / "models" / "bert"
    config = json.loads((model / "config.json").read_text())
    names = {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.Model"}
    (model / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": names}))
    (model / "evil.py").write_text("raise SystemExit('the code was run')")
    with pytest.raises(ModelError, match="cannot be loaded"):
        build_trainer(load_config(path))


def test_a_link_out_of_the_folder_is_refused(table: Path, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "other.py").write_text("raise SystemExit('the code was run')")
    (tmp_path / "link.py").symlink_to(tmp_path / "far" / "other.py")
    with pytest.raises(ArgumentsError, match="is not in the folder of the configuration"):
        build_trainer(load_config(table, ["model.name=link.py:build"]))


# ---- wrong data and models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "words", "kind", "problem"),
    [
        ("text-classification", ["data.train=clases.jsonl"], ArgumentsError, "there is no file or folder"),
        ("text-classification", ["data.text_column=txt"], ArgumentsError, "has no such column; did you mean 'text'?"),
        ("text-classification", ["data.label_column=text_x"], ArgumentsError, "has no such column"),
        ("text-classification", ["data.labels=[colour]"], DataError, "is not one of the classes that command line"),
        ("text-classification", ["model=./nowhere"], ArgumentsError, "there is no file or folder './nowhere'"),
        ("text-classification", ["model=nobody/nothing"], ModelError, "cannot be loaded"),
        ("text-classification", ["data.train=no_such_dataset"], DataError, "`datasets` cannot load"),
        ("text-classification", ["data.validation_share=0.999"], ArgumentsError, "nothing would be left"),
        ("text-classification", ['model.options={"hiden_size": 3}'], ArgumentsError, "has no 'hiden_size'"),
        ("table-regression", ["data.target_column=tarjet"], ArgumentsError, "did you mean 'target'?"),
        ("table-regression", ["data.feature_columns=[c]"], ArgumentsError, "has no column 'c'"),
        ("table-regression", ["model=resnet"], ArgumentsError, "must be 'mlp', or an import path"),
        ("table-regression", ['model.options={"hiden": [3]}'], ArgumentsError, "has no option 'hiden'"),
        ("image-classification", ["data.train=nowhere"], ArgumentsError, "there is no file or folder 'nowhere'"),
        ("masked-lm", ["data.text_column=txt"], ArgumentsError, "has no such column; did you mean 'text'?"),
        ("chat", ["data.chat_template=no.jinja"], ArgumentsError, "there is no file or folder 'no.jinja'"),
        ("chat", ["lora.target_modules=[nothing]"], ArgumentsError, "this model has"),
        ("question-answering", ["data.stride=40"], ArgumentsError, "must be below max_length"),
        ("speech-to-text", ["data.audio_column=text"], DataError, "there is no sound file"),
        ("speech-to-text", ["data.max_seconds=0.1"], DataError, "longer than max_seconds=0.1"),
    ],
)  # fmt: skip
def test_wrong_input_is_explained(task: str, words: list[str], kind: Any, problem: str, folder: Path) -> None:
    with pytest.raises(kind) as caught:
        build_trainer(load_config(write_config(folder, task), words))
    assert problem in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", '{"a": 1, "target": 2}\n{"a": 1', "a.jsonl:2: not JSON"),
        ("a.jsonl", "[1]\n", "a.jsonl:1: [1] is not an object"),
        ("a.json", '{"a": 1}', "a JSON file of data is a list of objects"),
        ("a.csv", "a,target\n1,2\n3\n", "a.csv:3: not the 2 columns of the header"),
        ("a.csv", "a,target\n1,x\n", "row 1: target='x' is not a finite number"),
        ("a.csv", "a,target\n1,2\nnan,2\n", "row 2: a='nan' is not a finite number"),
        ("a.csv", "a,target\n", "has no rows"),
        ("a.parquet", "not parquet", "not Parquet"),
        ("a.xlsx", "x", "data files end in"),
        ("a.npz", "x", "is not a file of numpy's savez"),
    ],
)
def test_damaged_data_are_explained(tmp_path: Path, name: str, content: str, problem: str) -> None:
    (tmp_path / name).write_text(content)
    path = write_config(tmp_path, "table-regression")
    with pytest.raises(LoopwrightError) as caught:
        build_trainer(load_config(path, [f"data.train={tmp_path / name}", "data.validation_share=null"]))
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_tables_of_every_format_give_the_same_samples(tmp_path: Path) -> None:
    import pyarrow.csv
    import pyarrow.parquet

    path = write_config(tmp_path, "table-regression")
    csv = tiny.table(tmp_path / "x.csv")
    rows = pyarrow.csv.read_csv(csv)
    pyarrow.parquet.write_table(rows, tmp_path / "x.parquet")
    tiny.write_rows(tmp_path / "x.jsonl", rows.to_pylist())
    (tmp_path / "x.tsv").write_text(csv.read_text().replace(",", "\t"))
    (tmp_path / "x.json").write_text(json.dumps(rows.to_pylist()))
    (tmp_path / "parts").mkdir()
    tiny.write_rows(tmp_path / "parts" / "1.jsonl", rows.to_pylist()[:20])
    tiny.write_rows(tmp_path / "parts" / "2.jsonl", rows.to_pylist()[20:])
    np.savez(tmp_path / "x.npz", features=np.stack([rows["a"], rows["b"]], 1), target=np.array(rows["target"]))
    import datasets

    datasets.Dataset.from_list(rows.to_pylist()).save_to_disk(str(tmp_path / "saved"))
    found = []
    for name in ("x.csv", "x.parquet", "x.jsonl", "x.tsv", "x.json", "parts", "x.npz", "saved"):
        trainer = build_trainer(load_config(path, [f"data.train={tmp_path / name}"]))
        found.append(np.stack([[*sample["features"], sample["labels"]] for sample in trainer.train_dataset]))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-6)


def test_a_held_out_part_depends_on_the_seed_only(folder: Path) -> None:
    path = write_config(folder, "table-regression")
    first, second = (build_trainer(load_config(path)).eval_dataset for _ in range(2))
    other = build_trainer(load_config(path, ["seed=7"])).eval_dataset
    key = [tuple(sample["features"]) for sample in first]
    assert key == [tuple(sample["features"]) for sample in second] != [tuple(sample["features"]) for sample in other]


UNSEEN = "1 of the classes of the validation data does not occur in the training data"


@pytest.mark.parametrize(
    ("task", "good", "other"),
    [
        ("text-classification", {"text": "red cat"}, {"text": "red", "label": "rare"}),
        ("token-classification", {"tokens": ["red"]}, {"tokens": ["red"], "tags": ["rare"]}),
        ("table-classification", {"a": 1}, {"a": 2, "target": "rare"}),
    ],
)
def test_a_class_that_only_the_validation_data_have_is_told(
    task: str, good: dict[str, Any], other: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    def labelled(name: str) -> dict[str, Any]:
        key = {"text-classification": "label", "token-classification": "tags"}.get(task, "target")
        return {**good, key: [name] if key == "tags" else name}

    train = tiny.write_rows(tmp_path / "train.jsonl", [labelled("a"), labelled("b")] * 4)
    words = [f"data.train={train}", "data.validation_share=null"]
    path = write_config(folder, task)
    for name, rest in (("known", []), ("unseen", [other] * 3)):
        held = tiny.write_rows(tmp_path / f"{name}.jsonl", [labelled("a"), *rest])
        config = load_config(path, [*words, f"data.validation={held}"])
        notes = config.task.build(config.request()).notes
        assert len(notes) == (name == "unseen"), notes
    assert notes[0].startswith(f"{held}: {UNSEEN}") and "'rare' (3)" in notes[0]
    with pytest.raises(LoopwrightError, match="an error because strict=True"):
        build_trainer(load_config(path, [*words, f"data.validation={held}", "strict=true"]))


def test_a_class_of_images_whose_only_one_is_held_out_is_told(folder: Path, tmp_path: Path) -> None:
    images = tiny.images(tmp_path / "images", count=3)
    (images / "rare").mkdir()
    shutil.copy(images / "dark" / "0.png", images / "rare" / "0.png")
    path = write_config(folder, "image-classification")
    told = []
    for seed in range(8):
        config = load_config(path, [f"data.train={images}", f"seed={seed}"])
        told += config.task.build(config.request()).notes
    assert told and all(UNSEEN in note and "'rare' (1)" in note for note in told)


def test_two_spellings_of_a_class_are_told(folder: Path, tmp_path: Path) -> None:
    spelt = [{"text": "red cat", "label": label} for label in ("good", "bad", "Good ") * 3]
    data = tiny.write_rows(tmp_path / "train.jsonl", spelt)
    words = [f"data.train={data}", "data.validation_share=null"]
    config = load_config(write_config(folder, "text-classification"), words)
    (note,) = config.task.build(config.request()).notes
    assert "the column 'label' has the classes 'good' and 'Good ', which differ only in case or white space" in note


def test_texts_that_are_left_out_are_counted(folder: Path, tmp_path: Path) -> None:
    data = tiny.write_rows(tmp_path / "train.jsonl", [{"text": text} for text in ("red cat sees", "", "a") * 2])
    path = write_config(folder, "causal-lm")
    for words, left in (["data.join=true"], "2 of 6 texts are empty"), (["data.join=false"], "4 of 6 texts have fewer"):
        config = load_config(path, [f"data.train={data}", "data.validation_share=null", *words])
        assert [left in note for note in config.task.build(config.request()).notes] == [True]


def test_a_regression_of_arrays_of_any_shape_has_one_output_for_each_row(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).normal(size=(16, 3, 4)), target=np.arange(16.0))
    words = [f"data.train={tmp_path / 'a.npz'}", "data.validation_share=null"]
    trainer = build_trainer(load_config(write_config(tmp_path, "table-regression"), words))
    outputs = trainer.model(**trainer.data_collator([trainer.train_dataset[index] for index in range(16)]))
    difference = outputs["logits"] - torch.arange(16.0)
    assert outputs["logits"].shape == (16,) and torch.allclose(outputs["loss"], difference.square().mean())


def test_labels_of_the_configuration_are_different(folder: Path) -> None:
    with pytest.raises(ArgumentsError, match="data.labels has the class 'colour' more than once"):
        build_trainer(load_config(write_config(folder, "text-classification"), ["data.labels=[colour, colour]"]))


def test_recordings_whose_text_cannot_be_learned_are_told(folder: Path, tmp_path: Path) -> None:
    source = tiny.recordings(tmp_path / "sounds")
    recorded = [json.loads(line) for line in source.read_text().splitlines()]
    path = write_config(folder, "speech-to-text")

    def notes_of(texts: dict[int, str]) -> list[str]:
        changed = [{**row, "text": texts.get(index, row["text"])} for index, row in enumerate(recorded)]
        data = tiny.write_rows(source.parent / "changed.jsonl", changed)
        config = load_config(path, [f"data.train={data}", "data.validation_share=null"])
        return config.task.build(config.request()).notes

    assert notes_of({}) == []
    (unknown,) = notes_of({0: "AA A", 5: "é"})
    assert (
        "2 of 12 texts have characters that are not in the tokenizer's vocabulary" in unknown and "abcdefghi" in unknown
    )
    (short,) = notes_of({3: "a" * 30})  # the model makes 38 frames, and 59 are needed
    assert "1 of 12 recordings are too short for their texts" in short
    assert notes_of({3: "ab" * 15}) == []
    with pytest.raises(DataError, match="row 8: text='' has no token"):
        notes_of({7: ""})
    with pytest.raises(DataError, match="all 12 recordings are too short for their texts"):
        notes_of(dict.fromkeys(range(12), "a" * 90))


@pytest.mark.parametrize("task", [name for name in TASKS if name != "image-classification"])
def test_several_sources_are_mixed_and_have_a_loss_each(task: str, folder: Path) -> None:
    path = write_config(folder, task, output_dir=f"runs/mixed-{task}")
    values = json.loads(path.read_text())
    name = Path(values["data"]["train"]).relative_to(folder)
    values["data"]["train"] = {"web": str(name), "code": f"{name.parent}/{name.name}"}
    path.write_text(json.dumps(values))
    weights = {"web": 0.75, "code": [[0, 0.25], [3, 0.5]]}
    config = load_config(path, [f"train_dataset_weights={json.dumps(weights)}", "gradient_accumulation_steps=2"])
    assert config.data.train == {"web": str(folder / name), "code": str(folder / name)}
    trainer = build_trainer(config)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert all({"loss_web", "loss_code"} & {*row} for row in logged)
    assert {"loss_web", "loss_code"} <= {key for row in logged for key in row}


def test_rows_of_several_sources_have_the_numbers_of_their_file(folder: Path, tmp_path: Path) -> None:
    good = [{"text": "red cat", "label": index % 2} for index in range(4)]
    first = tiny.write_rows(tmp_path / "first.jsonl", good)
    second = tiny.write_rows(tmp_path / "second.jsonl", [*good[:2], {"text": None, "label": 1}, *good])
    path = write_config(folder, "text-classification")
    words = [f"data.train={{a: {first}, b: {second}}}"]
    with pytest.raises(DataError, match=r"second.jsonl: row 3: text=None is not text"):
        build_trainer(load_config(path, words))
    tiny.write_rows(second, [*good, *good])
    trainer = build_trainer(load_config(path, [*words, "data.validation_share=null", "data.max_train_samples=3"]))
    assert {name: len(part) for name, part in trainer.train_dataset.items()} == {"a": 3, "b": 3}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["data.train={}"], "must be a file, a folder or a name, or a mapping of names to them"),
        (["data.train={a: 5}"], "must be a file, a folder or a name, or a mapping of names to them"),
        (["data.train="], "must be a file, a folder or a name, or a mapping of names to them"),
        (["data.train={a: numbrs.csv}"], "there is no file or folder 'numbrs.csv'"),
        (["train_dataset_weights={a: 1}"], "train_dataset_weights needs several sources in data.train"),
        (["data.train={a: numbers.csv, b: numbers.csv}", "train_dataset_weights={a: 1}"], "'b' is in one of them only"),
    ],
)
def test_sources_that_cannot_be_mixed(
    words: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(tmp_path, "table-regression")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoopwrightError, match=problem):
        build_trainer(load_config(path, words)).train()


def test_a_path_on_the_command_line_is_not_read_as_yaml(tmp_path: Path) -> None:
    data = tmp_path / "a: [b] #1.csv"
    tiny.table(tmp_path / "numbers.csv").rename(data)
    config = load_config(write_config(tmp_path, "table-regression"), [f"data.train={data}"])
    assert config.data.train == str(data) and len(build_trainer(config).train_dataset) == 45


def test_classes_of_a_saved_dataset_have_their_names(folder: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["bad", "good"])
    texts = datasets.Features({"text": datasets.Value("string"), "label": label})
    rows = [{"text": "red cat", "label": index % 2} for index in range(8)]
    datasets.Dataset.from_list(rows, features=texts).save_to_disk(str(tmp_path / "texts"))
    words = [f"data.train={tmp_path / 'texts'}"]
    trainer = build_trainer(load_config(write_config(folder, "text-classification"), words))
    assert trainer.model.config.id2label == {0: "bad", 1: "good"}
    tags = datasets.Features(
        {
            "tokens": datasets.List(datasets.Value("string")),
            "tags": datasets.List(datasets.ClassLabel(names=["O", "B-X"])),
        }
    )
    tagged = [{"tokens": ["red", "cat"], "tags": [1, 0]}] * 8
    datasets.Dataset.from_list(tagged, features=tags).save_to_disk(str(tmp_path / "tags"))
    words = [f"data.train={tmp_path / 'tags'}"]
    trainer = build_trainer(load_config(write_config(folder, "token-classification"), words))
    assert {*trainer.model.config.id2label.values()} == {"O", "B-X"}


def test_hidden_files_are_no_data(folder: Path, tmp_path: Path) -> None:
    tiny.classified(tmp_path / "train.jsonl")
    (tmp_path / "._train.jsonl").write_bytes(b"\0 of another system")
    words = [f"data.train={tmp_path}", "data.validation_share=null"]
    assert len(build_trainer(load_config(write_config(folder, "text-classification"), words)).train_dataset) == 48
    images = tiny.images(tmp_path / "images")
    (images / "dark" / "._0.png").write_bytes(b"\0 of another system")
    words = [f"data.train={images}", "data.validation_share=null"]
    assert len(build_trainer(load_config(write_config(folder, "image-classification"), words)).train_dataset) == 24
