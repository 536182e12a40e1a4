"""A trainer belongs to its user: every name that is not an override point is theirs, as attribute and as method."""

from __future__ import annotations

import importlib.util
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch

import loopwright
from loopwright.core.part import Part

transformers = pytest.importorskip("transformers")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "house.py"
_spec = importlib.util.spec_from_file_location("house_benchmark", SCRIPT)
assert _spec is not None and _spec.loader is not None
house = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(house)
OPTIONS: dict[str, Any] = {
    "use_cpu": True, "disable_tqdm": True, "report_to": [], "max_steps": 4, "save_steps": 2, "eval_strategy": "steps",
    "eval_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    "lr_scheduler_type": "constant", "load_best_model_at_end": True, "speed": "max",
}  # fmt: skip


def names() -> list[str]:
    """Every name of what is behind a trainer, and a thousand that nobody has thought of."""
    live = house.trained(loopwright)
    taken = {*dir(loopwright.Trainer), *vars(house.trained(transformers)), "_loopwright"}
    internals = live._loopwright
    parts = [internals, internals.run, *(each for each in vars(internals).values() if isinstance(each, Part))]
    assert len(parts) == 15  # the internals, the run and thirteen parts
    ours = {name for part in parts for name in (*dir(type(part)), *vars(part)) if not name.startswith("__")}
    draws = random.Random(1)
    others = {"".join(draws.choices(string.ascii_lowercase + "_", k=draws.randint(1, 9))) for _ in range(1000)}
    return sorted((ours | {name for name in others if name.isidentifier() and not name.startswith("__")}) - taken)


def kind_of(methods: list[str], attributes: list[str]) -> type:
    class Theirs(loopwright.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            vars(self).update({name: f"attribute {name}" for name in attributes})

    for name in methods:
        setattr(Theirs, name, lambda self, *args, name=name, **kwargs: f"method {name}")
    return Theirs


def run(kind: type, folder: Path, resume: Any = None, **options: Any) -> Any:
    args = loopwright.TrainingArguments(str(folder), **{**OPTIONS, **options})
    torch.manual_seed(0)
    trainer = kind(house.Line(), args, train_dataset=house.data() * 4, eval_dataset=house.data())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("first", [True, False], ids=["one half", "other half"])
def test_a_subclass_may_use_every_name(first: bool, tmp_path: Path) -> None:
    found = names()
    assert len(found) > 1000
    methods, attributes = (found[::2], found[1::2]) if first else (found[1::2], found[::2])
    plain = run(loopwright.Trainer, tmp_path / "plain")
    kind = kind_of(methods, attributes)
    run(kind, tmp_path / "theirs", max_steps=2)
    trainer = run(kind, tmp_path / "theirs", resume=True)
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    trainer.predict(house.data())
    trainer.save_model(str(tmp_path / "saved"))
    assert torch.equal(trainer.model.layer.weight, plain.model.layer.weight)
    assert [name for name in attributes if vars(trainer)[name] != f"attribute {name}"] == []
    assert [name for name in methods if getattr(trainer, name)() != f"method {name}"] == []


def test_a_trainer_has_the_names_of_transformers_and_few_others() -> None:
    rows = house.table((loopwright,))
    found = dict(rows)
    extra = [mine for what, mine in rows if "not transformers'" in what]
    assert extra[0] <= 15 and extra[1] <= 10
    assert found["classes between Trainer and object"] <= 3
    have, listed = found["override points of transformers: ours / listed"].split(" / ")
    assert have == listed and int(have) >= 65
    assert found["attributes of a subclass: crash / replaced"] == "0 / 0"
    assert found["helper methods of a subclass: crash / replaced"] == "0 / 0"


def test_six_frames_lead_from_train_to_the_model() -> None:
    assert house.frames(house.trained(loopwright)) <= 6
    layered = house.trained(loopwright, prepare=lambda trainer: vars(trainer.args).update(speed="max"))
    assert house.frames(layered) <= 6


def test_the_loop_over_micro_batches_is_written_once() -> None:
    assert house.loops() == 1


def test_what_was_derived_may_be_assigned() -> None:
    trainer = house.trained(loopwright)
    for name in ("tokenizer", "current_gradient_accumulation_steps", "gather_function", "neftune_noise_alpha"):
        setattr(trainer, name, name)
        assert getattr(trainer, name) == name
