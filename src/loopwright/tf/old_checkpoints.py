"""Resuming from checkpoints in TensorFlow's format, written by transformers' TFTrainer."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from ..core.outputs import TrainOutput
from ..errors import CheckpointError, first_line
from ..keras.internals import KerasInternals
from ..notices import logger
from .variables import raw

VALUE = ".ATTRIBUTES/VARIABLE_VALUE"
"""Suffix of a variable's name in a TensorFlow checkpoint."""


class OldCheckpoints(KerasInternals):
    """Resuming from a folder of transformers' TFTrainer."""

    _old_checkpoint: str | None = None

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **old_names: Any,
    ) -> TrainOutput:
        asked = resume_from_checkpoint if resume_from_checkpoint is not None else self.args.resume_from_checkpoint
        self._old_checkpoint = old_checkpoint(asked)
        if self._old_checkpoint is not None:
            resume_from_checkpoint = False
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval, **old_names)

    def begin_anew(self) -> None:
        if self._old_checkpoint is not None:
            self._resume_old(self._old_checkpoint)

    def _resume_old(self, prefix: str) -> None:
        """Restore weights, optimizer and number of updates; compute the data position from that number."""
        step = restore_old(prefix, self.model, self.trainer.optimizer)
        plan = self.run.plan
        self.state.global_step = self.run.progress.last_logged_step = step
        per_epoch = plan.updates_per_epoch
        self.run.progress.epoch, inside = divmod(step, per_epoch)
        self.run.progress.batches_in_epoch = inside * plan.accumulation
        self.run.progress.samples_in_epoch = inside * plan.total_batch_size
        self.state.epoch = plan.epoch_after(self.run.progress.epoch, self.run.progress.batches_in_epoch)
        for _ in range(step):
            self.trainer.lr_scheduler.step()
        self.notices.warn_once(
            f"{prefix} is a TensorFlow checkpoint without data position and RNG state: training resumes at step "
            f"{step}, with the data order of epoch {self.run.progress.epoch}"
        )


def old_checkpoint(place: Any) -> str | None:
    """The newest TensorFlow checkpoint at a path: a folder of tf.train.CheckpointManager, or a prefix in it."""
    if not isinstance(place, (str, os.PathLike)):
        return None
    text = os.fspath(place)
    if os.path.isfile(f"{text}.index"):
        return text
    if os.path.isfile(os.path.join(text, "trainer_state.json")) or not os.path.isdir(text):
        return None
    return tf.train.latest_checkpoint(text)


def restore_old(prefix: str, model: Any, optimizer: Any) -> int:
    """Load `optimizer` and `model` of such a checkpoint; returns its number of updates."""
    saved = {name for name, _ in tf.train.list_variables(prefix)}
    try:
        tf.train.Checkpoint(model=model).restore(prefix).assert_existing_objects_matched()
    except (AssertionError, ValueError) as error:
        raise CheckpointError(
            f"{prefix} does not match the model ({first_line(error)}). Load weights of a tf_keras model "
            "into a tf_keras model (TF_USE_LEGACY_KERAS=1)"
        ) from error
    if any(".OPTIMIZER_SLOT/optimizer/" in name for name in saved):
        _restore_slots(prefix, saved, model, optimizer)
    else:
        tf.train.Checkpoint(model=model, optimizer=optimizer).restore(prefix).expect_partial()
    for name in ("optimizer/iter", "optimizer/_iterations"):
        key = f"{name}/{VALUE}"
        if key in saved:
            step = int(tf.train.load_variable(prefix, key))
            optimizer.iterations.assign(step)
            return step
    logger.warning(f"{prefix} does not contain the number of steps: counting starts at 0")
    return 0


def _restore_slots(prefix: str, saved: set[str], model: Any, optimizer: Any) -> None:
    """Load Adam's moments in the format before Keras 2.11: stored next to their variables."""
    moments = {"m": getattr(optimizer, "_momentums", None), "v": getattr(optimizer, "_velocities", None)}
    keys = _checkpoint_keys(model)
    for index, variable in enumerate(model.trainable_variables):
        for slot, values in moments.items():
            key = f"{keys.get(id(raw(variable)))}/.OPTIMIZER_SLOT/optimizer/{slot}/{VALUE}"
            if values is not None and key in saved:
                values[index].assign(tf.train.load_variable(prefix, key))


def _checkpoint_keys(model: Any) -> dict[int, str]:
    """The key of each variable of a model in a TensorFlow checkpoint, by the variable's id."""
    from tensorflow.python.checkpoint.graph_view import ObjectGraphView

    root = tf.train.Checkpoint(model=model)  # the view has only a weak reference
    objects, paths = ObjectGraphView(root).breadth_first_traversal()
    return {id(each): "/".join(reference.name for reference in paths[each]) for each in objects}
