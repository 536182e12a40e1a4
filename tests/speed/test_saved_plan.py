"""The speed plan in a checkpoint, with other values than those saved: refused by name before the first update."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.errors import CheckpointError
from loopwright.pt.loss.saved_parts import PARTS
from tests.core.tampering import VALUES, at, changed, paths_in, tampered
from tests.speed.architectures import build, samples
from tests.speed.training import train

pytest.importorskip("transformers")

NAME = "progress.json"
KINDS = ("null", "a string", "a list", "an object", "true", "negative")
ANYTHING = {"constants", "entries", "paddings", "numbers"}
"""Names under which a plan has what a model was given, or numbers of any size."""


def trained(folder: Path, resume: Any = None) -> Any:
    torch.manual_seed(0)
    options = {"speed": "max", "save_strategy": "steps", "save_steps": 2, "max_steps": 3, "async_save": False}
    return train(build("llama", "causal"), samples(40, "causal"), folder, resume=resume, **options)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    assert trained(folder).plan.changes_anything
    return folder / "checkpoint-2"


def test_values_of_another_kind_are_refused(checkpoint: Path) -> None:
    parts = json.loads((checkpoint / NAME).read_text())["parts"]
    assert PARTS(parts, "the document") is None
    tried, accepted = 0, []
    for path in paths_in(parts["speed"]):
        value = at(parts["speed"], path)
        for kind in KINDS:
            new = changed(parts["speed"], path, VALUES[kind])
            is_alike = type(value) is type(VALUES[kind]) and kind != "negative"
            if new is None or is_alike or ANYTHING & set(path) or path in (("plan",), ("work",)):
                continue
            tried += 1
            if PARTS({**parts, "speed": json.loads(new)}, "the document") is None:
                accepted.append(f"{'.'.join(map(str, path))} {kind}")
    assert not accepted and tried > 150


def test_a_plan_that_was_changed_is_refused_before_the_first_update(checkpoint: Path, tmp_path: Path) -> None:
    own = shutil.copytree(checkpoint.parent, tmp_path / "run") / checkpoint.name
    document = json.loads((own / NAME).read_text())
    document["parts"]["speed"]["verification"]["updates"] = None
    tampered(own, NAME, json.dumps(document).encode())
    with pytest.raises(CheckpointError, match=r"progress\.json.*speed\.verification\.updates is null"):
        trained(own.parent, resume=str(own))
