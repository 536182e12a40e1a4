"""Training and evaluation with TFTrainer, where transformers' TFTrainer was wrong: each docstring says how."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopwright import EarlyStoppingCallback, TrainOutput

from .test_data import Stream, generated, hugging_face, pipeline
from .test_models import old_style
from .tools import MARKS, TF, arrays, kept, logged, rows, sentences, trainer, two_replicas, weights

pytestmark = MARKS


def test_training_runs_with_default_arguments(tmp_path: Any) -> None:
    """`eval_steps` was None and compared with a number."""
    from loopwright import TFTrainer, TFTrainingArguments

    made = TFTrainer(TF.net(), TFTrainingArguments(str(tmp_path), max_steps=1, report_to=[]), pipeline(8))
    assert isinstance(made.train(), TrainOutput)


def test_evaluation_ends_and_counts_every_sample_once(tmp_path: Any) -> None:
    """With prediction_loss_only it never ended; without, 40 samples in batches of 16 were counted as 48."""
    made = trainer(
        tmp_path, evaluation=pipeline(40), per_device_eval_batch_size=16,
        compute_metrics=lambda prediction: {"n": len(prediction.label_ids)},
    )  # fmt: skip
    assert made.evaluate()["eval_n"] == 40
    only = trainer(tmp_path, evaluation=pipeline(40), per_device_eval_batch_size=16, prediction_loss_only=True)
    assert "eval_loss" in only.evaluate()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_are_clipped_by_norm_with_and_without_accumulation(accumulation: int, tmp_path: Any) -> None:
    """Without accumulation they were not clipped at all, with it each number for itself."""
    moved = {}
    for limit in (1e-3, 1e9):
        made = trainer(
            tmp_path, data=rows(4), max_steps=1, optim="sgd", learning_rate=1.0, max_grad_norm=limit,
            per_device_train_batch_size=4 // accumulation, gradient_accumulation_steps=accumulation,
            lr_scheduler_type="constant",
        )  # fmt: skip
        before = weights(made)
        made.train()
        moved[limit] = [old - new for old, new in zip(before, weights(made), strict=True)]
    norm = np.sqrt(sum((each**2).sum() for each in moved[1e-3]))
    assert norm == pytest.approx(1e-3, rel=1e-3)
    free = np.sqrt(sum((each**2).sum() for each in moved[1e9]))
    for clipped, whole in zip(moved[1e-3], moved[1e9], strict=True):
        np.testing.assert_allclose(clipped, whole * 1e-3 / free, atol=1e-6, err_msg="the direction changed")


def test_half_an_epoch_is_half_an_epoch(tmp_path: Any) -> None:
    """int(0.5) epochs were none."""
    made = trainer(tmp_path, data=pipeline(16), num_train_epochs=0.5, max_steps=-1)
    made.train()
    assert (made.state.global_step, made.state.epoch) == (2, 0.5)


def test_evaluation_at_the_end_of_epochs(tmp_path: Any) -> None:
    """evaluation_strategy='epoch' was accepted and never evaluated."""
    made = trainer(
        tmp_path, data=pipeline(8), evaluation=pipeline(4), evaluation_strategy="epoch", num_train_epochs=2,
        max_steps=-1,
    )  # fmt: skip
    made.train()
    assert [row["epoch"] for row in made.state.log_history if "eval_loss" in row] == [1.0, 2.0]


def test_past_index_is_refused_with_a_reason(tmp_path: Any) -> None:
    """past_index=2 was accepted and failed with an IndexError in the first step."""
    with pytest.raises(ValueError, match="hidden states are not carried from batch to batch"):
        TF.arguments(tmp_path, past_index=2)


def test_half_precision_scales_the_loss_and_refuses_a_model_built_too_early(tmp_path: Any) -> None:
    """float16 had no loss scaling, and the policy was set after the model was built, to no effect."""
    from loopwright import ModelError

    early = TF.net()
    with pytest.raises(ModelError, match="was built for float32"):
        trainer(tmp_path, early, fp16=True)
    args = TF.arguments(tmp_path, fp16=True, max_steps=2, save_strategy="no")
    with args.strategy.scope():
        model = TF.net()
    made = TF.trainer_class()(model, args, train_dataset=rows(8))
    made.train()
    assert float(made.optimizer.dynamic_scale) > 1
    assert model.layers[0].compute_dtype == "float16"


def test_a_resumed_run_reports_the_losses_of_the_whole_run(tmp_path: Any) -> None:
    """The reported loss was diluted by skipped steps, and weights differed from the uninterrupted run."""
    options = {"data": pipeline(12), "max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    whole = trainer(tmp_path, TF.net(dropout=0.2), **options)
    output = whole.train()
    again = trainer(tmp_path, TF.net(dropout=0.2), **options)
    resumed = again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.training_loss == output.training_loss
    assert logged(again, "loss") == logged(whole, "loss")
    for mine, theirs in zip(weights(again), weights(whole), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_run_starts_anew_unless_it_is_asked_to_resume(tmp_path: Any, caplog: Any) -> None:
    """It always resumed; checkpoints could not be loaded by anything else."""
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    first = trainer(tmp_path, **options)
    first.train()
    second = trainer(tmp_path, **options)
    second.train()
    assert logged(second, "loss") == logged(first, "loss")
    assert "holds 2 checkpoints of a finished run" in caplog.text
    from safetensors.numpy import load_file

    assert len(load_file(str(tmp_path / "checkpoint-2" / "model.safetensors"))) == 4


def test_a_model_built_outside_the_scope_trains(tmp_path: Any) -> None:
    """The most common complaint: slot variables of another strategy."""
    made = trainer(tmp_path, TF.net(), data=pipeline(8), strategy=two_replicas(), per_device_train_batch_size=2)
    made.train()
    assert made.state.global_step == 3


@pytest.mark.parametrize("kind", ["generator", "datasets", "stream"])
def test_data_of_unknown_length_and_hugging_face_datasets(kind: str, tmp_path: Any) -> None:
    """'The training dataset must have an asserted cardinality'; 'Dataset' object has no attribute 'cardinality'."""
    data = {"generator": lambda: generated(12), "datasets": hugging_face, "stream": Stream}[kind]()
    made = trainer(tmp_path, data=data, max_steps=4)
    made.train()
    assert made.state.global_step == 4


def test_epochs_do_not_mix_and_drop_last_drops(tmp_path: Any) -> None:
    """`.repeat().shuffle()` mixed epochs, and nothing was ever dropped."""
    made = trainer(tmp_path, data=pipeline(10), num_train_epochs=1, max_steps=-1, dataloader_drop_last=True)
    rows_of_epochs = [
        np.concatenate([batch.features for batch in made._loopwright.data.training_source().open(epoch)])
        for epoch in range(2)
    ]
    assert [len(each) for each in rows_of_epochs] == [8, 8]
    for each in rows_of_epochs:
        assert len(np.unique(each, axis=0)) == 8, "a sample came twice in one epoch"


def test_callbacks_early_stopping_and_the_best_model(tmp_path: Any) -> None:
    """There were none."""
    scores = iter([0.0, 1.0, 2.0, 0.5, 0.4, 0.3, 0.2])
    made = trainer(
        tmp_path, evaluation=rows(4), max_steps=9, eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=1, load_best_model_at_end=True, metric_for_best_model="score",
        compute_metrics=lambda prediction: {"score": next(scores)}, callbacks=[EarlyStoppingCallback(2)],
    )  # fmt: skip
    made.train()
    assert (made.state.global_step, made.state.best_global_step) == (4, 2)


def test_a_tpu_that_is_not_there_says_so(tmp_path: Any) -> None:
    """TPUs were half supported; here the path is written and not run. Without one the error names it."""
    with pytest.raises(RuntimeError, match="cannot connect to TPU no-such-tpu"):
        _ = TF.arguments(tmp_path, tpu_name="no-such-tpu", tpu_zone="nowhere", gcp_project="none").strategy


def test_the_logged_learning_rate_is_that_of_the_update(tmp_path: Any) -> None:
    """It was the next update's."""
    made = trainer(tmp_path, max_steps=4, learning_rate=0.4)
    made.train()
    assert logged(made, "learning_rate") == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_nothing_is_sent_anywhere_unless_it_is_named(tmp_path: Any) -> None:
    """wandb and comet were switched on by being installed; report_to was ignored."""
    called: list[str] = []

    class Mine(TF.trainer_class()):
        def setup_wandb(self) -> None:
            called.append("wandb")

    made = trainer(tmp_path, cls=Mine, max_steps=1)
    made.train()
    names = {type(callback).__name__ for callback in made.callback_handler.callbacks}
    assert called == ["wandb"] and not any("Reporter" in name or "TensorBoard" in name for name in names)
    assert not {"wandb", "comet_ml"} & set(sys.modules)


