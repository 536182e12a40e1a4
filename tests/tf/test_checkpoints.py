"""Checkpoints: number formats, XLA, what a file holds, exports, and the folders of the old trainer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from loopwright import CheckpointError, NonFiniteError

from .tools import MARKS, TF, arrays, kept, logged, rows, trainer, weights

pytestmark = MARKS


@pytest.mark.parametrize("how", ["bf16", "fp16", "xla"])
def test_resume_is_exact_in_every_number_format_and_with_xla(how: str, tmp_path: Any) -> None:
    options = {"data": rows(14), "max_steps": 6, "save_strategy": "steps", "save_steps": 3, how: True,
               "async_save": how != "xla"}  # fmt: skip

    def make() -> Any:
        args = TF.arguments(tmp_path, **{name: value for name, value in options.items() if name != "data"})
        with args.strategy.scope():
            model = TF.net(dropout=0.2)
        TF.seed()
        return TF.trainer_class()(model, args, train_dataset=options["data"])

    whole = make()
    whole.train()
    again = make()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert logged(again, "loss") == logged(whole, "loss")
    for mine, theirs in zip(weights(again), weights(whole), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    slots = [[v.numpy() for v in each.optimizer.variables] for each in (whole, again)]
    assert all((a == b).all() for a, b in zip(*slots, strict=True))
    if how == "xla":  # the last batch of an epoch is padded: one shape, one compilation
        plain = trainer(tmp_path / "plain", TF.net(), rows(14), max_steps=4)
        padded = trainer(tmp_path / "padded", TF.net(), rows(14), max_steps=4, xla=True)
        plain.train()
        padded.train()
        assert logged(padded, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-5)


def test_a_checkpoint_holds_every_variable_and_its_manifest_knows_them(tmp_path: Any) -> None:
    made = trainer(tmp_path, TF.net(dropout=0.2), max_steps=2, save_strategy="steps", save_steps=2)
    made.train()
    folder = tmp_path / "checkpoint-2"
    manifest = json.loads((folder / "manifest.json").read_text())
    names = [name for name in manifest["tensors"] if name.startswith("model.safetensors/")]
    assert len(names) == 5 and any("seed_generator" in name for name in names)
    assert {"trainer_state.json", "progress.json", "scheduler.json", "rng.json", "arguments.json"} <= set(
        manifest["files"]
    )
    assert any("iteration" in name for name in manifest["tensors"])


def test_a_checkpoint_that_does_not_fit_or_was_cut_says_so(tmp_path: Any) -> None:
    made = trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    made.train()
    other = trainer(tmp_path, TF.tokens(), max_steps=2)
    with pytest.raises(CheckpointError, match="do not match|have different shapes"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    only = trainer(tmp_path / "only", max_steps=2, save_strategy="steps", save_steps=2, save_only_model=True)
    only.train()
    assert not (tmp_path / "only" / "checkpoint-2" / "optimizer.safetensors").exists()
    with pytest.raises(CheckpointError, match="nothing to resume from"):
        trainer(tmp_path / "only").train(resume_from_checkpoint=str(tmp_path / "only" / "checkpoint-2"))


def test_save_model_writes_a_keras_file_that_loads(tmp_path: Any) -> None:
    import keras

    made = trainer(tmp_path, max_steps=1)
    made.train()
    made.save_model(str(tmp_path / "export"))
    loaded = keras.models.load_model(str(tmp_path / "export" / "model.keras"))
    x = arrays(3)[0]
    np.testing.assert_allclose(np.asarray(loaded(x)), np.asarray(made.model(x)), atol=1e-6)


def test_signals_of_a_second_train_start_with_no_past_and_rollback_works(tmp_path: Any) -> None:
    """The same trainer trains twice: the second run starts from where the weights are, at step 0."""
    made = trainer(tmp_path, max_steps=2)
    made.train()
    made.train()
    assert made.state.global_step == 2 and len(logged(made, "loss")) == 2


def test_folders_of_the_old_trainer_can_be_resumed_from(tmp_path: Any, caplog: Any) -> None:
    """tf.train.CheckpointManager with `model` and `optimizer`, as the old trainer wrote it."""
    import keras
    import tensorflow as tf

    model = TF.net()
    optimizer = keras.optimizers.AdamW(1e-2)
    optimizer.build(model.trainable_variables)
    optimizer.apply([tf.ones_like(v.value) for v in model.trainable_variables], model.trainable_variables)
    optimizer.iterations.assign(2)
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(optimizer=optimizer, model=model), str(tmp_path / "old" / "checkpoint"), max_to_keep=2
    )
    manager.save()
    saved = [variable.numpy() for variable in model.trainable_variables]
    made = trainer(tmp_path / "new", TF.net(), data=rows(12), max_steps=3)
    steps: list[Any] = []

    def begin(*args: Any, **kwargs: Any) -> None:
        steps.append((made.state.global_step, weights(made), int(made.optimizer.iterations)))

    made.callback_handler.callbacks[0].on_epoch_begin = begin
    made.train(resume_from_checkpoint=str(tmp_path / "old" / "checkpoint"))
    step, at_start, iterations = steps[0]
    assert (step, iterations, made.state.global_step) == (2, 2, 3)
    for mine, theirs in zip(at_start, saved, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert "is a TensorFlow checkpoint without data position" in caplog.text


def test_folders_with_slots_of_legacy_optimizers_can_be_resumed_from(tmp_path: Any) -> None:
    """What the old trainer really wrote: a tf_keras model, and Adam's moments beside its variables."""
    import sys

    tf_keras = pytest.importorskip("tf_keras", reason="tf_keras is not installed")
    import tensorflow as tf

    def legacy() -> Any:
        layers = tf_keras.layers
        model = tf_keras.Sequential([layers.Input((4,)), layers.Dense(8, activation="tanh"), layers.Dense(1)])
        model.compile(loss="mse")
        return model

    try:
        model, optimizer = legacy(), tf_keras.optimizers.legacy.Adam(1e-2)
        for step in range(2):
            gradients = [tf.ones_like(v) * (step + 1.0) for v in model.trainable_variables]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)
        tf.train.CheckpointManager(checkpoint, str(tmp_path / "old"), max_to_keep=1).save()
        made = trainer(tmp_path / "new", legacy(), data=arrays(12), max_steps=2)
        made.train(resume_from_checkpoint=str(tmp_path / "old"))  # nothing is left to train
        assert made.state.global_step == int(made.optimizer.iterations) == 2
        for mine, theirs in zip(weights(made), model.trainable_variables, strict=True):
            np.testing.assert_array_equal(mine, theirs.numpy())
        for index, variable in enumerate(model.trainable_variables):
            theirs = optimizer.get_slot(variable, "m").numpy()
            np.testing.assert_array_equal(made.optimizer._momentums[index].numpy(), theirs)
    finally:
        sys.modules.pop("tf_keras", None)


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_updates_that_are_not_finite(policy: str, tmp_path: Any) -> None:
    x, y = arrays(12)
    x[5] = np.nan
    made = trainer(tmp_path, data=(x, y), max_steps=3, on_nonfinite=policy, train_sampling_strategy="sequential")
    clean = trainer(tmp_path / "clean", data=(x[:4], y[:4]), max_steps=1, max_grad_norm=1.0)
    if policy == "skip":
        made.train()
        assert logged(made, "nonfinite_steps") == [1]
        assert all(np.isfinite(each).all() for each in weights(made))
        assert int(made.optimizer.iterations) == 2
        return
    with pytest.raises(NonFiniteError, match="at step 2"):
        made.train()
    incident = json.loads((tmp_path / "incident-step-2" / "incident.json").read_text())
    assert incident["sample_ids"] == [4, 5, 6, 7] and incident["bad_gradients"] and incident["losses"] == ["nan"]
    assert all(np.isfinite(each).all() for each in weights(made)) and clean is not None


def test_the_loss_jumps_and_the_run_goes_back(tmp_path: Any) -> None:
    x, y = arrays(40)
    y[24:28] += 1e4
    made = trainer(
        tmp_path, data=(x, y), max_steps=8, on_spike="rollback", save_strategy="steps", save_steps=2,
        train_sampling_strategy="sequential", async_save=False,
    )  # fmt: skip
    made.train()
    losses = logged(made, "loss")
    assert max(losses[-2:]) < 100 and made.state.global_step == 8
    assert kept(tmp_path)
