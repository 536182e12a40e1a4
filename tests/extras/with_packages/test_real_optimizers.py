"""Optimizers of other packages train as in transformers' Trainer, and resume exactly from files without pickle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from loopwright import Trainer, TrainingArguments
from loopwright.errors import CheckpointError

STEPS, SAVED = 4, 2
NAMES = [
    "adamw_torch_4bit", "adamw_torch_8bit", "adamw_8bit", "paged_adamw_32bit", "paged_ademamix_8bit", "lion_8bit",
    "rmsprop_bnb", "galore_adamw", "galore_adafactor", "apollo_adamw", "grokadamw", "stable_adamw",
    "schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd",
]  # fmt: skip
OF_OBJECTS = ["adamw_torch_8bit", "galore_adamw", "apollo_adamw", "grokadamw"]


class Classifier(nn.Module):
    """Large enough that 4- and 8-bit states are used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.second(torch.relu(self.first(self.embed(input_ids))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


DATA = [{"input_ids": n % 64, "labels": (n * 7) % 64} for n in range(32)]


def train(folder: Path, name: str, *, library: Any = None, resume: str | None = None, **options: Any) -> Any:
    trainer_class, arguments = library or (Trainer, TrainingArguments)
    given: dict[str, Any] = {
        "max_steps": STEPS, "save_steps": SAVED, "eval_strategy": "steps", "eval_steps": 1, "logging_steps": 1,
        "per_device_train_batch_size": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "optim": name,
        "use_cpu": True, "report_to": [], "disable_tqdm": True, **options,
    }  # fmt: skip
    if name.startswith(("galore", "apollo")):
        # transformers leaves adam_epsilon out here: with these optimizers it is always 1e-6.
        given.update(optim_target_modules=["first", "second"], optim_args="rank=4", adam_epsilon=1e-6)
    trainer = trainer_class(model(), arguments(str(folder), **given), train_dataset=DATA, eval_dataset=DATA[:8])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(autouse=True)
def without_compiling():
    """torchao compiles its updates, which takes longer than everything else here."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def values_of(trainer: Any) -> list[float]:
    return [row[name] for row in trainer.state.log_history for name in ("loss", "eval_loss") if name in row]


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_as_in_transformers_and_resumes_exactly(name, tmp_path):
    whole = train(tmp_path / "whole", name)
    checkpoint = shutil.copytree(tmp_path / "whole" / f"checkpoint-{SAVED}", tmp_path / "saved")
    assert not [path for path in checkpoint.iterdir() if path.suffix in (".pt", ".pth", ".bin", ".pkl")]
    resumed = train(tmp_path / "resumed", name, resume=str(checkpoint))
    assert values_of(resumed) == values_of(whole)
    for (own, a), b in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), own
    if name != "apollo_adamw":  # there transformers has one epsilon for projected weights and another for the rest
        library = (transformers.Trainer, transformers.TrainingArguments)
        theirs = train(tmp_path / "theirs", name, library=library, save_strategy="no")
        assert values_of(whole) == pytest.approx(values_of(theirs), rel=1e-6)


@pytest.mark.parametrize("name", OF_OBJECTS)
def test_files_of_transformers_are_refused(name, tmp_path):
    with pytest.raises(CheckpointError, match="in the format of transformers cannot restore; use checkpoint_format="):
        train(tmp_path, name, checkpoint_format="transformers")


def replaced(value: Any, name: str) -> Any:
    """The description of a state in which every object is of another class."""
    if isinstance(value, dict):
        return {key: name if key == "object" else replaced(each, name) for key, each in value.items()}
    return [replaced(each, name) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ["subprocess.Popen", "torch.nn.modules.linear.Linear", "galore_torch.no.Such", 3])
def test_a_file_does_not_choose_the_class_of_an_object(name, tmp_path):
    from loopwright.pt.checkpoint.tensors import decode_optimizer, read_optimizer

    whole = train(tmp_path / "whole", "galore_adamw")
    described, tensors = read_optimizer(tmp_path / "whole" / f"checkpoint-{SAVED}")
    assert "GaLoreProjector" in json.dumps(described)
    with pytest.raises(CheckpointError, match="which this optimizer does not have"):
        decode_optimizer(replaced(described, name), tensors, whole.optimizer, whole.model)


def test_an_object_of_another_optimizer_is_refused(tmp_path):
    train(tmp_path / "whole", "galore_adamw")
    with pytest.raises(CheckpointError, match=r"optimizer|group"):
        train(tmp_path / "other", "apollo_adamw", resume=str(tmp_path / "whole" / f"checkpoint-{SAVED}"))
