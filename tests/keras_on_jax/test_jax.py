"""Keras on JAX: the losses of PyTorch, the same on one and two devices, and exact resume."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.frameworks import FRAMEWORKS, rows

ROOT = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("jax", "keras") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def start(folder: Path, devices: int, resume: str = "", dropout: float = 0.0, module: str = "run") -> Any:
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
                   "PYTHONPATH": f"{ROOT}/src:{ROOT}", "JAX_PLATFORMS": "cpu"}  # fmt: skip
    words = [str(folder / "run"), str(folder / f"{bool(resume)}.json"), resume, str(dropout)]
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.keras_on_jax.{module}", *words], env=environment, cwd=ROOT, text=True,
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def finished(process: Any, folder: Path, resume: bool = False) -> Any:
    try:
        _, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]
    return json.loads((folder / f"{resume}.json").read_text())


def test_jax_takes_the_steps_of_torch_on_one_and_two_devices_and_resumes_exactly(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two", "dropout")]
    for folder in folders:
        folder.mkdir()
    started = [start(folders[0], 1), start(folders[1], 2), start(folders[2], 2, dropout=0.3)]
    one, two, dropped = (finished(each, folder) for each, folder in zip(started, folders, strict=True))
    resumed = start(folders[2], 2, str(folders[2] / "run" / "checkpoint-3"), 0.3)
    torch = FRAMEWORKS["torch"]
    trainer = torch.trainer(
        tmp_path / "torch", torch.net(), rows(26), evaluation=rows(7), per_device_train_batch_size=6,
        gradient_accumulation_steps=2, num_train_epochs=2, weight_decay=0.1, warmup_steps=2, save_strategy="no",
        eval_strategy="steps", eval_steps=4, seed=42,
    )  # fmt: skip
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    evaluated = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert (one["devices"], two["devices"], len(losses)) == (1, 2, 6)
    for found in (one, two):
        assert found["loss"] == pytest.approx(losses, rel=1e-4)
        assert [row[0] for row in found["eval"]] == pytest.approx(evaluated, rel=1e-3)
        assert all(row[1] == 7 for row in found["eval"])
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    again = finished(resumed, folders[2], resume=True)
    assert again["weights"] == dropped["weights"] and again["loss"] == dropped["loss"]


def test_jax_trains_evaluates_saves_and_resumes_without_tensorflow(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("with", "without")]
    for folder in folders:
        folder.mkdir()
    there, bare = start(folders[0], 2, dropout=0.3), start(folders[1], 2, dropout=0.3, module="without_tensorflow")
    expected, found = finished(there, folders[0]), finished(bare, folders[1])
    assert found == expected and len(found["loss"]) == 6 and len(found["eval"]) == 2
    saved = folders[1] / "run" / "checkpoint-3"
    resumed = start(folders[1], 2, str(saved), 0.3, module="without_tensorflow")
    assert finished(resumed, folders[1], resume=True) == expected
    assert (folders[1] / "run" / "model.keras").is_file() and (folders[1] / "run" / "model.safetensors").is_file()


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_jax_takes_a_tf_data_pipeline_where_tensorflow_is_installed(tmp_path: Path) -> None:
    samples, pipeline = finished(start(tmp_path, 1, module="pipeline"), tmp_path)
    assert pipeline == samples and len(samples) == 6


def test_random_streams_of_a_checkpoint_that_held_tensorflows_too() -> None:
    from loopwright.keras.rng import RandomStreams

    streams = RandomStreams()
    seeds = [np.array([3, 4], np.uint32)]
    now = streams.to_json({"python": random.getstate(), "numpy": np.random.get_state(), "variables": seeds})
    before = {**now, "tensorflow": [["int64", [1, 2, 3]], *now["keras"]]}
    del before["keras"]
    for encoded in (now, before):
        assert [each.tolist() for each in streams.from_json(json.loads(json.dumps(encoded)))["variables"]] == [[3, 4]]
