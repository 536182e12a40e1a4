"""`loopwright replay` runs a logged step again from the nearest checkpoint and finds any number that differs."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loopwright.cli import main as cli
from loopwright.cli.commands.replay import compare
from loopwright.cli.script import Script, script_in, script_of_record
from loopwright.errors import ArgumentsError

TRAIN = """
import sys
import torch
from torch import nn
from loopwright import Trainer, TrainingArguments

torch.set_num_threads(1)
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x, labels=None):
        return {"loss": nn.functional.mse_loss(self.body(x).squeeze(-1), labels)}

rows = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(20)]
args = TrainingArguments(sys.argv[1], per_device_train_batch_size=4, max_steps=14, logging_steps=3, save_steps=5,
                         learning_rate=1e-2, use_cpu=True, disable_tqdm=True, report_to=[])
trainer = Trainer(Net(), args, train_dataset=rows)
trainer.train()
trainer.save_model()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a finished run."""
    home = tmp_path_factory.mktemp("replay")
    (home / "train.py").write_text(TRAIN)
    subprocess.run([sys.executable, "train.py", "out"], cwd=home, check=True, capture_output=True, timeout=60)
    return home / "out"


def replay(*words: object, cwd: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "loopwright.cli.main", "replay", *map(str, words)]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)
    return result.returncode, result.stdout + result.stderr


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """Hash and time of change of every file."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


def test_a_logged_step_is_replayed_from_the_nearest_checkpoint_and_nothing_is_changed(run, tmp_path):
    before = contents(run)
    code, text = replay(run, "--step", 12, "--trust", cwd=tmp_path)
    assert code == 0, text
    assert "replayed from checkpoint-10" in text and text.splitlines()[-1] == "equal"
    samples = next(line for line in text.splitlines() if line.startswith("samples: "))
    assert len(set(samples.removeprefix("samples: ").split(", "))) == 4
    assert contents(run) == before


def test_a_number_that_was_tampered_with_is_reported_as_different(run):
    copy = run.parent / "tampered"
    copy.mkdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["step"] == 3 and "loss" in row:
            row["loss"] += 1e-9
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text = replay("tampered", "--step", 3, "--", "python", "train.py", "tampered", cwd=run.parent)
    assert code == 1, text
    assert "replayed from the start" in text and text.splitlines()[-1] == "different: loss"


def test_a_step_that_was_not_logged_is_bad_input_and_the_logged_ones_are_listed(run, capsys):
    assert cli.main(["replay", str(run), "--step", "4"]) == 2
    assert "logged steps: 3, 6, 9, 12" in capsys.readouterr().err


def test_a_folder_without_a_run_is_bad_input(tmp_path, capsys):
    assert cli.main(["replay", str(tmp_path), "--step", "4"]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err


def test_a_run_without_record_needs_the_command(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "loss": 1.0}\n')
    assert cli.main(["replay", str(tmp_path), "--step", "4"]) == 2
    assert "give the command after --" in capsys.readouterr().err


def test_a_script_that_does_not_train_into_the_run_is_bad_input(tmp_path, capsys, monkeypatch):
    for name in ("argv", "path"):  # a script that is run here has its own
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "loss": 1.0}\n')
    (tmp_path / "nothing.py").write_text("print('nothing')\n")
    words = ["replay", str(tmp_path), "--step", "4", "--", "python", str(tmp_path / "nothing.py")]
    assert cli.main(words) == 2
    assert "exited without training into" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("logged", "replayed", "different"),
    [
        ({"loss": 1.0, "learning_rate": 0.1}, {"loss": 1.0, "learning_rate": 0.1}, []),
        ({"loss": float("nan")}, {"loss": float("nan")}, []),
        ({"loss": 1.0, "grad_norm": 2.0}, {"loss": 1.0}, ["grad_norm"]),
        ({"loss": 1.0}, {"loss": 1.0 + 2**-52}, ["loss"]),
        ({"loss": 1.0}, {}, ["loss"]),
    ],
)
def test_numbers_are_compared_to_the_last_bit(logged, replayed, different):
    assert compare(logged, replayed) == different


@pytest.mark.parametrize(
    ("command", "target", "is_module"),
    [
        (["python", "a.py", "--x", "1"], "a.py", False),
        (["/usr/bin/python3.11", "-u", "-X", "dev", "a.py", "--x", "1"], "a.py", False),
        (["a.py", "--x", "1"], "a.py", False),
        (["python", "-m", "package.train", "--x", "1"], "package.train", True),
    ],
)
def test_the_script_of_a_command_is_found(command, target, is_module, tmp_path):
    (tmp_path / "a.py").touch()
    script = script_in(command)
    assert (script.target, script.is_module, script.words) == (target, is_module, ("--x", "1"))


@pytest.mark.parametrize("command", [[], ["bash", "run.sh"], ["python"], ["python", "missing.py"]])
def test_a_command_that_runs_no_script_is_refused(command):
    with pytest.raises(ArgumentsError):
        script_in(command)


def test_a_recorded_file_inside_a_package_is_run_as_its_module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for path in (tmp_path / "outer" / "__init__.py", inner / "__init__.py", inner / "__main__.py", inner / "a.py"):
        path.touch()
    (tmp_path / "a.py").touch()
    assert script_of_record([str(inner / "a.py"), "1"]) == Script("outer.inner.a", ("1",), is_module=True)
    assert script_of_record([str(inner / "__main__.py")]) == Script("outer.inner", is_module=True)
    assert script_of_record(["a.py"]) == Script("a.py")


def test_the_script_a_folder_names_is_run_only_if_it_is_trusted(run, tmp_path):
    """A folder from elsewhere may name any script, one inside of it too."""
    copy = tmp_path / "sent"
    shutil.copytree(run, copy)
    (copy / "evil.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')")
    record = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**record, "argv": ["evil.py"], "folder": str(copy)}))
    code, text = replay(copy, "--step", 12, cwd=tmp_path)
    assert code == 2 and "evil.py" in text and "--trust" in text and not (tmp_path / "trace").exists()
    replay(copy, "--step", 12, "--trust", cwd=tmp_path)
    assert (tmp_path / "trace").exists()


@pytest.mark.parametrize("record", ["[]", "{}", '{"python": 1, "folder": "x", "argv": ["a"]}', '{"argv": "evil.py"}'])
def test_a_record_of_other_types_is_refused(record, run, tmp_path):
    copy = tmp_path / "sent"
    shutil.copytree(run, copy)
    (copy / "run.json").write_text(record)
    code, text = replay(copy, "--step", 12, "--trust", cwd=tmp_path)
    assert code == 2 and "is not the record of a run" in text


def test_a_command_without_its_secrets_is_not_run(run, tmp_path):
    copy = tmp_path / "sent"
    shutil.copytree(run, copy)
    record = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**record, "argv": [*record["argv"], "--hub_token", "<masked>"]}))
    code, text = replay(copy, "--step", 12, "--trust", cwd=tmp_path)
    assert code == 2 and "recorded without its secrets" in text
