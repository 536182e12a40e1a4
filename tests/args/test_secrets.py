"""No file, log or message that loopwright writes holds a secret."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopwright import Trainer, TrainingArguments
from loopwright.args.secrets import MASK, masked_text, masked_words
from loopwright.errors import LoopwrightError

SECRET = "Zq7pV0n9TtR4sXyK2bLm"


@pytest.mark.parametrize(
    "words",
    [["--hub_token", SECRET], [f"--hub_token={SECRET}"], [f"hub_token={SECRET}"], ["--auth", SECRET],
     [f"--auth={SECRET}"], ["--api-key", SECRET], [f"trainer.password={SECRET}"], [f"s3://me:{SECRET}@bucket/run"],
     [f"https://{SECRET}@host/x"],
     [f"--output_dir=s3://me:{SECRET}@bucket/run"], [f"https://host/x?token={SECRET}&a=1"], [f"hf_{SECRET}"],
     [f"--text=see hf_{SECRET}"], [f"gs://b/x?X-Amz-Signature={SECRET}"], ["--hubToken", SECRET],
     [f"--wandb_apikey={SECRET}"], ["--passphrase", SECRET], ["--header", f"Authorization: Bearer {SECRET}"],
     ["--header", f"authorization: Basic {SECRET}"], ["--options", json.dumps({"key": "a", "secret": SECRET})],
     [f"--options={{'hub_token': '{SECRET}'}}"], [json.dumps({"inside": json.dumps({"password": SECRET})})],
     [f"https://host/x#access_token={SECRET}"], [f"glpat-{SECRET}"], [f"eyJhbGciOiJIUzI1NiJ9.{SECRET}.{SECRET}"]],
)  # fmt: skip
def test_a_command_line_is_kept_without_its_secrets(words: list[str]) -> None:
    kept = masked_words(["train.py", *words, "--learning_rate", "1e-3"])
    assert SECRET not in " ".join(kept) and MASK in " ".join(kept)
    assert kept[0] == "train.py" and kept[-2:] == ["--learning_rate", "1e-3"]


@pytest.mark.parametrize(
    "word",
    ["--per_device_train_batch_tokens=8", "https://host/a?page=2", "max_tokens=8", "a@b", "--pad_token=[PAD]",
     "{'mask_token': '[MASK]', 'name': 'a'}", "a bearer of bad news"],
)  # fmt: skip
def test_what_is_no_secret_stays(word: str) -> None:
    assert masked_words([word]) == [word] and masked_text(word) == word


@dataclass
class OwnArguments(TrainingArguments):
    """Arguments of a script, with secrets of its own."""

    tracker_api_key: str | None = None
    places: Any = None


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}


@pytest.mark.parametrize("layout", ["native", "transformers"])
def test_planted_secrets_are_in_no_file_and_no_log(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--hub_token", SECRET, f"auth={SECRET}"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", f"--data=https://u:{SECRET}@host/d"])
    caplog.set_level(logging.DEBUG)
    args = OwnArguments(
        str(tmp_path / "run"), max_steps=2, save_steps=1, use_cpu=True, disable_tqdm=True, report_to="tensorboard",
        project=f"hf_{SECRET}", hub_token=SECRET, checkpoint_format=layout, logging_steps=1,
        lr_scheduler_kwargs={}, run_name=f"https://me:{SECRET}@host/run", tracker_api_key=SECRET,
        places=(f"https://me:{SECRET}@host/a", {"options": [{"password": SECRET}]}),
        gradient_checkpointing_kwargs={"auth": SECRET},
    )  # fmt: skip
    data = [{"x": torch.ones(1), "labels": torch.tensor(1.0)}] * 4
    trainer = Trainer(Line(), args, train_dataset=data)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    trainer.save_state()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10 and not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in caplog.text and SECRET not in str(args)
    assert args.hub_token == SECRET, "the arguments of the run keep it"


def test_a_refusal_shows_no_secret(tmp_path: Path) -> None:
    with pytest.raises(LoopwrightError) as refused:
        TrainingArguments(str(tmp_path), hub_token=SECRET, lr_scheduler_type=f"s3://me:{SECRET}@host", max_steps="many")
    assert SECRET not in str(refused.value)


def test_an_option_that_a_schedule_does_not_have_is_refused_without_its_secret(tmp_path: Path) -> None:
    data = [{"x": torch.ones(1), "labels": torch.tensor(1.0)}] * 4
    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, lr_scheduler_kwargs={"api_key": SECRET})
    with pytest.raises(LoopwrightError, match="has no option 'api_key'") as refused:
        Trainer(Line(), args, train_dataset=data).train()
    assert SECRET not in str(refused.value)


def test_copies_and_pickles_of_the_arguments_keep_the_token(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), hub_token=SECRET)
    assert copy.deepcopy(args).hub_token == pickle.loads(pickle.dumps(args)).hub_token == SECRET
    assert json.loads(args.to_json_string())["hub_token"] == "<HUB_TOKEN>"
