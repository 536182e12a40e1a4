"""What the library uses of a trainer of Keras models, and what all parts behind one have."""

from __future__ import annotations

from typing import Any, Protocol

from ..core.hooks import Hooks
from ..core.internals import Internals
from .arguments import KerasTrainingArguments
from .run import KerasRun
from .strategy import KerasStrategy


class KerasHooks(Hooks, Protocol):
    """Of a trainer of Keras models."""

    args: KerasTrainingArguments
    train_dataset: Any
    model_init: Any
    compute_loss_func: Any
    preprocess_logits_for_metrics: Any
    label_names: Any
    tb_writer: Any
    train_loss: Any
    eval_loss: Any

    def run_model(self, *args: Any, **kwargs: Any) -> Any: ...
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any: ...
    def _compute_nb_instances(self, *args: Any, **kwargs: Any) -> Any: ...
    def get_train_tfdataset(self, *args: Any, **kwargs: Any) -> Any: ...
    def get_eval_tfdataset(self, *args: Any, **kwargs: Any) -> Any: ...
    def get_test_tfdataset(self, *args: Any, **kwargs: Any) -> Any: ...
    def call_model_init(self, *args: Any, **kwargs: Any) -> Any: ...
    def create_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> Any: ...
    def prediction_loop(self, *args: Any, **kwargs: Any) -> Any: ...
    def prediction_step(self, *args: Any, **kwargs: Any) -> Any: ...
    def save_model(self, *args: Any, **kwargs: Any) -> Any: ...
    def _save(self, *args: Any, **kwargs: Any) -> Any: ...
    def setup_wandb(self, *args: Any, **kwargs: Any) -> Any: ...
    def setup_comet(self, *args: Any, **kwargs: Any) -> Any: ...


class KerasBase(Internals):
    """What the parts behind a trainer of Keras models share."""

    trainer: KerasHooks
    run: KerasRun
    run_class = KerasRun
    args: KerasTrainingArguments
    strategy: KerasStrategy
    trainer_name: str
    """What messages call the trainer."""
