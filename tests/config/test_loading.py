"""Configurations: overrides, the source of every value, unknown keys, derived values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loopwright.config import load_config
from loopwright.errors import ArgumentsError
from loopwright.tasks.table import TASKS

TEXT = """task: table-regression
model: mlp
data:
  train: x.csv
  validation_share: 0.2
learning_rate: 5e-3
metrics: [mae]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(TEXT)
    (tmp_path / "x.csv").write_text("a,target\n1,2\n")
    return tmp_path / "run.yaml"


def test_every_value_has_a_source(path: Path) -> None:
    config = load_config(path, ["--weight-decay", "0.1", "data.max_train_samples=5", "--gradient_checkpointing"])
    rows = config.resolved()
    sources = {key: row["source"] for key, row in rows.items()}
    assert sources["learning_rate"] == f"{path}:6" and rows["learning_rate"]["value"] == 0.005
    assert sources["data.train"] == f"{path}:4" and sources["model.name"] == f"{path}:2"
    assert sources["weight_decay"] == "flag --weight-decay" and rows["weight_decay"]["value"] == 0.1
    assert sources["data.max_train_samples"] == "flag data.max_train_samples"
    assert rows["gradient_checkpointing"]["value"] is True
    assert sources["eval_strategy"] == "derived: there is validation data" and rows["eval_strategy"]["value"] == "epoch"
    assert sources["output_dir"].startswith("derived") and config.args.output_dir == str(path.parent / "runs" / "run")
    assert sources["do_eval"] == "derived: do_eval is True when the trainer evaluates"
    assert sources["adam_beta1"] == sources["data.standardize"] == sources["accelerator_config"] == "default"
    assert config.metrics == ["mae"] and config.data.max_train_samples == 5
    written = json.loads(config.write(path.parent).read_text())
    assert written["values"]["learning_rate"] == {"value": 0.005, "source": f"{path}:6"}


def test_a_derived_value_has_its_reason(path: Path) -> None:
    config = load_config(path, ["eval_strategy=steps", "use_cpu=true", "load_best_model_at_end=true"])
    sources = {key: row["source"] for key, row in config.resolved().items()}
    assert sources["do_eval"] == "derived: do_eval is True when the trainer evaluates"
    assert sources["eval_steps"] == "derived: eval_steps defaults to logging_steps"
    assert all(source != "derived" for source in sources.values())


def test_a_block_on_the_command_line_replaces_that_of_the_file(path: Path) -> None:
    words = ["data={train: y.csv, max_train_samples: 4}", "--model", "{name: mlp, options: {hidden: [8]}}"]
    config = load_config(path, words)
    assert (config.model.name, config.model.options) == ("mlp", {"hidden": [8]})
    assert (config.data.train, config.data.validation_share) == ("y.csv", None)
    sources = {key: row["source"] for key, row in config.resolved().items()}
    assert sources["data.train"] == sources["data.max_train_samples"] == "flag data"
    assert sources["model.name"] == sources["model.options"] == "flag --model"
    assert sources["data.validation_share"] == sources["model.dtype"] == "default"


@pytest.mark.parametrize("line", ["data: x.csv", "model: [mlp]"])
def test_a_block_that_is_no_mapping_is_one_problem(line: str, path: Path) -> None:
    other = "model: mlp" if line.startswith("data") else "data: {train: x.csv}"
    path.write_text(f"task: table-regression\n{other}\n{line}\n")
    with pytest.raises(ArgumentsError, match=r"run.yaml:3: .* must be a mapping of keys to values, such as {") as error:
        load_config(path)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize("value", ["", '""', "null"])
def test_an_empty_output_folder_is_that_of_the_configuration(value: str, path: Path) -> None:
    for text, words in ((f"{TEXT}output_dir: {value}\n", []), (TEXT, [f"output_dir={value.strip(chr(34))}"])):
        path.write_text(text)
        config = load_config(path, words)
        assert config.args.output_dir == str(path.parent / "runs" / "run")
        assert config.resolved()["output_dir"]["source"] == "derived: the name of the configuration"


def test_the_command_line_wins_and_the_last_flag_counts(path: Path) -> None:
    config = load_config(path, ["learning_rate=1e-4", "--learning_rate=2e-4", "--model.name", "m.py:f", "metrics=r2"])
    assert config.args.learning_rate == 2e-4 and config.model.name == "m.py:f" and config.metrics == ["r2"]


def test_weights_are_for_several_sources(path: Path) -> None:
    with pytest.raises(ArgumentsError, match="command line: train_dataset_weights needs several sources in data.train"):
        load_config(path, ["train_dataset_weights={a: 1}"])
    config = load_config(path, ["train_dataset_weights={a: 1, b: 2}", "data.train={a: x.csv, b: x.csv}"])
    assert config.args.train_dataset_weights == {"a": 1, "b": 2}


def test_an_interval_of_evaluations_is_used(path: Path) -> None:
    config = load_config(path, ["eval_steps=7"])
    assert config.args.eval_strategy == "steps" and config.args.eval_steps == 7
    assert config.resolved()["eval_strategy"]["source"] == "derived: eval_steps"
    assert load_config(path, ["eval_steps=7", "eval_strategy=epoch"]).args.eval_strategy == "epoch"


