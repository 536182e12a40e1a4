"""Numbers of `fit`, and what only `fit` would do."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from loopwright import DataError, ModelError

from .tools import MARKS, TF, arrays, logged, trainer, two_replicas, weights

pytestmark = MARKS

PLAIN = {"optim": "sgd", "learning_rate": 0.02, "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
         "train_sampling_strategy": "sequential", "max_steps": 6}  # fmt: skip


def squared(labels: Any, outputs: Any) -> Any:
    import keras

    return keras.ops.mean(keras.ops.square(labels - outputs), axis=-1)


def mean_squared(labels: Any, outputs: Any) -> Any:
    import keras

    return keras.ops.mean(keras.ops.square(labels - outputs))


def fitted(model: Any, x: Any, y: Any, *, optimizer: Any = None, **compiled: Any) -> tuple[Any, float]:
    import keras

    model.compile(optimizer or keras.optimizers.SGD(0.02), **compiled)
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return [each.numpy() for each in model.trainable_variables], model.evaluate(x, y, batch_size=4, verbose=0)


@pytest.mark.parametrize(
    ("loss", "factor", "columns"),
    [(squared, None, 1), (mean_squared, None, 2), ("mse", 0.25, 2), ("mse", [0.25], 2)],
    ids=["function of labels without a last dimension", "one number", "weight", "list of weights"],
)
def test_compiled_losses_are_those_of_fit(loss: Any, factor: Any, columns: int, tmp_path: Any) -> None:
    x, y = arrays(10)
    y = y[:, 0] if columns == 1 else y
    expected, evaluated = fitted(TF.net(), x, y, loss=loss, loss_weights=factor)
    model = TF.net(compiled=False)
    model.compile(loss=loss, loss_weights=factor)
    made = trainer(tmp_path, model, (x, y), evaluation=(x, y), **PLAIN)
    made.train()
    for mine, theirs in zip(weights(made), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    assert made.evaluate()["eval_loss"] == pytest.approx(evaluated, rel=1e-4)


def two_outputs(loss: Any) -> Any:
    import keras

    keras.utils.set_random_seed(3)
    x = keras.Input((4,), name="x")
    hidden = keras.layers.Dense(3)(x)
    model = keras.Model(x, [keras.layers.Dense(1, name="a")(hidden), keras.layers.Dense(1, name="b")(hidden)])
    model.compile(loss=loss)
    return model


@pytest.mark.parametrize("loss", ["mse", ["mse", "mae"], {"a": "mse", "b": "mae"}], ids=["one", "list", "dict"])
def test_losses_of_several_outputs_on_two_replicas_are_those_of_fit(loss: Any, tmp_path: Any) -> None:
    x, y = arrays(10)
    expected, _ = fitted(two_outputs(loss), x, (y, 2 * y), loss=loss)
    for strategy, size in ((None, 4), (two_replicas(), 2)):
        options = {**PLAIN, "per_device_train_batch_size": size, "strategy": strategy}
        made = trainer(tmp_path, two_outputs(loss), (x, (y, 2 * y)), **options)
        made.train()
        for mine, theirs in zip(weights(made), expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{"clipnorm": 0.3}, {"clipvalue": 0.1}, {"loss_scale_factor": 4.0}], ids=str)
def test_options_of_an_optimizer_count_on_any_number_of_replicas(options: Any, tmp_path: Any) -> None:
    import keras

    x, y = arrays(8)
    expected, _ = fitted(TF.net(), x, y, loss="mse", optimizer=keras.optimizers.SGD(0.02, **options))
    for strategy, size in ((None, 4), (two_replicas(), 2)):
        with strategy.scope() if strategy else keras.name_scope("one"):
            optimizer = keras.optimizers.SGD(0.02, **options)
        given = {**PLAIN, "max_steps": 4, "per_device_train_batch_size": size, "strategy": strategy}
        made = trainer(tmp_path, None, (x, y), optimizers=(optimizer, None), **given)
        made.train()
        for mine, theirs in zip(weights(made), expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_sum_divided_by_num_items_and_small_weights_do_not_depend_on_the_split(tmp_path: Any) -> None:
    import tensorflow as tf

    def divided(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
        return tf.reduce_sum((outputs - labels) ** 2) / num_items_in_batch

    def weighted(outputs: Any, labels: Any) -> Any:
        return tf.reduce_sum(0.01 * (outputs - labels) ** 2), 0.01 * tf.cast(tf.shape(outputs)[0], tf.float32)

    losses = []
    for function, size in ((None, 8), (divided, 8), (divided, 2), (weighted, 2)):
        options = {**PLAIN, "max_steps": 2, "per_device_train_batch_size": size}
        options |= {"gradient_accumulation_steps": 8 // size, "compute_loss_func": function}
        made = trainer(tmp_path, TF.net(compiled=function is None), arrays(10), **options)
        made.train()
        losses.append(logged(made, "loss"))
    for each in losses[1:]:
        assert each == pytest.approx(losses[0], rel=1e-4)


def test_ignored_labels_count_neither_in_plain_losses_nor_in_losses_per_token(tmp_path: Any) -> None:
    import keras

    def per_token(outputs: Any, labels: Any) -> Any:
        safe = keras.ops.where(labels == -100, 0, labels)
        return keras.losses.sparse_categorical_crossentropy(safe, outputs, from_logits=True)

    ids = np.arange(1, 25).reshape(6, 4) % 11
    labels = np.where(ids % 3 == 0, -100, ids)
    losses = []
    for ignored in (-100, None):
        model = TF.tokens()
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=ignored))
        made = trainer(tmp_path, model, (ids, labels), max_steps=1)
        made.train()
        losses += logged(made, "loss")
    made = trainer(tmp_path, TF.tokens(), (ids, labels), max_steps=1, compute_loss_func=per_token)
    made.train()
    assert losses + logged(made, "loss") == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_label_smoothing_counts_what_the_compiled_loss_counts(tmp_path: Any) -> None:
    import keras

    def net(**options: Any) -> Any:
        keras.utils.set_random_seed(0)
        layers = [keras.Input((4,), dtype="int32"), keras.layers.Embedding(11, 6, mask_zero=True)]
        model = keras.Sequential([*layers, keras.layers.Dense(11)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=5)
        model.compile(loss=[loss], loss_weights=[0.5], **options)
        return model

    ids = np.arange(24).reshape(6, 4) % 11
    for labels in (ids, ids[..., None]):
        losses = []
        for factor in (0.0, 1e-9):
            made = trainer(tmp_path, net(), (ids, labels), label_smoothing_factor=factor, **{**PLAIN, "max_steps": 1})
            made.train()
            losses += logged(made, "loss")
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    with pytest.raises(ModelError, match="compiled with another loss"):
        trainer(tmp_path, TF.net(), (arrays(4)[0], ids[:4, 0]), label_smoothing_factor=0.1).train()


def test_labels_without_a_sign_are_never_ignored() -> None:
    import keras

    from loopwright.keras.loss.compiled_loss import counted_labels

    labels = [counted_labels(keras.ops.convert_to_tensor(np.array(each))) for each in ([156, -100], np.uint8([156, 3]))]
    assert [each.numpy().tolist() for each in labels] == [[True, False], [True, True]]


def test_a_users_loss_gets_floating_point_labels(tmp_path: Any) -> None:
    import tensorflow as tf

    def written(labels: Any, outputs: Any) -> Any:
        return tf.reduce_mean(tf.square(labels - outputs), axis=-1)

    x, y = arrays(8)
    losses = []
    for kind in ("int64", "float32"):
        model = TF.net(compiled=False)
        model.compile(loss=written)
        made = trainer(tmp_path, model, (x, np.round(y).astype(kind)), **{**PLAIN, "max_steps": 2})
        made.train()
        losses.append(logged(made, "loss"))
    assert losses[0] == losses[1]


def test_a_loss_of_keras_called_by_a_user_is_not_divided_by_the_replicas(tmp_path: Any) -> None:
    import keras

    def mean(outputs: Any, labels: Any) -> Any:
        return keras.losses.MeanSquaredError()(labels, outputs)

    found = []
    for strategy, size in ((None, 4), (two_replicas(), 2)):
        options = {**PLAIN, "max_steps": 2, "per_device_train_batch_size": size, "strategy": strategy}
        made = trainer(tmp_path, TF.net(), arrays(8), compute_loss_func=mean, evaluation=arrays(8), **options)
        made.train()
        found.append([*logged(made, "loss"), made.evaluate()["eval_loss"]])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_outputs_of_legacy_models_are_weighted_on_any_number_of_replicas() -> None:
    tf_keras = pytest.importorskip("tf_keras", reason="tf_keras is not installed")
    import tensorflow as tf

    from loopwright.keras.loss.compiled_loss import find_keras_loss

    try:
        x = tf_keras.Input((4,))
        model = tf_keras.Model(x, [tf_keras.layers.Dense(1, name="a")(x), tf_keras.layers.Dense(1, name="b")(x)])
        model.compile(loss={"a": "mse", "b": "mae"}, loss_weights={"a": 0.5, "b": 2.0})
        features, y = map(tf.constant, arrays(4))
        outputs = model(features)
        expected = 4 * float(model.compiled_loss((y, y), outputs))
        found = find_keras_loss(model, tf_keras)
        with two_replicas().scope():  # Keras would divide by their number
            total, items = found(model, (y, y), outputs, None)
        assert (float(total), float(items)) == pytest.approx((expected, 4.0))
        single = tf_keras.Sequential([tf_keras.layers.Input((4,)), tf_keras.layers.Dense(1)])
        single.compile(loss="mse", loss_weights=0.5)
        total, _ = find_keras_loss(single, tf_keras)(single, y, single(features), None)
        assert float(total) == pytest.approx(0.5 * float(tf.reduce_sum((single(features) - y) ** 2)))
    finally:
        sys.modules.pop("tf_keras", None)  # the tests after this one have not asked for it


@pytest.mark.parametrize("policy", ["mixed_float16", "float32"])
def test_a_loss_scale_optimizer_of_the_user_is_used_as_it_is(policy: str, tmp_path: Any) -> None:
    import keras

    keras.mixed_precision.set_global_policy(policy)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 1, 0.5)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(schedule), initial_scale=8.0)
    made = trainer(tmp_path, None, arrays(8), optimizers=(optimizer, None), **{**PLAIN, "max_steps": 2})
    made.train()
    assert made.optimizer is optimizer and int(optimizer.iterations) == 2
    assert logged(made, "learning_rate") == pytest.approx([0.02, 0.01])
    made.train()  # Keras counts the updates of an optimizer, not of a run
    assert logged(made, "learning_rate") == pytest.approx([0.005, 0.0025])


def test_batch_normalization_sees_no_padding_with_xla(tmp_path: Any) -> None:
    import keras

    found = []
    for xla in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model.compile(loss="mse")
        made = trainer(tmp_path, model, arrays(6), xla=xla, **{**PLAIN, "max_steps": 2})
        made.train()
        found.append([each.numpy() for each in model.variables if "float" in str(each.dtype)])
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_keras_callback_sets_the_learning_rate(tmp_path: Any) -> None:
    import keras

    callback = keras.callbacks.LearningRateScheduler(lambda epoch, rate: [0.02, 0.005][epoch])
    made = trainer(tmp_path, None, arrays(8), callbacks=[callback], **{**PLAIN, "max_steps": 4})
    made.train()
    assert logged(made, "learning_rate") == pytest.approx([0.02, 0.02, 0.005, 0.005])


@pytest.mark.parametrize("name", ["train_step", "compute_loss"])
def test_methods_that_only_fit_calls_are_refused(name: str, tmp_path: Any) -> None:
    import keras

    class Own(keras.Sequential):
        pass

    setattr(Own, name, lambda self, *args, **options: 0.0)
    Own.__module__ = "mine"
    getattr(Own, name).__module__ = "mine"
    model = Own([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    with pytest.raises(ModelError, match=f"Own overrides {name}, which only fit calls"):
        trainer(tmp_path, model)


def test_what_a_model_was_compiled_with_and_is_not_used_is_said(tmp_path: Any, caplog: Any) -> None:
    import keras

    model = TF.net(compiled=False)
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model.compile("adam", loss=loss, metrics=["mae"])
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=7)
    trainer(tmp_path, model, optimizers=(optimizer, None), max_steps=1).train()
    for text in ("compiled with Adam, but SGD is used", "metrics that the model", "reduction=sum", "use_ema=True"):
        assert text in caplog.text


def test_pipelines_of_batched_pipelines_are_batched(tmp_path: Any) -> None:
    import tensorflow as tf

    from loopwright.keras.data.sources import is_batched

    x, y = (tf.data.Dataset.from_tensor_slices(each) for each in arrays(8))
    pairs = tf.data.Dataset.zip((x, y))
    assert is_batched(tf.data.Dataset.zip((x.batch(4), y.batch(4))))
    assert is_batched(pairs.batch(4).concatenate(pairs.batch(2)))
    assert is_batched(pairs.batch(4).enumerate().map(lambda index, pair: pair))
    assert not is_batched(pairs.batch(4).flat_map(lambda *pair: tf.data.Dataset.from_tensor_slices(pair)))
    assert not is_batched(pairs)


def test_a_dataset_of_batches_is_refused(tmp_path: Any) -> None:
    import keras

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return arrays(4)

    with pytest.raises(DataError, match="Batches, whose items are batches"):
        trainer(tmp_path, None, Batches()).train()
