"""`loopwright drill` puts a script through every fault and says truly what survived."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loopwright.cli import main as cli
from loopwright.cli.commands.drill import cut_short, flip_bit
from loopwright.cli.drill.verdicts import CASES, Attempt, is_hopeless, judge

TRAIN = """
import shutil
import sys
from pathlib import Path
import torch
from torch import nn
from loopwright import Trainer, TrainerCallback, TrainingArguments

torch.set_num_threads(1)
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x, labels=None):
        return {"loss": nn.functional.mse_loss(self.body(x).squeeze(-1), labels)}

class Forgetful(TrainerCallback):
    def on_init_end(self, args, state, control, **kwargs):
        shutil.rmtree(args.output_dir)

rows = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(26)]
args = TrainingArguments("out", per_device_train_batch_size=4, num_train_epochs=20, logging_steps=2, learning_rate=1e-2,
                         use_cpu=True, disable_tqdm=True, on_nonfinite="raise", report_to=[])
callbacks = [Forgetful()] if "--forget" in sys.argv else []
Trainer(Net(), args, train_dataset=rows, callbacks=callbacks).train()
Path("after.txt").touch()
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    (home / "train.py").write_text(TRAIN)
    return home


def drill(*words: str, home: Path, script: tuple[str, ...] = ("train.py",)) -> tuple[int, dict[str, list[str]]]:
    """The exit code and the rows of the table by case."""
    own = ["--steps", "20", "--timeout", "120", *words]
    command = [sys.executable, "-m", "loopwright.cli.main", "drill", *own, "--", sys.executable, *script]
    environment = {**os.environ, "TMPDIR": str(home.parent)}
    result = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=400)
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.split()[:1]}
    return result.returncode, {name: row for name, row in rows.items() if name in CASES}


def test_a_plain_script_survives_every_fault_with_the_undisturbed_weights(home):
    code, rows = drill("--warm", home=home)
    assert {name: (row[1], row[3]) for name, row in rows.items()} == dict.fromkeys(CASES, ("yes", "yes"))
    assert code == 0
    assert {path.name for path in home.iterdir()} == {"train.py"}, "the drill wrote where the script was started"


@pytest.mark.grid
def test_a_script_that_loses_its_checkpoints_does_not_survive(home):
    code, rows = drill("--only", "kill", home=home, script=("train.py", "--forget"))
    assert code == 1
    assert rows["kill"][1] == "no" and "started from scratch" in " ".join(rows["kill"])


def test_unknown_cases_and_too_few_steps_are_bad_input(home, capsys):
    script = str(home / "train.py")
    assert cli.main(["drill", "--only", "kill,flood", "--", "python", script]) == 2
    assert "available cases are kill, kill-in-save" in capsys.readouterr().err
    assert cli.main(["drill", "--steps", "3", "--", "python", script]) == 2
    assert cli.main(["drill"]) == 2


# ---- verdicts --------------------------------------------------------------------------------------------------------


def attempt(
    code: int | None, began: int, reached: int, *, text: str = "", end: dict[str, Any] | None = None, **facts: Any
) -> Attempt:
    journal = [{"event": "begin", "step": began, "facts": facts}, {"event": "fault", "what": "it"}]
    journal.append({"event": "step", "step": reached})
    if end is not None:
        journal.append({"event": "end", "step": reached, "optimizer": "o", "finite": True, **end})
    return Attempt(code, journal, text)


REFERENCE = attempt(0, 0, 30, end={"model": "m"})
DONE = {"model": "m"}


def verdict(name: str, *attempts: Attempt, **options: Any) -> tuple[str, str, int | None]:
    row = judge(name, list(attempts), REFERENCE, save_every=3, **options)
    return row.survived, row.same, row.lost


@pytest.mark.parametrize(
    ("name", "attempts", "expected"),
    [
        ("kill", [attempt(-9, 0, 20), attempt(0, 15, 30, end=DONE)], ("yes", "yes", 5)),
        ("kill", [attempt(-9, 0, 20), attempt(0, 0, 30, end=DONE)], ("no", "yes", 20)),
        ("kill", [attempt(-9, 0, 20), attempt(0, 15, 30, end={"model": "x"})], ("no", "no", 5)),
        ("kill", [attempt(-9, 0, 20), attempt(None, 15, 17)], ("no", "-", None)),
        ("sigterm", [attempt(75, 0, 20), attempt(0, 20, 30, end=DONE)], ("yes", "yes", 0)),
        ("sigterm", [attempt(75, 0, 20), attempt(0, 18, 30, end=DONE)], ("no", "yes", 2)),
        ("full-disk", [attempt(0, 0, 30, end=DONE)], ("yes", "yes", 0)),
        ("full-disk", [attempt(1, 0, 20), attempt(0, 20, 30, end=DONE)], ("no", "yes", 0)),
        ("out-of-memory", [attempt(0, 0, 30, end={"model": "x"}, auto_find_batch_size=True)], ("yes", "-", 0)),
        ("out-of-memory", [attempt(0, 0, 30, end={"model": "x"}, auto_find_batch_size=False)], ("no", "no", 0)),
    ],
)
def test_survival_is_finishing_in_time_with_little_lost_and_equal_weights(name, attempts, expected):
    assert verdict(name, *attempts) == expected


@pytest.mark.parametrize(
    ("policy", "attempts", "survived"),
    [
        ("raise", [attempt(1, 0, 20, text="NonFiniteError: x"), attempt(0, 18, 30, end=DONE)], "yes"),
        ("raise", [attempt(1, 0, 20, text="KeyError: x"), attempt(0, 18, 30, end=DONE)], "no"),
        ("raise", [attempt(0, 0, 30, end=DONE)], "no"),
        ("skip", [attempt(0, 0, 30, end={"model": "x"})], "yes"),
        ("skip", [attempt(0, 0, 30, end={"model": "x", "finite": False})], "no"),
        ("continue", [attempt(0, 0, 30, end={"model": "x", "finite": False})], "as requested"),
    ],
)
def test_what_surviving_a_nan_means_is_what_on_nonfinite_says(policy, attempts, survived):
    attempts[0].journal[0]["facts"]["on_nonfinite"] = policy
    assert verdict("nan", *attempts)[0] == survived


def test_weights_do_not_count_where_two_undisturbed_runs_differ():
    attempts = [attempt(-9, 0, 20), attempt(0, 15, 30, end={"model": "x"})]
    assert verdict("kill", *attempts, comparable=False) == ("yes", "-", 5)


def test_a_damaged_checkpoint_left_behind_is_no_survival():
    attempts = [attempt(-9, 0, 20), attempt(0, 15, 30, end=DONE)]
    assert verdict("kill", *attempts, damage="checkpoint-30: model.safetensors is missing")[0] == "no"


def test_a_fault_that_could_not_be_caused_is_no_survival():
    undisturbed = Attempt(0, [each for each in REFERENCE.journal if each["event"] != "fault"])
    assert verdict("kill", undisturbed)[0] == "no"


def test_the_same_end_twice_is_hopeless():
    assert is_hopeless([attempt(1, 0, 20, text="ValueError: x"), attempt(1, 20, 20, text="ValueError: x")])
    assert is_hopeless([attempt(None, 0, 20)])
    assert not is_hopeless([attempt(-9, 0, 20)])
    assert not is_hopeless([attempt(1, 0, 20, text="ValueError: x"), attempt(1, 20, 25, text="ValueError: x")])


def test_damage_is_half_a_file_or_one_bit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    flip_bit(path)
    assert sum(byte.bit_count() for byte in path.read_bytes()) == 1
    cut_short(path)
    assert path.stat().st_size == 50
