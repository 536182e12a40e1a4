"""Kinds of models: Keras 3 of every make, models with their own loss, tf_keras, and plain callables."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from loopwright import ArgumentsError, ModelError

from .tools import MARKS, TF, arrays, logged, rows, sentences, trainer, weights

pytestmark = MARKS


def subclassed(**options: Any) -> Any:
    import keras

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.out = keras.layers.Dense(8, activation="tanh", **options), keras.layers.Dense(1)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.out(self.hidden(x))

    model = Net()
    model.compile(loss=keras.losses.MeanSquaredError())
    return model


def test_a_subclassed_model_is_built_by_its_first_batch_and_resumes(tmp_path: Any) -> None:
    options = {"data": arrays(12), "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = trainer(tmp_path, subclassed(), **options)
    assert not whole.model.built
    whole.train()
    again = trainer(tmp_path, subclassed(), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for mine, theirs in zip(weights(again), weights(whole), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_regularisers_are_added_once_however_an_update_is_cut_up(tmp_path: Any) -> None:
    import keras

    losses = []
    for size, accumulation in ((4, 1), (2, 2)):
        TF.seed()
        model = subclassed(kernel_regularizer=keras.regularizers.L2(0.5))
        made = trainer(
            tmp_path, model, arrays(4), max_steps=1, per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
        )  # fmt: skip
        made.train()
        losses += logged(made, "loss")
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] > 0.5


def test_several_outputs_and_losses(tmp_path: Any) -> None:
    import keras

    x = keras.Input((4,), name="x")
    hidden = keras.layers.Dense(8)(x)
    outputs = {"a": keras.layers.Dense(1, name="a")(hidden), "b": keras.layers.Dense(3, name="b")(hidden)}
    model = keras.Model(x, outputs)
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss={"a": "mse", "b": sparse}, loss_weights={"a": 0.5, "b": 2.0})
    features, targets = arrays(8)
    data = [
        ({"x": each}, {"a": target, "b": np.int64(index % 3)})
        for index, (each, target) in enumerate(zip(features, targets, strict=True))
    ]
    made = trainer(tmp_path, model, data, max_steps=2, train_sampling_strategy="sequential")
    expected = model.evaluate(features[:4], {"a": targets[:4], "b": np.arange(4) % 3}, verbose=0, return_dict=True)
    made.train()
    found = made.predict(data[:5])
    assert {name: value.shape for name, value in found.predictions.items()} == {"a": (5, 1), "b": (5, 3)}
    assert found.label_ids[0].shape == (5, 1)
    assert logged(made, "loss")[0] == pytest.approx(expected["loss"], rel=1e-4)


def test_masked_time_steps_are_no_items(tmp_path: Any) -> None:
    import keras

    embedding = keras.layers.Embedding(11, 6, mask_zero=True)
    model = keras.Sequential([keras.Input((None,), dtype="int32"), embedding, keras.layers.Dense(11)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ids, labels = np.array([[3, 4, 0, 0], [5, 6, 7, 8]]), np.array([[1, 2, 9, 9], [3, 4, 5, 6]])
    made = trainer(tmp_path, model, (ids, labels), max_steps=1, per_device_train_batch_size=2)
    logits = np.asarray(model(ids))
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    kept = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    expected = -np.mean([logs[i, j, labels[i, j]] for i, j in kept])
    made.train()
    assert logged(made, "loss")[0] == pytest.approx(expected, rel=1e-5)


def test_repeated_embedding_rows_add_up(tmp_path: Any) -> None:
    """The gradient of a row used three times is the sum of three, in the norm and in Adam's second moment."""
    import keras

    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(5, 2), keras.layers.Flatten()])
    model.compile(loss=lambda y, p: keras.ops.sum(p, axis=-1))
    data = (np.array([[1, 1, 1]]), np.zeros((1, 1), np.float32))
    made = trainer(tmp_path, model, data, max_steps=1, max_grad_norm=0.0, adam_beta2=0.5)
    made.train()
    assert logged(made, "grad_norm")[0] == pytest.approx(np.sqrt(2 * 3.0**2))
    velocity = next(v for v in made.optimizer.variables if "velocity" in v.path).numpy()
    np.testing.assert_allclose(velocity[1], 0.5 * 3.0**2)


# ---- models with a loss of their own ---------------------------------------------------------------------------------


