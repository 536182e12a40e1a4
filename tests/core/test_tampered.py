"""A document of a checkpoint with other values than those saved, under a manifest that agrees with it.

Training either stops with an error that names the document, or is the one that was saved; a difference is reported.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from core.numpy_runs import outcome, samples, trainer_of
from core.tampering import PARTS, SavedRun, sign, tampered

from loopwright.core.checkpoint import reading
from loopwright.core.checkpoint.folder import STATE
from loopwright.errors import CheckpointError

FREE = re.compile(
    r"arguments\.json|log_history\.|stateful_callbacks|best_metric|best_model_checkpoint null|total_flos|"
    r"(meter|recent).* (negative|fraction|a list)|meter.(bad|first_bad|nonfinite)|momentum (true|fraction)|"
    r"(learning_rate|base) fraction|best_global_step null"
)
"""See `SavedRun.free`."""


def make(folder: Path, **options: Any) -> Any:
    return trainer_of(
        folder, eval_data=samples(6, seed=2), save_strategy="steps", save_steps=4, eval_strategy="steps", eval_steps=4,
        load_best_model_at_end=True, async_save=False, max_steps=10, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run with a checkpoint of step 4, and what it became."""
    folder = tmp_path_factory.mktemp("saved")
    whole = make(folder)
    whole.train()
    shutil.rmtree(folder / "checkpoint-8")
    shutil.rmtree(folder / "checkpoint-10")
    return folder, computed(whole)


def computed(trainer: Any) -> dict[str, Any]:
    """What the run has computed: without rows that were logged before it resumed."""
    found = outcome(trainer)
    rows = [row for row in found["log_history"] if isinstance(row.get("step"), int) and row["step"] > 4]
    return {**{name: found[name] for name in ("weights", "velocity", "learning_rate", "random")}, "rows": rows}


@pytest.fixture(scope="module")
def run(saved: Any) -> SavedRun:
    return SavedRun(saved[0], "checkpoint-4", saved[1], make, computed, FREE)


def test_some_changes_of_documents_are_named_or_do_no_harm(
    run: SavedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run.wrong(tmp_path / "run", caplog, first=5, step=60) == {}


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_change_of_documents_is_named_or_does_no_harm(
    part: int, run: SavedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run.wrong(tmp_path / "run", caplog, first=part, step=PARTS) == {}


# ---- files that are something else -----------------------------------------------------------------------------------


def replaced(path: Path, kind: str, elsewhere: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            here = os.getcwd()
            os.chdir(path.parent)  # the path of a socket is short
            made.bind(path.name)
            os.chdir(here)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        elsewhere.write_bytes(content)
        path.symlink_to(elsewhere if kind == "link" else Path("..") / ".." / elsewhere.name)


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "loop", "device", "link", "relative link"])
@pytest.mark.parametrize("name", ["trainer_state.json", "rng.json", "model.safetensors"])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_what_is_not_a_file_of_the_checkpoint_is_refused_by_name(
    with_manifest: bool, name: str, kind: str, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PAUSES", ())
    place = tmp_path / "run"
    shutil.copytree(saved[0], place)
    replaced(place / "checkpoint-4" / name, kind, tmp_path / "elsewhere")
    if not with_manifest:
        (place / "checkpoint-4/manifest.json").unlink()
    with pytest.raises(CheckpointError, match=name):
        make(place).train(resume_from_checkpoint=str(place / "checkpoint-4"))


def test_links_of_the_hub_cache_are_followed(saved: Any, tmp_path: Path) -> None:
    folder = tmp_path / "models--x/snapshots/abc/checkpoint-4"
    shutil.copytree(saved[0] / "checkpoint-4", folder)
    (tmp_path / "models--x/blobs").mkdir()
    for path in list(folder.iterdir()):
        path.rename(tmp_path / "models--x/blobs" / path.name)
        path.symlink_to(Path("../../../blobs") / path.name)
    trainer = make(tmp_path / "run")
    trainer.train(resume_from_checkpoint=str(folder))
    assert computed(trainer)["weights"] == saved[1]["weights"]


# ---- the best model --------------------------------------------------------------------------------------------------


def with_best(saved: Any, place: Path, best: str) -> Path:
    shutil.copytree(saved[0], place)
    state = json.loads((place / "checkpoint-4" / STATE).read_text())
    assert state["best_global_step"] == 4
    state["best_model_checkpoint"], state["best_metric"] = best, -1e9  # nothing will be better
    tampered(place / "checkpoint-4", STATE, json.dumps(state).encode())
    return place / "checkpoint-4"


@pytest.mark.parametrize(
    "best",
    ["{trap}", "{trap}/../trap/checkpoint-4", "file://{trap}", "memory://trap/checkpoint-4", "checkpoint-4/../../trap",
     "/etc", "", "..", "{run}/other", "C:\\\\runs\\\\other"],
)  # fmt: skip
def test_a_best_model_elsewhere_is_not_loaded(
    best: str, saved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, trap = tmp_path / "run", tmp_path / "trap"
    shutil.copytree(saved[0] / "checkpoint-4", trap / "checkpoint-4")
    resumed = with_best(saved, run, best.format(trap=trap, run=run))
    trainer = make(run)
    trainer.train(resume_from_checkpoint=str(resumed))
    is_own = trainer.state.best_model_checkpoint == str(run / "checkpoint-4")
    assert is_own or "is not a checkpoint of this run" in caplog.text
    assert is_own or trainer.state.best_model_checkpoint is None


@pytest.mark.parametrize("best", ["/home/other/run/checkpoint-4", "D:\\\\run\\\\checkpoint-4", "s3://bucket/checkpoint-4"])
def test_the_best_model_of_a_run_that_was_moved_is_found_by_name(best: str, saved: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    resumed = with_best(saved, run, best)
    trainer = make(run)
    trainer.train(resume_from_checkpoint=str(resumed))
    assert trainer.state.best_model_checkpoint == str(run / "checkpoint-4")


def test_the_best_model_next_to_the_checkpoint_of_another_folder_is_loaded(saved: Any, tmp_path: Path) -> None:
    resumed = with_best(saved, tmp_path / "before", str(tmp_path / "before/checkpoint-4"))
    trainer = make(tmp_path / "after")
    trainer.train(resume_from_checkpoint=str(resumed))
    assert trainer.state.best_model_checkpoint == str(resumed)


def test_a_link_to_another_folder_is_not_the_best_model(
    saved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    resumed = with_best(saved, tmp_path / "before", str(run / "checkpoint-4"))
    run.mkdir()
    (run / "checkpoint-4").symlink_to(saved[0] / "checkpoint-4")
    trainer = make(run)
    trainer.train(resume_from_checkpoint=str(resumed))
    assert trainer.state.best_model_checkpoint is None and "is not a checkpoint of this run" in caplog.text


def test_another_checkpoint_than_the_best_step_is_refused(saved: Any, tmp_path: Path) -> None:
    resumed = with_best(saved, tmp_path / "run", str(tmp_path / "run/checkpoint-3"))
    with pytest.raises(CheckpointError, match="best_model_checkpoint .* but best_global_step is 4"):
        make(tmp_path / "run").train(resume_from_checkpoint=str(resumed))


def test_a_header_of_absurd_size_is_refused(saved: Any, tmp_path: Path) -> None:
    shutil.copytree(saved[0], tmp_path / "run")
    path = tmp_path / "run/checkpoint-4/model.safetensors"
    content = (1 << 62).to_bytes(8, "little") + path.read_bytes()[8:]
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="model.safetensors"):
        sign(path.parent)
