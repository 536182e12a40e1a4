"""Weights that were split into several files after saving are accepted only if they are the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from loopwright.core.checkpoint.manager import CheckpointManager
from loopwright.core.checkpoint.manifest import read_manifest
from loopwright.errors import CheckpointError
from loopwright.notices import Notices

TENSORS = {
    "a": np.arange(6, dtype=np.float32), "b/é": np.ones((2, 3), dtype=np.float16), "c": np.array([1, 2]),
    "d": np.zeros((0, 4), dtype=np.float32), "e": np.array([True, False]), "z": np.arange(3, dtype=np.float32),
}  # fmt: skip


def saved(folder: Path, metadata: dict[str, str] | None) -> CheckpointManager:
    """A manager with one checkpoint, whose weights are in one file."""
    manager = CheckpointManager(folder, notices=Notices())

    def write(place: Path) -> None:
        save_file(TENSORS, place / "model.safetensors", metadata=metadata)
        (place / "trainer_state.json").write_text("{}")

    manager.save(5, write, format="transformers", keep=None, protect=[], background=False)
    return manager


def split(folder: Path, changed: dict[str, np.ndarray] | None = None) -> None:
    """Write every tensor of the checkpoint to a file of its own, with an index."""
    tensors = {**load_file(folder / "model.safetensors"), **(changed or {})}
    (folder / "model.safetensors").unlink()
    names = {name: f"model-{index:05d}-of-00006.safetensors" for index, name in enumerate(tensors, 1)}
    for name, file in names.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.mark.parametrize("metadata", [{"format": "pt"}, None])
def test_the_same_weights_in_several_files_are_verified(
    metadata: dict[str, str] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = saved(tmp_path, metadata)
    split(tmp_path / "checkpoint-5")
    assert manager.find(str(tmp_path / "checkpoint-5")) == str(tmp_path / "checkpoint-5")
    assert "was replaced by 6 files" in caplog.text and "same weights" in caplog.text
    manifest = read_manifest(tmp_path / "checkpoint-5")
    assert manifest is not None and "model.safetensors" not in manifest.files
    assert "model.safetensors.index.json" in manifest.files
    caplog.clear()
    assert manager.find(True) == str(tmp_path / "checkpoint-5") and not caplog.text


@pytest.mark.parametrize(
    "changed", [{"a": np.arange(6, dtype=np.float32) + 1e-6}, {"new": np.zeros(1, dtype=np.float32)}]
)
def test_other_weights_are_refused(changed: dict[str, np.ndarray], tmp_path: Path) -> None:
    manager = saved(tmp_path, {"format": "pt"})
    split(tmp_path / "checkpoint-5", changed)
    with pytest.raises(CheckpointError, match=r"model.safetensors is missing"):
        manager.find(str(tmp_path / "checkpoint-5"))


@pytest.mark.parametrize("index", ["{}", "no json", '{"weight_map": 3}', '{"weight_map": {"a": "../a.safetensors"}}',
                                   '{"weight_map": {"a": "missing.safetensors"}}'])  # fmt: skip
def test_an_index_that_is_none_changes_nothing(index: str, tmp_path: Path) -> None:
    manager = saved(tmp_path, {"format": "pt"})
    (tmp_path / "checkpoint-5" / "model.safetensors").unlink()
    (tmp_path / "checkpoint-5" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model.safetensors is missing"):
        manager.find(str(tmp_path / "checkpoint-5"))
