"""Every task trains, evaluates with its metrics and saves, on generated data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from loopwright.config import build_trainer, load_config
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