def test_predictions_of_different_widths_are_joined(tmp_path: Any) -> None:
    """np.append was quadratic and failed on ragged widths."""
    data = [{"input_ids": row["input_ids"][:width], "labels": row["labels"][:width]}
            for row, width in zip(sentences(8), (4, 4, 4, 4, 6, 6, 6, 6), strict=True)]  # fmt: skip
    found = trainer(tmp_path, TF.tokens()).predict(data).predictions
    assert found.shape == (8, 6, 11) and (found[0, 4:] == -100).all()


def test_numbers_are_read_at_log_points_only(tmp_path: Any) -> None:
    """Every step waited for the device."""
    reads: list[int] = []
    made = trainer(tmp_path, max_steps=6, logging_steps=3)
    read = made._loopwright.strategy.read
    made._loopwright.strategy.read = lambda scalars: (reads.append(len(scalars)), read(scalars))[1]
    made.train()
    assert reads == [6, 6]


def test_predict_needs_no_labels(tmp_path: Any) -> None:
    """It did, although documented otherwise."""
    import tensorflow as tf

    features = tf.data.Dataset.from_tensor_slices(arrays(5)[0])
    found = trainer(tmp_path).predict(features)
    assert found.predictions.shape == (5, 1) and found.label_ids is None and "test_loss" not in found.metrics