def old_style(kind: str = "vector", keras: Any = None) -> Any:
    """A model as transformers' TensorFlow models were: `model(features, labels=..., training=...)`, the loss first."""
    import tensorflow as tf

    if keras is None:
        import keras as keras

    class TFTinyForTokenClassification(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = keras.layers.Embedding(11, 6), keras.layers.Dense(11)
            self.saved: list[str] = []

        def call(self, input_ids: Any = None, labels: Any = None, training: bool = False) -> Any:
            ids = input_ids["input_ids"] if isinstance(input_ids, dict) else input_ids
            logits = self.head(tf.tanh(self.embed(ids)))
            if labels is None:
                return (logits,)
            active = tf.cast(labels != -100, tf.float32)
            safe = tf.where(labels == -100, tf.zeros_like(labels), labels)
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(safe, tf.int32), logits) * active
            if kind == "vector":  # transformers < 4.10: one number for each active token
                return tf.boolean_mask(each, labels != -100), logits
            mean = tf.reduce_sum(each) / tf.maximum(tf.reduce_sum(active), 1.0)
            return (mean if kind == "scalar" else tf.reshape(mean, (1,))), logits

        def save_pretrained(self, folder: str) -> None:
            self.saved.append(folder)

    return TFTinyForTokenClassification()


