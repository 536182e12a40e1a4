"""Keras's callbacks under the trainer, our reporters in `fit`, summary writers, optimizers and schedules of Keras."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from loopwright import ArgumentsError, KerasCallbackAdapter

from .tools import MARKS, TF, arrays, logged, rows, trainer

pytestmark = MARKS


def test_a_keras_callback_sees_the_whole_run(tmp_path: Any) -> None:
    import keras

    class Recorder(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.events: list[str] = []
            self.logs: dict[str, Any] = {}

        def on_train_begin(self, logs: Any = None) -> None:
            assert self.model is not None and self.params["epochs"] == 2
            self.events.append("train")

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.events.append(f"epoch {epoch}")

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.events.append(f"batch {batch}")

        def on_test_end(self, logs: Any = None) -> None:
            assert "loss" in logs
            self.events.append("test")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.events.append(f"end {epoch}")
            self.logs = dict(logs)

        def on_train_end(self, logs: Any = None) -> None:
            self.events.append("done")

    recorder = Recorder()
    made = trainer(
        tmp_path, data=rows(8), num_train_epochs=2, max_steps=-1, evaluation=rows(4), eval_strategy="epoch",
        callbacks=[recorder],
    )  # fmt: skip
    made.train()
    epoch = ["batch 0", "batch 1", "test"]
    assert recorder.events == ["train", "epoch 0", *epoch, "end 0", "epoch 1", *epoch, "end 1", "done"]
    assert {"loss", "val_loss", "learning_rate"} <= set(recorder.logs)


def test_early_stopping_of_keras_stops_the_run(tmp_path: Any) -> None:
    import keras

    scores = iter([3.0, 3.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    stopper = KerasCallbackAdapter(keras.callbacks.EarlyStopping(monitor="val_score", patience=2, mode="min"))
    made = trainer(
        tmp_path, data=rows(4), num_train_epochs=6, max_steps=-1, evaluation=rows(4), eval_strategy="epoch",
        callbacks=[stopper], compute_metrics=lambda p: {"score": next(scores)},
    )  # fmt: skip
    made.train()
    assert made.state.global_step == 5
    with pytest.raises(ArgumentsError, match="needs a keras.callbacks.Callback"):
        KerasCallbackAdapter(object())


def test_our_reporters_work_in_fit(tmp_path: Any) -> None:
    from loopwright.keras.callbacks import reporter_in_fit
    from loopwright.reporters.base import Reporter

    class Kept(Reporter):
        name = "kept"

        def __init__(self) -> None:
            self.rows: list[Any] = []

        def start(self, run: Any) -> None:
            self.rows.append("start")

        def log(self, values: dict[str, Any], step: int) -> None:
            self.rows.append((step, sorted(values)))

        def finish(self, status: str) -> None:
            self.rows.append(status)

    kept = Kept()
    model = TF.net()
    model.compile(loss="mse", optimizer="sgd")
    x, y = arrays(8)
    model.fit(x, y, batch_size=4, validation_data=(x, y), verbose=0, callbacks=[reporter_in_fit(kept)])
    assert kept.rows[:2] == ["start", (1, ["train/loss"])] and kept.rows[-1] == "finished"
    assert kept.rows[3] == (2, ["eval/loss", "train/epoch", "train/loss"])


def test_fit_reporters_by_name(tmp_path: Any) -> None:
    pytest.importorskip("tensorboard")
    from loopwright.keras.callbacks import fit_reporters

    model = TF.net()
    model.compile(loss="mse", optimizer="sgd")
    args = TF.arguments(tmp_path, logging_dir=str(tmp_path / "tb"))
    model.fit(*arrays(8), batch_size=4, verbose=0, callbacks=fit_reporters(["tensorboard"], args=args))
    assert list((tmp_path / "tb").rglob("events.out.tfevents.*"))


def test_a_summary_writer_of_the_users(tmp_path: Any) -> None:
    pytest.importorskip("tensorboard")
    import tensorflow as tf

    writer = tf.summary.create_file_writer(str(tmp_path / "tb"))
    made = trainer(tmp_path, TF.net(), max_steps=2)
    args = TF.arguments(tmp_path, max_steps=2, save_strategy="no")
    made = TF.trainer_class()(TF.net(), args, rows(8), tb_writer=writer)
    made.train()
    (path,) = (tmp_path / "tb").glob("events*")
    assert b"learning_rate" in path.read_bytes()


# ---- optimization_tf -------------------------------------------------------------------------------------------------


def test_create_optimizer_and_warm_up() -> None:
    from loopwright import WarmUp, create_optimizer

    optimizer, schedule = create_optimizer(1.0, num_train_steps=10, num_warmup_steps=4, weight_decay_rate=0.1)
    assert [round(float(schedule(step)), 4) for step in (0, 2, 4, 7, 10)] == [0.0, 0.5, 1.0, 0.5, 0.0]
    assert isinstance(schedule, WarmUp) and type(optimizer).__name__ == "AdamWeightDecay"
    again = WarmUp(**schedule.get_config())
    assert float(again(2)) == float(schedule(2))
    plain, straight = create_optimizer(2.0, 10, 0, min_lr_ratio=0.5, power=2.0)
    assert type(plain).__name__ == "Adam" and float(straight(10)) == 1.0


def test_weight_decay_leaves_out_what_patterns_name() -> None:
    import keras
    import tensorflow as tf

    from loopwright import AdamWeightDecay

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.LayerNormalization()])
    optimizer = AdamWeightDecay(
        0.5, weight_decay_rate=0.1, exclude_from_weight_decay=["layer_normalization", "bias"]
    )
    before = [variable.numpy() for variable in model.trainable_variables]
    optimizer.apply([tf.zeros_like(v.value) for v in model.trainable_variables], model.trainable_variables)
    for old, variable in zip(before, model.trainable_variables, strict=True):
        expected = old * (1 - 0.5 * 0.1) if variable.path.endswith("kernel") else old
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)
    again = AdamWeightDecay.from_config(optimizer.get_config())
    assert again.weight_decay_rate == 0.1 and again._exclude == ["layer_normalization", "bias"]


def test_gradient_accumulator() -> None:
    import tensorflow as tf

    from loopwright import GradientAccumulator

    accumulator = GradientAccumulator()
    with pytest.raises(ValueError, match="is empty"):
        _ = accumulator.gradients
    accumulator([tf.constant([1.0, 2.0]), None])
    accumulator([tf.IndexedSlices(tf.constant([3.0]), tf.constant([1]), tf.constant([2])), None])
    assert int(accumulator.step) == 2
    np.testing.assert_array_equal(accumulator.gradients[0].numpy(), [1.0, 5.0])
    accumulator.reset()
    assert int(accumulator.step) == 0 and not accumulator.gradients[0].numpy().any()
    with pytest.raises(ValueError, match="expected 2 gradients, got 1"):
        accumulator([tf.constant([1.0])])


def test_a_schedule_of_keras_is_honoured(tmp_path: Any) -> None:
    from loopwright import create_optimizer

    pair = create_optimizer(0.4, num_train_steps=4, num_warmup_steps=0)
    made = trainer(tmp_path, max_steps=4, optimizers=pair, lr_scheduler_type="constant")
    made.train()
    assert logged(made, "learning_rate") == pytest.approx([0.4, 0.3, 0.2, 0.1])
    import keras

    made = trainer(tmp_path, max_steps=2, optimizers=(keras.optimizers.SGD(0.2), None))
    made.train()
    assert type(made.optimizer).__name__ == "SGD"
    assert logged(made, "learning_rate") == pytest.approx([0.2, 0.1])


def test_importing_loopwright_and_a_tensorboard_writer_imports_no_tensorflow(tmp_path: Any) -> None:
    code = (
        "import sys, loopwright\n"
        "from loopwright import TFTrainingArguments, KerasCallbackAdapter, Trainer, TensorBoardCallback\n"
        "from loopwright.reporters.base import RunInfo\n"
        "args = TFTrainingArguments('run')\n"
        f"r = TensorBoardCallback().reporter; r.start(RunInfo('x', logging_dir={str(tmp_path)!r}))\n"
        "r.log({'a': 1.0}, 1); r.finish('finished')\n"
        "print('tensorflow' in sys.modules, 'keras' in sys.modules)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert ended.stdout.split() == ["False", "False"], ended.stderr[-2000:]
