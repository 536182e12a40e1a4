"""The tool as a new user would try it, on a real terminal: init, check, train, Ctrl-C, train again, ctl, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("transformers")

from loopwright.cli import main as cli
from tests.cli.terminal import Terminal, loopwright
from tests.tasks.cases import CASES, model_folder

ENDLESS = ["max_steps=100000", "logging_steps=1", "save_strategy=no", "use_cpu=true", "eval_strategy=no"]


def steps_of(run: Path) -> list[int]:
    """The steps of the training rows in metrics.jsonl."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row["step"] for row in rows if "loss" in row]


def edited(text: str, task: str, folder: Path) -> dict[str, Any]:
    """What a user changes in a new configuration: model and data."""
    kind, make, options = CASES[task]
    values: dict[str, Any] = yaml.safe_load(text)
    values["model"] = model_folder(folder, kind)
    values["data"] = {"train": make(folder).relative_to(folder).as_posix(), "validation_share": 0.25, **options}
    return values


@pytest.mark.parametrize(
    "task",
    [
        "table-classification",
        pytest.param("chat", marks=pytest.mark.grid),
        pytest.param("text-classification", marks=pytest.mark.grid),
        pytest.param("image-classification", marks=pytest.mark.grid),
    ],
)
def test_from_init_to_export(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands that neither train nor control a run are functions of this process."""

    def here(*words: str) -> tuple[int, str]:
        code = cli.main([*words])
        return code, "".join(capsys.readouterr())

    code, text = here("init", task)
    assert code == 0 and text.startswith("# yaml-language-server: $schema=loopwright.schema.json\n")
    config, run = tmp_path / "run.yaml", tmp_path / "runs" / task
    config.write_text(yaml.safe_dump(edited(text, task, tmp_path)))

    code, text = here("check", "run.yaml", "use_cpu=true", "max_steps=20")
    assert code == 0, text
    assert all(
        word in text for word in ("weights", "gradients", "optimizer", "activations", "peak", "time:", "checkpoint:")
    )
    assert "a checkpoint was saved and loaded" in text and "evaluation: eval_" in text and not run.exists()
    if task == "chat":
        assert "the marked text is trained" in text

    with Terminal(tmp_path, "train", "run.yaml", *ENDLESS) as training:
        training.until(lambda: len(steps_of(run)) >= 3, "three steps")
        training.press_ctrl_c()
        assert training.wait() == 75, training.text
    assert "the same command resumes" in training.text
    first = steps_of(run)

    with Terminal(tmp_path, "train", "run.yaml", *ENDLESS) as again:
        again.until(lambda: len(steps_of(run)) >= len(first) + 3, "three more steps")
        code, text = loopwright(tmp_path, "ctl", f"runs/{task}", "stop", "--wait", "200")
        assert code == 0 and "done: stop" in text
        assert again.wait() == 75, again.text
    assert f"resuming the interrupted run from checkpoint-{first[-1]} " in again.text.replace("\n", "")
    steps = steps_of(run)
    assert steps == list(range(1, steps[-1] + 1)) and steps[-1] > first[-1]

    code, text = here("export", "run.yaml", *ENDLESS, "--to", "model")
    assert code == 0, text
    assert f"checkpoint-{steps[-1]} -> model" in text
    assert "model.safetensors" in {path.name for path in (tmp_path / "model").iterdir()}
    if not task.startswith("table"):
        _check_exported(task, tmp_path)


def _check_exported(task: str, folder: Path) -> None:
    """The exported folder is loaded by transformers alone."""
    import transformers

    kind = {
        "chat": "AutoModelForCausalLM",
        "text-classification": "AutoModelForSequenceClassification",
        "image-classification": "AutoModelForImageClassification",
    }[task]
    model, found = getattr(transformers, kind).from_pretrained(str(folder / "model"), output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    assert not any("lora" in name for name, _ in model.named_parameters())
