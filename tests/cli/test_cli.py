"""The `loopwright` command finds its subcommands, says what went wrong and returns documented exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

import loopwright
from loopwright.cli import main as cli
from loopwright.errors import ArgumentsError, CheckpointError


@pytest.mark.parametrize("words", [["version"], ["--version"], ["-V"]])
def test_version_is_printed(words, capsys):
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"loopwright {loopwright.__version__}\n"


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_help_lists_every_command_and_exit_code(words, capsys):
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert all(name in text and command.help in text for name, command in cli.COMMANDS.items())
    assert all(str(code) in text for code in (0, 1, 2, 75, 130))


def test_no_command_is_bad_input(capsys):
    assert cli.main([]) == 2
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "advice"), [("versoin", "Did you mean 'version'?"), ("xyzzy", ", ".join(sorted(cli.COMMANDS)))]
)
def test_unknown_command_is_bad_input_with_advice(word, advice, capsys):
    assert cli.main([word]) == 2
    assert advice in capsys.readouterr().err


def test_unknown_option_is_bad_input(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["env", "--nonsense"])
    assert caught.value.code == 2


def test_env_shows_versions_and_devices(capsys):
    assert cli.main(["env"]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["loopwright"] == loopwright.__version__
    assert rows["torch"].startswith("2.")
    assert rows["python"].startswith(sys.version.split()[0])


@pytest.mark.skipif(find_spec("loopwright.args.reference") is None, reason="the reference is not written yet")
def test_args_prints_the_reference(capsys):
    assert cli.main(["args"]) == 0
    text = capsys.readouterr().out
    assert "per_device_train_batch_size" in text and "learning_rate" in text


def names_found(capsys, *words):
    assert cli.main(["args", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.partition(":")[0] for line in lines if line and not line.startswith(" ")]


def test_args_searches_names_and_help_texts(capsys):
    assert "lr_scheduler_type" in names_found(capsys, "schedule")  # in its help
    assert names_found(capsys, "grad-NORM") == names_found(capsys, "grad_norm") == ["max_grad_norm"]
    both = names_found(capsys, "eval", "batch")
    assert "per_device_eval_batch_size" in both and "eval_steps" not in both
    assert "predict_with_generate" in names_found(capsys, "generate")


def test_args_shows_default_and_help(capsys):
    assert cli.main(["args", "max_grad_norm"]) == 0
    head, text = capsys.readouterr().out.splitlines()
    assert head.startswith("max_grad_norm: ") and head.endswith(" = 1.0") and text.startswith("    ")


def test_args_without_a_match_suggests_names(capsys):
    assert cli.main(["args", "learning_rat_"]) == 1
    assert "learning_rate" in capsys.readouterr().err
    assert cli.main(["args", "qqqqqq"]) == 1
    assert "'qqqqqq'" in capsys.readouterr().err


def raising(error):
    def run(words):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code"), [(ArgumentsError("bad"), 2), (CheckpointError("damaged"), 1), (KeyboardInterrupt(), 130)]
)
def test_errors_become_exit_codes(error, code, monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "fail", cli.Command("nowhere:run", "fails"))
    monkeypatch.setattr(cli, "_load", lambda command: raising(error))
    assert cli.main(["fail"]) == code
    assert "Traceback" not in capsys.readouterr().err


def test_every_command_of_the_table_exists():
    assert all(callable(cli._load(command)) for command in cli.COMMANDS.values())


def test_the_command_itself_imports_no_framework():
    code = "import sys; from loopwright.cli.main import main; main(['version']); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"


def test_the_readme_lists_every_command():
    from pathlib import Path

    table = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    assert not [name for name in cli.COMMANDS if f"`loopwright {name}`" not in table]


PASSED_ON = {"launch", "run", "completion"}
"""They run a script of the user, or print one."""


@pytest.mark.parametrize("name", sorted(set(cli.COMMANDS) - PASSED_ON))
def test_every_command_can_answer_a_program(name, capsys):
    try:
        assert cli.main([name, "--help"]) == 0
    except SystemExit as end:
        assert end.code in (0, None)
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["version"], ["env"], ["args"], ["args", "warmup"], ["docs", "docs", "--check"]])
def test_json_is_one_object(words, capsys):
    cli.main([*words, "--json"])
    assert json.loads(capsys.readouterr().out)