def test_losses_are_means_over_items_not_over_batches(tmp_path: Any) -> None:
    """The evaluation loss was the mean of batch means; token-level losses were scaled wrong."""
    data = [(row["input_ids"], row["labels"]) for row in sentences(7)]
    found = {}
    for size in (7, 3):
        TF.seed()
        model = old_style("scalar")
        model(np.ones((1, 6), np.int64))
        made = trainer(tmp_path, model, data, evaluation=data, per_device_eval_batch_size=size)
        found[size] = made.evaluate()["eval_loss"]
    assert found[3] == pytest.approx(found[7], rel=1e-5)


OLD_SCRIPT = """
import sys
import numpy as np
import tensorflow as tf
from dataclasses import dataclass, field
from loopwright import HfArgumentParser, TFTrainer, TFTrainingArguments
from tests.tf.test_models import old_style

@dataclass
class DataArguments:
    rows: int = field(default=8)

parser = HfArgumentParser((DataArguments, TFTrainingArguments))
data_args, training_args = parser.parse_args_into_dataclasses()
print("n_replicas", training_args.n_replicas, "16-bits training", training_args.fp16)
with training_args.strategy.scope():
    model = old_style("vector")

def examples():
    random = np.random.default_rng(0)
    for _ in range(data_args.rows):
        ids = random.integers(1, 11, 6)
        yield {"input_ids": ids}, ids

types = ({"input_ids": tf.int64}, tf.int64)
shapes = ({"input_ids": tf.TensorShape([6])}, tf.TensorShape([6]))
dataset = tf.data.Dataset.from_generator(examples, types, shapes)
dataset = dataset.apply(tf.data.experimental.assert_cardinality(data_args.rows))
trainer = TFTrainer(
    model=model, args=training_args, train_dataset=dataset, eval_dataset=dataset,
    compute_metrics=lambda p: {"acc": float((p.predictions.argmax(-1) == p.label_ids).mean())},
)
if training_args.do_train:
    trainer.train()
    trainer.save_model()
if training_args.do_eval:
    result = trainer.evaluate()
    for key, value in result.items():
        print(key, "=", value)
"""


def test_an_old_script_runs_after_changing_the_import(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    pytest.importorskip("transformers", reason="HfArgumentParser is transformers'")
    script = tmp_path / "run_tf.py"
    script.write_text(OLD_SCRIPT)
    words = ["--output_dir", "out", "--do_train", "--do_eval", "--num_train_epochs", "2", "--learning_rate", "1e-2",
             "--per_device_train_batch_size", "4", "--per_gpu_eval_batch_size", "4", "--evaluation_strategy", "epoch",
             "--no_cuda", "--poly_power", "2", "--logging_steps", "1", "--save_steps", "2", "--overwrite_output_dir",
             "--disable_tqdm", "True", "--rows", "8"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert "eval_acc = " in said and "n_replicas 1" in said
    assert kept(tmp_path / "out") == [2, 4]
    assert (tmp_path / "out" / "model.safetensors").is_file()
