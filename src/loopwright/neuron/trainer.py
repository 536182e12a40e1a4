"""NeuronTrainer and Seq2SeqNeuronTrainer: the trainers of this library with a policy for Trainium, nothing copied."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..notices import logger
from ..pt.checkpoint.tensors import copy_into, host_copy, plain_module
from ..pt.data.static_shapes import Static, StaticShapes
from ..pt.device_traits import KINDS
from ..pt.devices import is_lazy
from ..pt.rng import untouched_rng
from ..pt.seq2seq import Seq2SeqTrainer
from ..pt.trainer import Trainer
from .arguments import NeuronTrainingArguments, Seq2SeqNeuronTrainingArguments

CACHE = "NEURON_COMPILE_CACHE_URL"


class NeuronPolicy:
    """Few shapes everywhere, a kept compile cache, bf16 weights, and a run of every graph beforehand."""

    args: Any
    model: Any
    device: torch.device
    strategy: Any
    default_arguments: type = NeuronTrainingArguments

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(Trainer.__init__).bind_partial(self, *args, **kwargs).arguments
        arguments = given.get("args")
        if arguments is None:
            arguments = kwargs["args"] = self.default_arguments("tmp_trainer")
            args = args[:1]
        use_cache(arguments)
        super().__init__(*args, **kwargs)
        tell_device(self.device, arguments.use_cpu)
        if getattr(arguments, "zero_1", False) and self.strategy.world_size > 1 and is_lazy(self.device):
            self.notices.tell_once(  # type: ignore[attr-defined]
                "zero_1: several processes on lazy XLA each keep the whole optimizer state; set zero_1=False, or let "
                "one process drive the devices and spread it (xla_spmd='fsdp')"
            )

    def wants_static_shapes(self) -> bool:
        return True

    def _adopt_model(self, model: nn.Module) -> None:
        if getattr(self.args, "bf16_weights", False):
            model.to(torch.bfloat16)
        super()._adopt_model(model)  # type: ignore[misc]

    # ---- compiling beforehand ---------------------------------------------------------------------------------------

    def precompile(self) -> int:
        """Run every distinct graph of training and evaluation once; weights, optimizer and random streams stay.

        Returns how many graphs were compiled, where the device counts them.
        """
        trainer: Any = self
        before = self._graphs()
        with self._left_as_found():
            trainer.prepare_training(None)
            for batches in self._updates_of_each_shape(trainer):
                trainer.update_step(trainer.make_update(batches))
            if trainer.eval_dataset is not None:
                self._evaluate_each_shape(trainer)
        return self._graphs() - before

    def _graphs(self) -> int:
        return self.strategy.guard.graphs if hasattr(self.strategy, "guard") else 0

    def _updates_of_each_shape(self, trainer: Any) -> Iterator[list[Any]]:
        batch = next(iter(trainer.train_dataloader))
        for each in in_each_length(batch, trainer.train_dataloader, trainer.args.static_lengths):
            yield [each] * trainer.plan.accumulation

    def _evaluate_each_shape(self, trainer: Any) -> None:
        loader = trainer.get_eval_dataloader()
        batch = next(iter(loader))
        batches = in_each_length(batch, loader, trainer.args.static_lengths)
        trainer.strategy.evaluating()
        loss_only = trainer.compute_metrics is None or trainer.args.prediction_loss_only
        for _ in trainer._eval_steps(list(batches), loss_only, None):
            pass

    @contextmanager
    def _left_as_found(self) -> Iterator[None]:
        """Put back weights, the user's optimizer and schedule, random streams and callbacks."""
        trainer: Any = self
        module = plain_module(trainer.model)
        weights = host_copy(module.state_dict())
        given = (trainer.optimizer, trainer.lr_scheduler)
        states = [None if part is None else part.state_dict() for part in given]
        events, trainer.callback_handler.callbacks = trainer.callback_handler.callbacks, []
        mode, trainer.is_probing = module.training, True
        with untouched_rng():
            try:
                yield
            finally:
                trainer.is_probing = False
                trainer.callback_handler.callbacks = events
                trainer.finish_with_model()
                trainer.release_data()
                copy_into(module, weights, strict=True, source="memory")
                trainer.optimizer, trainer.lr_scheduler = given
                for part, state in zip(given, states, strict=True):
                    if part is not None:
                        part.load_state_dict(state)
                module.train(mode)
                trainer.strategy.zero_grad()


class NeuronTrainer(NeuronPolicy, Trainer):
    """Trainer on Trainium, natively or through XLA; on any other device the same script runs there."""


class Seq2SeqNeuronTrainer(NeuronPolicy, Seq2SeqTrainer):
    """Seq2SeqTrainer on Trainium: generation in evaluation and prediction."""

    default_arguments = Seq2SeqNeuronTrainingArguments


def in_each_length(batch: Any, loader: Any, lengths: list[int] | None) -> Iterator[Any]:
    """A padded batch in every length its loader may give; as it is where nobody has said which there are."""
    shapes = getattr(loader.collate_fn, "shapes", None)
    if not isinstance(batch, Static) or not isinstance(shapes, StaticShapes) or not lengths or not batch.widths:
        yield batch
        return
    real = batch.real()
    for length in sorted(lengths):
        cut = {name: value[:, :length] if name in batch.widths else value for name, value in real.items()}
        longest = StaticShapes(
            [length],
            label_names=shapes.label_names,
            pad_token=shapes.pad_token,
            takes_mask=shapes.takes_mask,
            tell=lambda text: None,
        )
        yield longest.pad(cut, batch.full)


def use_cache(args: Any) -> None:
    """Keep compiled graphs where the arguments say."""
    folder = getattr(args, "compile_cache_dir", None)
    if folder is None:
        return
    os.environ[CACHE] = str(folder)
    if is_lazy(args.device):
        from ..xla.runtime import keep_compiled

        keep_compiled(str(folder))


def tell_device(device: torch.device, asked_for_cpu: bool) -> None:
    """Say what was found; where nothing was, how to get it."""
    if device.type != "cpu" or asked_for_cpu:
        logger.info(f"training on {device}")
        return
    commands = "\n".join(f"  {name}: {kind.install}" for name, kind in KINDS.items())
    logger.warning(f"no accelerator was found, so training runs on the CPU; to get one into torch:\n{commands}")

