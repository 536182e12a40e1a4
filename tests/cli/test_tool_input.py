"""Wrong input of each kind: one clear line on standard error, exit code 2, and the same as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from loopwright.cli.main import COMMANDS, main
from tests.tasks import tiny
from tests.tasks.cases import write_config


@pytest.fixture
def config(tmp_path: Path) -> str:
    return str(write_config(tmp_path, "table-regression"))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["lerning_rate=1"], "command line: unknown key 'lerning_rate'; did you mean 'learning_rate'?"),
        (["learning_rate=fast"], "command line: learning_rate: 'fast' is not a finite number"),
        (["data.train=numbrs.csv"], "there is no file or folder 'numbrs.csv'; did you mean 'numbers.csv'?"),
        (["data.target_column=tarjet"], "has no such column; did you mean 'target'?"),
        (["data.feature_columns=[yes, 1]"], "must be a list of names; put yes, no and numbers in quotes"),
        (["data.feature_columns=[]"], "data.feature_columns is empty; list the columns with the inputs"),
        (["data.feature_columns=[a, target]"], "has 'target', which is data.target_column: the model would be given"),
        (["data.feature_columns=[a, a]"], "data.feature_columns has 'a' more than once; remove one of them"),
        (["param_groups={bodi.1.bias: {freeze: true}}"], "did you mean 'body.1.bias'? Correct or remove it"),
        (["metrics=[rmsee]"], "'rmsee' is not a metric of table-regression; did you mean 'rmse'?"),
        (["resume_from_checkpoint=nowhere"], "nowhere"),
        (["resume_from_checkpoint=damaged"], "damaged"),
        (["model=reznet"], "must be 'mlp', or an import path"),
        (["metric_for_best_model=f1", "load_best_model_at_end=true", "save_strategy=epoch"], "f1"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    config: str, words: list[str], problem: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(config).parent
    monkeypatch.chdir(folder)
    (folder / "damaged").mkdir()
    (folder / "damaged" / "manifest.json").write_text("{")
    (folder / "damaged" / "trainer_state.json").write_text("{")
    assert main(["train", config, *words]) == 2
    shown = [line for line in capfd.readouterr().err.splitlines() if line.startswith("loopwright: ")]
    assert len(shown) == 1 and problem in shown[0], shown


def test_a_refused_command_says_nothing_of_a_run_that_starts_over(
    config: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config]) == 0
    capfd.readouterr()
    assert main(["train", config, "data.train=nowhere.csv"]) == 2
    shown = capfd.readouterr().err.strip()
    assert "there is no file or folder 'nowhere.csv'" in shown and "\n" not in shown


def test_the_place_in_the_file_is_named(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = Path(config)
    path.write_text(path.read_text().replace('"learning_rate"', '"lerning_rate"'))
    line = 1 + path.read_text().split("\n").index(' "lerning_rate": 0.01,')
    assert main(["train", config]) == 2
    assert f"loopwright: {config}:{line}: unknown key 'lerning_rate'" in capfd.readouterr().err


def test_a_damaged_checkpoint_is_refused(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config]) == 0
    checkpoint = next(Path(config).parent.glob("runs/*/checkpoint-3"))
    weights = next(checkpoint.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-8])
    assert main(["train", config, f"resume_from_checkpoint={checkpoint}"]) == 2
    assert weights.name in capfd.readouterr().err
    capfd.readouterr()
    assert main(["export", config, "--to", "out"]) == 2 and not Path("out").exists()
    shown = capfd.readouterr().err.strip()
    assert f"checkpoint-3: {weights.name} is" in shown and "\n" not in shown
    assert checkpoint.is_dir()  # an export changes nothing in the folder of the run


def test_the_best_checkpoint_is_exported_if_the_best_model_is_wanted(
    config: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [config, "eval_steps=1", "load_best_model_at_end=true", "greater_is_better=true"]  # the first evaluation
    assert main(["train", *words]) == 0
    for given, step in (words, 1), (words[:1], 3):
        capfd.readouterr()
        assert main(["export", *given, "--to", str(Path(config).parent / f"model{step}"), "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["checkpoint"].endswith(f"checkpoint-{step}")
    assert main(["export", config, "--to", "other", "--checkpoint", "checkpoint-9"]) == 2
    assert "at --checkpoint='checkpoint-9': no such folder" in capfd.readouterr().err


def test_results_and_errors_as_json(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["status"], result["step"], result["code"]) == ("finished", 3, 0)
    assert main(["train", config, "lerning_rate=1", "--json"]) == 2
    error = json.loads(capfd.readouterr().out)
    assert error["code"] == 2 and error["kind"] == "ArgumentsError" and "learning_rate" in error["error"]
    assert main(["explain", config, "--json"]) == 0
    explained = json.loads(capfd.readouterr().out)
    assert explained["plan"]["steps"] == 3 and explained["values"]["max_steps"]["source"].startswith(config)
    assert main(["init", "chat", "--json"]) == 0 and json.loads(capfd.readouterr().out)["config"]["task"] == "chat"
    assert main(["schema", "learning_rate", "--json"]) == 0 and "default" in json.loads(capfd.readouterr().out)
    assert main(["export", config, "--to", "exported", "--json"]) == 0
    assert Path(json.loads(capfd.readouterr().out)["folder"], "model.safetensors").is_file()


def test_a_failure_after_the_beginning_is_code_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, "table-regression", learning_rate=1e30, max_steps=8, on_nonfinite="raise")
    assert main(["train", str(config)]) == 1
    assert "became NaN or infinite" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["train"], "loopwright train needs a configuration file"),
        (["train", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (["init"], "loopwright init needs a task"),
        (["init", "chta"], "'chta' is not a task; did you mean 'chat'?"),
        (["init", "chat", "extra"], "unexpected argument 'extra'"),
        (["init", "chat", "--jsn"], "has no option '--jsn'; did you mean '--json'?"),
        (["schema", "lerning_rate"], "there is no key 'lerning_rate'; did you mean 'learning_rate'?"),
        (["schema", "data.train"], "inside a block; `loopwright schema data` shows all its keys"),
        (["completion", "tcsh"], "'tcsh' is not a supported shell"),
        (["ctl", "nowhere", "save"], "there is no folder 'nowhere'"),
        (["ctl", ".", "save"], "no run is training in this folder"),
        (["ctl", ".", "svae"], "'svae' is not a request; did you mean 'save'?"),
        (["ctl", "."], "needs a request after the folder"),
        (["ctl", ".", "set", "lerning_rate=1"], "cannot be changed while a run trains; did you mean 'learning_rate'?"),
        (["ctl", ".", "set", "learning_rate=fast"], "learning_rate: 'fast' is not a finite number"),
        (["ctl", ".", "set", "save_steps=0"], "save_steps=0 must be above 0"),
        (["ctl", ".", "stop", "now"], "takes nothing after it"),
        (["ctl", ".", "stop", "--wait", "long"], "--wait: 'long' is not a finite number"),
        (["ctl", ".", "stop", "--wait"], "--wait needs a value"),
    ],
)
def test_wrong_words_of_commands(words: list[str], problem: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capfd.readouterr().err.strip()
    assert problem in shown and "\n" not in shown


@pytest.mark.parametrize("command", ["check", "completion", "ctl", "explain", "export", "init", "schema", "train"])
def test_every_command_documents_its_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command in COMMANDS and main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--json" in shown and "75 stopped after saving; the same command resumes" in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_commands_and_keys(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(
        word in script for word in ("train", "learning_rate", "data.max_length", "lora.r", "text-classification")
    )


def test_completion_in_a_real_bash() -> None:
    import shutil
    import subprocess
    import sys

    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    script = subprocess.run(
        [sys.executable, "-m", "loopwright", "completion", "bash"], capture_output=True, text=True, check=True
    ).stdout
    code = (
        script
        + '\nCOMP_WORDS=(loopwright train run.yaml --learning_r); COMP_CWORD=3; _loopwright; echo "${COMPREPLY[@]}"'
    )
    shown = subprocess.run([bash, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.strip() == "--learning_rate"


def test_the_help_starts_without_a_framework() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from loopwright.cli.main import main; main(['init', 'chat']); main(['train', '--help'])\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'datasets', 'peft'} & {*sys.modules}))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "[]"


def test_a_changed_configuration_is_not_resumed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from loopwright.config import load_config
    from loopwright.config.continuing import may_continue

    config = write_config(tmp_path, "table-regression")
    assert main(["train", str(config)]) == 0
    assert may_continue(load_config(config)) is None
    assert may_continue(load_config(config, ["learning_rate=3"])) is None  # compared when the run begins
    tiny.table(tmp_path / "other.csv")
    changed = load_config(config, [f"data.train={tmp_path / 'other.csv'}"])
    assert may_continue(changed) is False
    assert (
        may_continue(load_config(config, [f"data.train={tmp_path / 'other.csv'}", "resume_from_checkpoint=auto"]))
        is None
    )


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["report", "nowhere"], 2, "nowhere is not a folder"),
        (["watch", "nowhere"], 2, "nowhere is not a folder"),
        (["compare", "nowhere", "nowhere"], 2, "nowhere is not a folder"),
        (["search", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["check", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["ctl", "nowhere", "save"], 2, "there is no folder 'nowhere'"),
        (["report"], 2, "see `loopwright report --help`"),
        (["watch", "--bogus"], 2, "see `loopwright watch --help`"),
        (["env", "--bogus"], 2, "see `loopwright env --help`"),
    ],
)
def test_the_error_of_any_command_is_a_json_object(
    words: list[str], code: int, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = main([*words, "--json"])
    except SystemExit as stop:
        ended = stop.code
    error = json.loads(capfd.readouterr().out)
    assert (ended, error["code"]) == (code, code) and problem in error["error"] and error["kind"]


def test_the_words_of_a_script_are_not_those_of_a_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("loopwright.cli.main._load", lambda command: lambda words: sys.exit(2))
    for name, expected in (("run", ""), ("launch", ""), ("env", '"code": 2}\n')):
        with pytest.raises(SystemExit):
            main([name, "own.py", "--json"])
        assert capfd.readouterr().out[-len('"code": 2}\n') :] == expected


def test_the_schema_of_the_data_is_that_of_each_task(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "data"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (
        "messages_column" in found["chat"]["properties"] and "image_size" in found["image-classification"]["properties"]
    )


def test_the_commands_after_an_export_quote_the_folder(tmp_path: Path) -> None:
    from loopwright.cli.commands.export import commands
    from loopwright.config import load_config

    (tmp_path / "run.yaml").write_text("task: causal-lm\nmodel: gpt2\ndata: {train: a.txt}\n")
    shown = commands(load_config(tmp_path / "run.yaml"), Path("my models/out"))
    assert shown["server, with vLLM"] == "vllm serve 'my models/out'"
    assert shown["GGUF, with llama.cpp"].endswith(" 'my models/out' --outfile 'my models/out.gguf'")


def test_places_that_cannot_be_written(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    folder = Path(config).parent
    assert main(["train", config]) == 0
    (folder / "file").touch()
    run = next(folder.glob("runs/*"))
    for words in (
        ["export", config, "--to", str(folder / "file" / "out")],
        ["report", str(run), "-o", f"/proc/{folder.name}.html"],
        ["train", config, f"output_dir={folder / 'file' / 'out'}"],
    ):
        capfd.readouterr()
        assert main(words) == 2
        shown = [line for line in capfd.readouterr().err.splitlines() if line.startswith("loopwright: ")]
        assert len(shown) == 1 and "cannot be written (" in shown[0] and "; choose another" in shown[0]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["output_dir=file"], "the output folder 'file' cannot be written (Not a directory); choose another"),
        (["output_dir=file/out"], "the output folder 'file/out' cannot be written (Not a directory); choose another"),
        (["resume_from_checkpoint=nowhere"], "resume_from_checkpoint='nowhere': no such folder"),
        (["resume_from_checkpoint=true"], "has no checkpoint, and resume_from_checkpoint=True needs one"),
    ],
)
def test_check_finds_a_folder_that_a_run_cannot_use(
    words: list[str], problem: str, config: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(config).parent)
    Path("file").touch()
    assert main(["check", config, *words]) == 2
    shown = capfd.readouterr().err.strip()
    assert problem in shown and "\n" not in shown and not Path("runs").exists()


def test_check_finds_what_a_strict_run_refuses(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = str(write_config(tmp_path, "table-classification"))
    held = tmp_path / "held.csv"
    held.write_text("a,b,target\n1,2,never seen\n")
    words = [config, f"data.validation={held}", "data.validation_share=null"]
    assert main(["check", *words, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert "'never seen' (1)" in found["notes"][0] and not found["problems"]
    assert main(["check", *words, "strict=true"]) == 1
    assert "problem: " in capfd.readouterr().out
    assert main(["train", *words, "strict=true"]) == 2


def test_dates_are_shown_as_they_were_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, line in (("a.toml", "run_name = 2020-01-31"), ("a.yaml", "run_name: 2020-01-31")):
        task = 'task = "causal-lm"' if name.endswith("toml") else "task: causal-lm"
        (tmp_path / name).write_text(f"{task}\n{line}\n")
        assert main(["train", str(tmp_path / name)]) == 2
        assert f"{name}:2: run_name: 2020-01-31 is not text; put it in quotes" in capfd.readouterr().err


def test_numbers_that_are_not_finite_are_texts_in_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = str(write_config(tmp_path, "table-regression", learning_rate=1e30, max_steps=8))

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert main(["check", config, "--json"]) == 0
    found = json.loads(capfd.readouterr().out, parse_constant=refused)
    assert found["metrics"]["eval_loss"] == "NaN"


def test_the_block_of_another_command_is_named(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = Path(config)
    path.write_text(json.dumps({**json.loads(path.read_text()), "search": {"space": {"learning_rate": [1, 2]}}}))
    assert main(["train", config]) == 2
    assert "'search' is a block of `loopwright search`; remove it, or run that command" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["search", "--help"])
    assert "learning_rate: {log_uniform: [1e-5, 1e-2]}" in capfd.readouterr().out
