"""Odd values that arguments accept: two updates and an evaluation, or one clear error, in bounded time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loopwright import LoopwrightError, Seq2SeqTrainingArguments, Trainer, TrainerCallback
from loopwright.args.field import specs
from tests.args.odd_values import VALUES
from tests.models import Regression, regression_data
from tests.pt.outcomes import CLEAR, ending

DATA = regression_data(8)
FIELDS = [name for name, spec in specs(Seq2SeqTrainingArguments).items() if spec.row is None]
COMPILES = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
"""Fields whose accepted values start a compiler, which takes longer than these tests may."""


class Stops(TrainerCallback):
    """Stops a run that has more updates than are needed."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= 2


def arguments(name: str, label: str) -> Seq2SeqTrainingArguments:
    given = {"output_dir": "run", "use_cpu": True, "max_steps": 2, "disable_tqdm": True, "save_strategy": "no"}
    return Seq2SeqTrainingArguments(**{**given, name: VALUES[label]})


def run(name: str, label: str) -> None:
    trainer = Trainer(
        Regression(), arguments(name, label), train_dataset=DATA, eval_dataset=DATA, callbacks=[Stops()],
        compute_metrics=lambda prediction: {"rows": len(prediction.predictions)},
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    trainer.save_model()


def accepted(names: list[str]) -> Iterator[tuple[str, str]]:
    """Values that these fields accept, without those that mean the same."""
    seen: set[str] = set()
    for name in names:
        for label in VALUES:
            try:
                meaning = arguments(name, label).to_json_string()
            except LoopwrightError:
                continue
            if meaning not in seen:
                seen.add(meaning)
                yield name, label


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import what a training needs once, not in the process of every case."""
    here = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("warm"))
    run("seed", "1")
    os.chdir(here)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("adam_beta1", "0"), ("adam_beta2", "0"), ("adam_epsilon", "0"), ("logging_steps", "1e-300"),
        ("save_steps", "5e-324"), ("seed", "2**31"), ("data_seed", "2**31"), ("run_name", "surrogate"),
        ("logging_dir", "long"), ("lr_scheduler_kwargs", "deep dict"), ("warmup_steps", "2**31"),
        ("label_names", "['x']"),
    ],
)  # fmt: skip
def test_some_accepted_values(name: str, label: str) -> None:
    kind, text = ending(lambda: run(name, label), seconds=60)
    assert kind in CLEAR, text


@pytest.mark.grid
@pytest.mark.parametrize("name", [name for name in FIELDS if name not in COMPILES])
def test_all_accepted_values(name: str) -> None:
    wrong = {}
    for field, label in accepted([name]):
        kind, text = ending(lambda field=field, label=label: run(field, label), seconds=60)
        if kind not in CLEAR:
            wrong[label] = f"{kind}: {text[-500:]}"
    assert wrong == {}
