"""Every block of commands runs as it is written, in a folder with what its page supposes, or says why it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import NOT_RUN, ROOT, blocks_of, not_run, pages

pytest.importorskip("transformers")
SLOW = {"docs/drill.md", "docs/guides/many-gpus.md", "docs/launch.md", "docs/report.md", "docs/tool.md"}
"""Pages whose commands start many processes or train for long; they run with `-m grid`."""
SCRIPT = """
import torch
from torch import nn
from transformers import HfArgumentParser, Trainer, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x, labels=None):
        return {"loss": nn.functional.mse_loss(self.layer(x).squeeze(-1), labels)}

parser = HfArgumentParser(TrainingArguments)
parser.set_defaults(output_dir="out", max_steps=20, logging_steps=1, save_steps=5, use_cpu=True, report_to="none")
args, = parser.parse_args_into_dataclasses()
torch.manual_seed(0)
samples = [{"x": torch.randn(2), "labels": torch.randn(())} for _ in range(64)]
Trainer(Net(), args, train_dataset=samples).train()
"""
"""A script of transformers' Trainer, as on most pages; elsewhere its import is changed."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Iterator[dict[str, str]]:
    """With it, `loopwright` in a shell is a fork of one process that has imported everything."""
    folder = tmp_path_factory.mktemp("bin")
    command, address = folder / "loopwright", folder / "socket"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E {ROOT}/tests/docs/warm.py {address} "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    values = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.docs.warm", str(address)], cwd=ROOT, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env={**values, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    ) as server:  # fmt: skip
        assert server.stdout.readline() == "ready\n"
        yield values
        server.stdin.close()


def run(script: str, folder: Path, environment: dict[str, str]) -> str:
    """What a script for `sh` prints; it stops at the first command that fails."""
    done = subprocess.run(
        ["sh", "-e", "-c", script], cwd=folder, env=environment, text=True, timeout=1200,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


# ---- what a page supposes --------------------------------------------------------------------------------------------


def chat_model_and_data(folder: Path, environment: dict[str, str]) -> None:
    """A tiny model under the name that `loopwright init chat` writes, and conversations."""
    from tests.tasks import tiny

    path = folder / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    tiny.save_model(path, "llama")
    tiny.save_tokenizer(path, chat_template=tiny.CHATML)
    tiny.conversations(folder / "train.jsonl")


def two_runs(folder: Path, environment: dict[str, str]) -> None:
    for name, rate in (("first", "1e-2"), ("second", "1e-3")):
        run(f"loopwright run train.py --output_dir runs/{name} --learning_rate {rate}", folder, environment)


def script_of_loopwright(folder: Path, environment: dict[str, str]) -> None:
    (folder / "train.py").write_text(SCRIPT.replace("from transformers", "from loopwright"))


def logged_run(folder: Path, environment: dict[str, str]) -> None:
    script_of_loopwright(folder, environment)
    run("python train.py", folder, environment)


SUPPOSED: dict[str, Callable[[Path, dict[str, str]], None]] = {
    "docs/tool.md": chat_model_and_data,
    "docs/report.md": two_runs,
    "docs/drill.md": logged_run,
    "docs/launch.md": script_of_loopwright,
    "docs/guides/many-gpus.md": script_of_loopwright,
}
PRINTED = {"README.md": "open runs/table-regression/report.html in a browser", "docs/drill.md": "\nequal\n"}
"""What must be among the lines that a page's commands print."""


# ---- the tests -------------------------------------------------------------------------------------------------------


def cases() -> list[object]:
    """Every page with commands that run."""
    found = []
    for page in pages():
        if any(block.language == "sh" and not block.no_run for block in blocks_of(page)):
            name = page.relative_to(ROOT).as_posix()
            found.append(pytest.param(page, id=name, marks=[pytest.mark.grid] if name in SLOW else []))
    return found


@pytest.mark.parametrize("page", cases())
def test_the_commands_of_a_page_run(page, tmp_path, environment):
    name = page.relative_to(ROOT).as_posix()
    (tmp_path / "train.py").write_text(SCRIPT)
    SUPPOSED.get(name, lambda folder, environment: None)(tmp_path, environment)
    blocks = [block for block in blocks_of(page) if block.language == "sh" and not block.no_run]
    printed = "".join(run(block.code, tmp_path, environment) for block in blocks)
    assert PRINTED.get(name, "") in printed


def test_a_command_that_fails_is_found(tmp_path, environment):
    with pytest.raises(AssertionError, match="missing.yaml: No such file"):
        run("loopwright check missing.yaml", tmp_path, environment)


def test_the_list_of_what_is_not_run_is_up_to_date():
    assert NOT_RUN.read_text(encoding="utf-8") == not_run(), "python -m tests.docs.blocks"


def test_every_reason_says_something():
    reasons = [block.no_run for page in pages() for block in blocks_of(page) if block.no_run]
    assert len(reasons) > 10 and all(len(reason.split()) > 2 for reason in reasons), json.dumps(reasons)