@pytest.mark.parametrize("kind", ["vector", "scalar", "one"])
def test_models_of_old_train_with_their_own_loss(kind: str, tmp_path: Any) -> None:
    results = []
    for size, accumulation in ((6, 1), (2, 3)):
        TF.seed()
        model = old_style(kind)
        model(np.ones((1, 6), np.int64))
        data = [({"input_ids": row["input_ids"]}, row["labels"]) for row in sentences(6)]
        made = trainer(
            tmp_path, model, data, max_steps=2, per_device_train_batch_size=size, evaluation=data,
            gradient_accumulation_steps=accumulation, train_sampling_strategy="sequential",
        )  # fmt: skip
        made.train()
        results.append((logged(made, "loss"), made.evaluate()["eval_loss"]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4)
    made.save_model(str(tmp_path / "export"))
    assert model.saved == [str(tmp_path / "export")] and (tmp_path / "export" / "model.safetensors").is_file()


def test_question_answering_with_labels_in_a_dict(tmp_path: Any) -> None:
    import keras
    import tensorflow as tf

    class TFTinyForQuestionAnswering(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = keras.layers.Embedding(11, 6), keras.layers.Dense(2)

        def call(self, features: Any, start_positions: Any = None, end_positions: Any = None, labels: Any = None,
                 training: bool = False) -> Any:  # fmt: skip
            start, end = tf.unstack(self.head(self.embed(features["input_ids"])), axis=-1)
            if start_positions is None:
                return {"start_logits": start, "end_logits": end}
            each = tf.nn.sparse_softmax_cross_entropy_with_logits
            loss = (each(start_positions, start) + each(end_positions, end)) / 2
            return {"loss": loss, "start_logits": start, "end_logits": end}

    ids = np.random.default_rng(0).integers(1, 11, (7, 5))
    data = [({"input_ids": each}, {"start_positions": np.int64(1), "end_positions": np.int64(3)}) for each in ids]
    made = trainer(
        tmp_path, TFTinyForQuestionAnswering(), data, max_steps=2, evaluation=data,
        compute_metrics=lambda p: {"shapes": sum(each.shape[0] for each in (*p.predictions, *p.label_ids))},
    )  # fmt: skip
    made.train()
    metrics = made.evaluate()
    assert metrics["eval_shapes"] == 4 * 7
    start, end = made.predict(data).predictions
    assert start.shape == end.shape == (7, 5)
    assert metrics["eval_loss"] == pytest.approx(np.log(5), rel=0.5), "a mean over samples, not a sum"


def test_legacy_keras_models_train_and_resume(tmp_path: Any) -> None:
    tf_keras = pytest.importorskip("tf_keras", reason="tf_keras is not installed")

    def legacy() -> Any:
        tf_keras.utils.set_random_seed(0)
        layers = tf_keras.layers
        model = tf_keras.Sequential([layers.Input((4,)), layers.Dense(8, activation="tanh"), layers.Dense(1)])
        model.compile(loss="mse")
        return model

    try:
        options = {"data": arrays(12), "save_strategy": "steps", "save_steps": 2, "max_steps": 4, "weight_decay": 0.1}
        whole = trainer(tmp_path, legacy(), gradient_accumulation_steps=2, per_device_train_batch_size=2, **options)
        whole.train()
        assert type(whole.optimizer).__module__.startswith("tf_keras")
        again = trainer(tmp_path, legacy(), gradient_accumulation_steps=2, per_device_train_batch_size=2, **options)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert logged(again, "loss") == logged(whole, "loss")
        for mine, theirs in zip(weights(again), weights(whole), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        made = trainer(tmp_path, old_style("vector", tf_keras), [(r["input_ids"], r["labels"]) for r in sentences(6)])
        made.train()
        assert logged(made, "loss")[-1] < logged(made, "loss")[0]
    finally:
        sys.modules.pop("tf_keras", None)  # the tests after this one have not asked for it


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_losses_given_as_functions_pairs_and_per_example(tmp_path: Any) -> None:
    import tensorflow as tf

    seen: list[Any] = []

    def squared(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        seen.append(num_items_in_batch)
        return tf.reduce_mean((outputs - labels) ** 2)

    def per_example(outputs: Any, labels: Any) -> Any:
        return tf.reduce_sum((outputs - labels) ** 2, axis=-1)

    def pair(outputs: Any, labels: Any) -> Any:
        return tf.reduce_sum((outputs - labels) ** 2), tf.shape(outputs)[0]

    losses = []
    for function in (None, squared, per_example, pair):
        model = TF.net(compiled=function is None)
        made = trainer(
            tmp_path, model, rows(5), max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=3,
            compute_loss_func=function, evaluation=rows(3),
        )  # fmt: skip
        made.train()
        losses.append((logged(made, "loss")[0], made.evaluate()["eval_loss"]))
    assert seen and seen[0] is not None
    for loss, evaluated in losses[1:]:
        assert loss == pytest.approx(losses[0][0], rel=1e-5)
        assert evaluated == pytest.approx(losses[0][1], rel=1e-4)


@pytest.mark.parametrize(
    "form", [lambda loss: {"loss": loss, "rest": loss}, lambda loss: (loss, {"rest": loss})], ids=["dict", "pair"]
)
def test_named_values_of_a_loss_are_refused(form: Any, tmp_path: Any) -> None:
    class Named(TF.trainer_class()):
        def compute_loss(self, features: Any, labels: Any) -> Any:
            return form(super().compute_loss(features, labels))

    made = TF.trainer(tmp_path, TF.net(), rows(4), cls=Named, max_steps=1, save_strategy="no")
    with pytest.raises(ModelError, match="returned named values, which only PyTorch trainers log"):
        made.train()


def test_a_model_without_a_loss_says_what_to_do(tmp_path: Any) -> None:
    with pytest.raises(ModelError, match="there is no loss: compile the model"):
        trainer(tmp_path, TF.net(compiled=False), max_steps=1).train()
    predicted = trainer(tmp_path, TF.net(compiled=False)).predict(arrays(3)[0])
    assert predicted.predictions.shape == (3, 1) and predicted.label_ids is None


def test_compute_loss_may_be_written_as_for_the_pytorch_trainer(tmp_path: Any) -> None:
    import tensorflow as tf

    class Mine(TF.trainer_class()):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            outputs = model(inputs["features"] if "features" in inputs else inputs["x"])
            loss = tf.reduce_mean((outputs - inputs["labels"]) ** 2)
            return (loss, outputs) if return_outputs else loss

    made = trainer(tmp_path, TF.net(compiled=False), cls=Mine, evaluation=rows(5))
    made.train()
    own = trainer(tmp_path, evaluation=rows(5))
    own.train()
    assert logged(made, "loss") == pytest.approx(logged(own, "loss"), rel=1e-5)
    assert made.evaluate()["eval_loss"] == pytest.approx(own.evaluate()["eval_loss"], rel=1e-4)


def test_label_smoothing_is_that_of_torch(tmp_path: Any) -> None:
    torch = pytest.importorskip("torch")
    made = trainer(
        tmp_path, TF.tokens(), sentences(6), max_steps=1, label_smoothing_factor=0.2, per_device_train_batch_size=6,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    ids = np.stack([row["input_ids"] for row in sentences(6)])
    logits = torch.tensor(np.asarray(made.model(ids))).reshape(-1, 11)
    labels = torch.tensor(np.stack([row["labels"] for row in sentences(6)])).reshape(-1)
    made.train()
    expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.2).item()
    assert logged(made, "loss")[0] == pytest.approx(expected, rel=1e-5)


def test_what_is_no_model_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ModelError, match="Keras model or another callable"):
        TF.trainer_class()("a model", TF.arguments(tmp_path))
    with pytest.raises(ArgumentsError, match="exactly one of model and model_init"):
        TF.trainer_class()(None, TF.arguments(tmp_path))