def test_metrics_of_generated_texts_need_them(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("task: seq2seq\nmodel: m\ndata: {train: a.csv, validation_share: 0.1}\n")
    words = ["--predict_with_generate", "false"]
    with pytest.raises(ArgumentsError, match="command line: predict_with_generate=False, but the metric"):
        load_config(tmp_path / "run.yaml", words)
    config = load_config(tmp_path / "run.yaml", [*words, "metrics=[]"])
    assert config.sources.get("generation_max_length") is None
    assert load_config(tmp_path / "run.yaml").args.generation_max_length == 128


def test_flags_of_each_form(path: Path) -> None:
    words = ["--bf16", "false", "--tf32", "--max_steps", "-1", 'lr_scheduler_kwargs={"a": 1}', "run_name=007"]
    config = load_config(path, words)
    assert not config.args.bf16 and config.args.tf32 and config.args.max_steps == -1
    assert config.args.lr_scheduler_kwargs == {"a": 1} and config.args.run_name == "007"
    assert load_config(path, ["data.validation_share=null"]).data.validation_share is None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["lerning_rate=3"], "command line: unknown key 'lerning_rate'; did you mean 'learning_rate'?"),
        (["data.trian=3"], "command line: unknown key 'data.trian'; did you mean 'data.train'?"),
        (["target_column=y"], "command line: unknown key 'target_column'; did you mean 'data.target_column'?"),
        (["learning_rate=fast"], "command line: learning_rate: 'fast' is not a finite number"),
        (["learning_rate=-1"], "command line: learning_rate=-1: must be"),
        (
            ["metrics=[maee]"],
            "command line: 'maee' is not a metric of table-regression; did you mean 'mae'? There are",
        ),
        (["task=tabel-regression"], "command line: task='tabel-regression' is not a task; did you mean 'table-regre"),
        (["evaluation_strategy=steps"], "'evaluation_strategy' is an old name: it became eval_strategy"),
        (["do_train=true"], "'do_train' is for scripts"),
        (["predict_with_generate=true"], "'predict_with_generate' is for tasks that generate text (seq2seq)"),
        (["lora=3"], "command line: lora=3: must be a mapping"),
        (["lora.rank=3"], "command line: unknown key 'lora.rank'"),
        (["lora.quantization=int8"], "lora.quantization='int8': must be one of nf4, fp4"),
        (["learning_rate"], "'learning_rate' is neither key=value nor --key value"),
        (["data.validation=v.csv"], "data.validation and data.validation_share are both set"),
        (["data.train=null"], "there is no data.train"),
        (["model.dtype=int8"], "model.dtype='int8': must be one of float32"),
        (["fp16=true", "bf16=true"], "command line: "),
    ],
)
def test_wrong_values_are_refused_with_their_place(path: Path, words: list[str], problem: str) -> None:
    with pytest.raises(ArgumentsError) as caught:
        load_config(path, words)
    assert problem in str(caught.value)


def test_all_problems_are_listed_with_their_lines(path: Path) -> None:
    path.write_text(
        TEXT.replace("learning_rate", "lerning_rate").replace("validation_share: 0.2", "validation_share: 2")
    )
    with pytest.raises(ArgumentsError) as caught:
        load_config(path)
    assert len(caught.value.problems) == 2
    assert any(each.startswith(f"{path}:6: unknown key 'lerning_rate'") for each in caught.value.problems)
    assert any(each.startswith(f"{path}:5: data.validation_share=2: must be") for each in caught.value.problems)


def test_rules_between_arguments_have_a_place_too(path: Path) -> None:
    path.write_text(TEXT + "fp16: true\nbf16: true\n")
    with pytest.raises(ArgumentsError) as caught:
        load_config(path)
    assert str(caught.value).startswith((f"{path}:8: ", f"{path}:9: "))


def test_a_task_is_needed(path: Path) -> None:
    path.write_text("model: mlp\n")
    with pytest.raises(ArgumentsError, match="there is no key 'task'; set it to one of"):
        load_config(path)


def test_paths_of_a_file_are_relative_to_its_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path.parent / "elsewhere").mkdir()
    monkeypatch.chdir(path.parent / "elsewhere")
    path.write_text(TEXT + "output_dir: out\n")
    config = load_config("../run.yaml")
    assert Path(str(config.data.train)).resolve() == path.parent / "x.csv"
    assert Path(str(config.args.output_dir)).resolve() == path.parent / "out"
    assert load_config("../run.yaml", ["output_dir=here"]).args.output_dir == "here"


def test_an_unknown_block_is_refused(path: Path) -> None:
    path.write_text(TEXT + "sweep:\n  learning_rate: [1, 2]\n")
    with pytest.raises(ArgumentsError, match=r"run\.yaml:8: unknown key 'sweep'"):
        load_config(path)


def test_secrets_are_not_written(path: Path) -> None:
    config = load_config(path, ["hub_token=hf_abcdefghijklmnopqrst"])
    assert "hf_abc" not in json.dumps(config.resolved())


@pytest.mark.parametrize("task", TASKS)
def test_keys_of_all_tasks_are_disjoint_from_arguments(task: str, path: Path) -> None:
    from loopwright.config.names import Names

    names = Names(TASKS[task])
    assert not {*names.blocks} & {*names.arguments} and names.spec("data.train") is not None
    assert {*TASKS[task].default_metrics} <= {*TASKS[task].metrics}


@pytest.mark.parametrize(
    ("metric", "is_greater"),
    [("rmse", False), ("eval_mae", False), ("perplexity", False), ("wer", False), ("r2", True), ("eval_loss", False)],
)
def test_the_best_model_has_the_smallest_error(path: Path, metric: str, is_greater: bool) -> None:
    config = load_config(path, [f"metric_for_best_model={metric}"])
    assert config.args.greater_is_better is is_greater
    assert load_config(path, [f"metric_for_best_model={metric}", "greater_is_better=true"]).args.greater_is_better
