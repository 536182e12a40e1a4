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
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.xdist_group("jax"),
]
HAS_TENSORFLOW = find_spec("tensorflow") is not None
Job = tuple[Path, str, float]
"""The folder of a run, the checkpoint it resumes from, and its dropout."""


def start(devices: int, *jobs: Job, module: str = "run") -> Any:
    """Runs one after the other, in one process with so many devices."""
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
                   "PYTHONPATH": f"{ROOT}/src:{ROOT}", "JAX_PLATFORMS": "cpu"}  # fmt: skip
    words = [
        each
        for folder, resume, dropout in jobs
        for each in (str(folder / "run"), str(folder / f"{bool(resume)}.json"), resume, str(dropout))
    ]
    for folder, _, _ in jobs:
        folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.keras_on_jax.{module}", *words], env=environment, cwd=ROOT, text=True,
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def wait_for(process: Any) -> None:
    try:
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]


def result(folder: Path, resumed: bool = False) -> Any:
    return json.loads((folder / f"{resumed}.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on one device and on two, with dropout, and resumed; on one device also with a pipeline."""
    place = tmp_path_factory.mktemp("jax")
    one = start(1, (place / "one", "", 0.0), module="pipeline" if HAS_TENSORFLOW else "run")
    dropout = place / "dropout"
    saved = str(dropout / "run" / "checkpoint-3")
    two = start(2, (place / "two", "", 0.0), (dropout, "", 0.3), (dropout, saved, 0.3))
    for each in (one, two):
        wait_for(each)
    return place


def test_jax_takes_the_steps_of_torch_on_one_and_two_devices_and_resumes_exactly(folder: Path, tmp_path: Path) -> None:
    torch = FRAMEWORKS["torch"]
    trainer = torch.trainer(
        tmp_path / "torch", torch.net(), rows(26), evaluation=rows(7), per_device_train_batch_size=6,
        gradient_accumulation_steps=2, num_train_epochs=2, weight_decay=0.1, warmup_steps=2, save_strategy="no",
        eval_strategy="steps", eval_steps=4, seed=42,
    )  # fmt: skip
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    evaluated = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    one, two, dropped = (result(folder / name) for name in ("one", "two", "dropout"))
    assert (one["devices"], two["devices"], len(losses)) == (1, 2, 6)
    for found in (one, two):
        assert found["loss"] == pytest.approx(losses, rel=1e-4)
        assert [row[0] for row in found["eval"]] == pytest.approx(evaluated, rel=1e-3)
        assert all(row[1] == 7 for row in found["eval"])
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    again = result(folder / "dropout", resumed=True)
    assert again["weights"] == dropped["weights"] and again["loss"] == dropped["loss"]


def test_jax_trains_evaluates_saves_and_resumes_without_tensorflow(folder: Path, tmp_path: Path) -> None:
    """Here the resumed run is a process of its own."""
    bare = tmp_path / "without"
    wait_for(start(2, (bare, "", 0.3), module="without_tensorflow"))
    expected = result(folder / "dropout")
    assert result(bare) == expected and len(expected["loss"]) == 6 and len(expected["eval"]) == 2
    wait_for(start(2, (bare, str(bare / "run" / "checkpoint-3"), 0.3), module="without_tensorflow"))
    assert result(bare, resumed=True) == expected
    assert (bare / "run" / "model.keras").is_file() and (bare / "run" / "model.safetensors").is_file()


@pytest.mark.skipif(not HAS_TENSORFLOW, reason="TensorFlow is not installed")
def test_jax_takes_a_tf_data_pipeline_where_tensorflow_is_installed(folder: Path) -> None:
    samples, pipeline = json.loads((folder / "one" / "False.json.pipeline").read_text())
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
