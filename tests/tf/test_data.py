"""Kinds of data: pipelines of known and unknown length, arrays, datasets, samples, streams; and resuming."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from loopwright import ArgumentsError, DataError

from .tools import MARKS, TF, arrays, logged, rows, trainer, weights

pytestmark = MARKS


def pipeline(n: int = 12) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(arrays(n))


def generated(n: int = 12) -> Any:
    import tensorflow as tf

    x, y = arrays(n)
    spec = (tf.TensorSpec((4,), tf.float32), tf.TensorSpec((1,), tf.float32))
    return tf.data.Dataset.from_generator(lambda: zip(x, y, strict=True), output_signature=spec)


class Stream:
    """Samples one after the other, without a length."""

    def __init__(self, n: int = 12) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        return iter(rows(self.n))


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_list([{name: value.tolist() for name, value in row.items()} for row in rows(12)])


KINDS: dict[str, Any] = {
    "pipeline": pipeline,
    "pipeline of dicts": lambda: __import__("tensorflow").data.Dataset.from_tensor_slices(
        {"x": arrays(12)[0], "labels": arrays(12)[1]}
    ),
    "batched pipeline": lambda: pipeline().batch(4),
    "generator": generated,
    "arrays": lambda: arrays(12),
    "dict of arrays": lambda: dict(zip(("x", "labels"), arrays(12), strict=True)),
    "datasets": hugging_face,
    "samples": lambda: rows(12),
    "pairs": lambda: list(zip(*arrays(12), strict=True)),
    "stream": Stream,
    "function": lambda: lambda: iter(rows(12)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_the_same_run(kind: str, tmp_path: Any) -> None:
    made = trainer(
        tmp_path, data=KINDS[kind](), max_steps=3, train_sampling_strategy="sequential", evaluation=KINDS[kind]()
    )
    made.train()
    assert made._loopwright.run.progress.samples_seen == 12
    if not hasattr(test_every_kind_of_data_gives_the_same_run, "known"):
        test_every_kind_of_data_gives_the_same_run.known = (logged(made, "loss"), None)
    assert logged(made, "loss") == pytest.approx(test_every_kind_of_data_gives_the_same_run.known[0], rel=1e-5)
    assert made.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("kind", ["pipeline", "generator", "stream", "batched shuffle", "arrays"])
def test_going_on_in_an_epoch_is_exact(kind: str, tmp_path: Any, caplog: Any) -> None:
    def data() -> Any:
        if kind == "batched shuffle":
            return pipeline(14).shuffle(14, seed=3).repeat(2).batch(3)
        made = {"pipeline": pipeline, "generator": generated, "stream": Stream, "arrays": arrays}[kind]
        return made(40 if kind == "generator" else 14)  # one that is read ahead to its end could be saved

    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "per_device_train_batch_size": 3}
    if kind == "generator":  # a buffer that holds all of it could be saved
        options["train_sampling_strategy"] = "sequential"
    whole = trainer(tmp_path / "run", TF.net(dropout=0.2), data(), **options)
    whole.train()
    again = trainer(tmp_path / "run", TF.net(dropout=0.2), data(), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert logged(again, "loss") == logged(whole, "loss")
    for mine, theirs in zip(weights(again), weights(whole), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    has_state = (tmp_path / "run" / "checkpoint-3" / "tf_data").is_dir()
    assert has_state == (kind in ("pipeline", "batched shuffle"))
    assert ("cannot seek: re-reading and skipping" in caplog.text) == (kind in ("generator", "stream"))
    assert ("TensorFlow cannot save the position of this pipeline" in caplog.text) == (kind == "generator")


@pytest.mark.parametrize("kind", ["arrays", "generator"])
def test_later_epochs_of_a_pipeline_shuffled_by_the_user_are_exact(kind: str, tmp_path: Any) -> None:
    import tensorflow as tf

    def data() -> Any:
        tf.random.set_seed(1)
        return (generated(40) if kind == "generator" else pipeline(40)).shuffle(8, seed=3).batch(8, drop_remainder=True)

    options = {"max_steps": 11, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3}
    whole = trainer(tmp_path / "run", None, data(), **options)
    whole.train()
    for step in (2, 5, 8):  # in the first epoch, after it, in the second
        again = trainer(tmp_path / str(step), None, data(), **{**options, "save_strategy": "no"})
        again.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
        assert logged(again, "loss") == logged(whole, "loss")


def test_a_pipeline_is_shuffled_by_seed_and_epoch(tmp_path: Any) -> None:
    import tensorflow as tf

    def order(seed: int) -> list[list[float]]:
        x = np.arange(8, dtype="f")[:, None].repeat(4, 1)
        data = tf.data.Dataset.from_tensor_slices((x, np.zeros((8, 1), "f")))
        made = trainer(tmp_path, data=data, seed=seed, max_steps=1)
        source = made.get_train_tfdataset()
        return [np.concatenate([batch.features[:, 0] for batch in source.open(epoch)]).tolist() for epoch in range(2)]

    first, again, other = order(1), order(1), order(2)
    assert first == again and first != other and first[0] != first[1]
    assert sorted(first[0]) == sorted(first[1]) == list(range(8)), "an epoch holds every sample once"


def test_padding_of_ragged_pipelines_counts_for_nothing(tmp_path: Any) -> None:
    import tensorflow as tf

    lengths = (2, 5, 3, 4)

    def samples() -> Iterator[Any]:
        random = np.random.default_rng(0)
        for length in lengths:
            yield random.integers(1, 11, length), random.integers(0, 11, length)

    spec = (tf.TensorSpec((None,), tf.int64), tf.TensorSpec((None,), tf.int64))
    data = tf.data.Dataset.from_generator(samples, output_signature=spec)
    losses = []
    for size, accumulation in ((4, 1), (1, 4)):
        made = trainer(
            tmp_path, TF.tokens(), data, max_steps=1, per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation, train_sampling_strategy="sequential",
        )  # fmt: skip
        made.train()
        losses += logged(made, "loss")
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_unknown_lengths_need_max_steps_and_readable_data_is_needed(tmp_path: Any) -> None:
    with pytest.raises(ArgumentsError, match="has no length"):
        trainer(tmp_path, data=Stream(), max_steps=-1)
    with pytest.raises(ArgumentsError, match="has no length"):
        trainer(tmp_path, data=pipeline().repeat(), max_steps=-1)
    with pytest.raises(DataError, match="the evaluation pipeline never ends"):
        trainer(tmp_path, evaluation=pipeline().batch(4).repeat()).evaluate()
    with pytest.raises(DataError, match="has arrays of 9 and 12 rows"):
        trainer(tmp_path, data=(arrays(12)[0], arrays(9)[1])).train()
    with pytest.raises(DataError, match="not a tuple of 3; .* sample weights as one of them"):
        trainer(tmp_path, data=(*arrays(12), np.ones(12))).train()
    with pytest.raises(DataError, match="can be read only once"):
        trainer(tmp_path, data=iter(rows(4)), max_steps=1).train()
    with pytest.raises(DataError, match="is empty"):
        trainer(tmp_path, data=[], max_steps=1).train()
    with pytest.raises(DataError, match="pass a data_collator that pads"):
        trainer(tmp_path, data=[{"x": np.zeros(i + 1), "labels": 0.0} for i in range(4)], max_steps=1).train()


def test_drop_last_group_by_length_columns_and_collators(tmp_path: Any, caplog: Any) -> None:
    caplog.set_level("INFO", "loopwright")
    made = trainer(tmp_path, data=rows(10), num_train_epochs=1, max_steps=-1, dataloader_drop_last=True)
    made.train()
    assert (made.state.global_step, made._loopwright.run.progress.samples_seen) == (2, 8)
    data = [{**row, "length": index, "name": "a"} for index, row in enumerate(rows(8))]

    def collate(samples: list[Any]) -> Any:
        seen.append([sample["length"] for sample in samples])
        return {key: np.stack([sample[key] for sample in samples]) for key in ("x", "labels", "length")}

    seen: list[list[int]] = []
    made = trainer(
        tmp_path, data=data, max_steps=2, train_sampling_strategy="group_by_length", data_collator=collate
    )
    made.train()
    assert seen[0][0] == 7, "the longest comes first"
    assert "columns removed because the model does not accept them: length" in caplog.text


def test_an_override_may_bring_its_own_batches(tmp_path: Any) -> None:
    class Mine(TF.trainer_class()):
        def get_train_tfdataset(self) -> Any:
            return pipeline(12).batch(6)

        def get_eval_tfdataset(self, eval_dataset: Any = None) -> Any:
            return pipeline(5).batch(3), 2, 5

    made = trainer(tmp_path, cls=Mine, num_train_epochs=2, max_steps=-1, evaluation=rows(3))
    made.train()
    assert (made.state.global_step, made._loopwright.run.progress.samples_seen) == (4, 24)
    known = made.evaluate()["eval_loss"]
    made.get_eval_tfdataset = lambda eval_dataset=None: (pipeline(5).batch(3).repeat(), 2, 5)
    assert made.evaluate()["eval_loss"] == known > 0
    made.get_eval_tfdataset = lambda eval_dataset=None: pipeline(5).repeat().batch(3)
    with pytest.raises(DataError, match="a pipeline that never ends"):
        made.evaluate()


def test_several_named_evaluation_sets(tmp_path: Any) -> None:
    made = trainer(tmp_path, evaluation={"a": rows(4), "b": arrays(5)})
    assert {"eval_a_loss", "eval_b_loss"} <= set(made.evaluate())
    assert "eval_loss" in made.evaluate(dict(zip(("x", "labels"), arrays(4), strict=True)))
