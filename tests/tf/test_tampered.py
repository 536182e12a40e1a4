"""Documents of a TensorFlow checkpoint with other values than those saved, under a manifest that agrees with them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.core.tampering import PARTS, SavedRun

from .tools import MARKS, TF, logged, rows, trainer, weights

pytestmark = MARKS

FREE = re.compile(
    r"arguments\.json|log_history\.|stateful_callbacks|best_|total_flos|meter|recent|options\.|samples_seen|"
    r"parts\.loss|(learning_rate|base) fraction"
)
"""See `SavedRun.free`."""


def make(folder: Path) -> Any:
    TF.seed()
    return trainer(
        folder, TF.net(dropout=0.2), rows(8), max_steps=3, save_strategy="steps", save_steps=2, async_save=False
    )


def computed(made: Any) -> dict[str, Any]:
    return {"weights": [each.tolist() for each in weights(made)], "losses": logged(made, "loss")[2:]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    folder = tmp_path_factory.mktemp("tensorflow") / "run"
    whole = make(folder)
    whole.train()
    shutil.rmtree(folder / "checkpoint-3", ignore_errors=True)
    return SavedRun(folder, "checkpoint-2", computed(whole), make, computed, FREE)


def test_some_changes_of_documents_are_named_or_do_no_harm(
    saved: SavedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    count = len(saved.cases())
    assert saved.wrong(tmp_path / "run", caplog, first=7, step=count // 6) == {}


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_change_of_documents_is_named_or_does_no_harm(
    part: int, saved: SavedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert saved.wrong(tmp_path / "run", caplog, first=part, step=PARTS) == {}
