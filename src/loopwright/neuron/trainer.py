"""NeuronTrainer and Seq2SeqNeuronTrainer: loopwright's trainers with defaults for Trainium."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from ..notices import logger
from ..pt.arguments import TrainingArguments
from ..pt.checkpoint.tensors import copy_into, host_copy, plain_module
from ..pt.data.pipeline import TorchData
from ..pt.data.static_shapes import Static, StaticShapes
from ..pt.device_traits import known_kinds
from ..pt.devices import is_lazy
from ..pt.internals import TorchInternals
from ..pt.seq2seq import Seq2SeqInternals, Seq2SeqTrainer
from ..pt.trainer import Trainer
from ..snapshot import untouched_rng
from .arguments import NeuronTrainingArguments, Seq2SeqNeuronTrainingArguments

CACHE = "NEURON_COMPILE_CACHE_URL"


class NeuronData(TorchData):
    """Batches of few shapes, on every device."""

    def wants_static_shapes(self) -> bool:
        return True


class NeuronInternals(TorchInternals):
    """Static shapes, a persistent compile cache, bf16 weights, and compilation of every graph in advance."""

    data_class = NeuronData
    own_arguments: ClassVar[type[TrainingArguments]] = NeuronTrainingArguments
    """The class of arguments if none are given."""

    def construct(  # type: ignore[override]
        self, model: Any = None, args: TrainingArguments | None = None, **given: Any
    ) -> None:
        args = self.own_arguments("tmp_trainer") if args is None else args
        use_cache(args)
        super().construct(model, args, **given)
        tell_device(self.device, args.use_cpu)
        if getattr(args, "zero_1", False) and self.strategy.world_size > 1 and is_lazy(self.device):
            self.notices.warn_once(
                "zero_1: on lazy XLA each rank keeps the whole optimizer state; set zero_1=False, or let one process "
                "drive all devices and shard it (xla_spmd='fsdp')"
            )

    def adopt_model(self, model: nn.Module) -> None:
        if getattr(self.args, "bf16_weights", False):
            model.to(torch.bfloat16)
        super().adopt_model(model)

    # ---- compiling beforehand ---------------------------------------------------------------------------------------

    def precompile(self) -> int:
        """Run every distinct graph of training and evaluation once; weights, optimizer and random states are unchanged.

        Returns how many graphs were compiled, where the device counts them.
        """
        before = self._graphs()
        with self._left_as_found():
            self.prepare_training(None)
            for batches in self._updates_of_each_shape():
                update = self.loss.make_update(batches)
                self.apply_update(self.run_micro_batches(update))
            if self.trainer.eval_dataset is not None:
                self._evaluate_each_shape()
        return self._graphs() - before

    def _graphs(self) -> int:
        return 0 if self.strategy.guard is None else self.strategy.guard.graphs

    def _updates_of_each_shape(self) -> Iterator[list[Any]]:
        batch = next(iter(self.run.loader))
        for each in in_each_length(batch, self.run.loader, self.args.static_lengths):
            yield [each] * self.run.plan.accumulation

    def _evaluate_each_shape(self) -> None:
        loader = self.trainer.get_eval_dataloader()
        batch = next(iter(loader))
        batches = in_each_length(batch, loader, self.args.static_lengths)
        self.strategy.evaluating()
        loss_only = self.trainer.compute_metrics is None or self.args.prediction_loss_only
        for _ in self.evaluation.eval_steps(list(batches), loss_only, None):
            pass

    @contextmanager
    def _left_as_found(self) -> Iterator[None]:
        """Context manager: restores weights, the user's optimizer and schedule, random states and callbacks."""
        module = plain_module(self.model)
        weights = host_copy(module.state_dict())
        given = (self.trainer.optimizer, self.trainer.lr_scheduler)
        states = [None if part is None else part.state_dict() for part in given]
        self.new_run()
        events, self.trainer.callback_handler.callbacks = self.trainer.callback_handler.callbacks, []
        mode, self.is_probing = module.training, True
        with untouched_rng():
            try:
                yield
            finally:
                self.is_probing = False
                self.trainer.callback_handler.callbacks = events
                self.finish_with_model()
                self.data.release()
                self.run.close()
                copy_into(module, weights)
                self.trainer.optimizer, self.trainer.lr_scheduler = given
                for part, state in zip(given, states, strict=True):
                    if part is not None:
                        part.load_state_dict(state)
                module.train(mode)
                self.strategy.zero_grad()


class Seq2SeqNeuronInternals(NeuronInternals, Seq2SeqInternals):
    """The implementation of `Seq2SeqNeuronTrainer`: also generates."""

    own_arguments = Seq2SeqNeuronTrainingArguments


class NeuronTrainer(Trainer):
    """Trainer for Trainium, natively or through XLA; the same script also runs on other devices."""

    _loopwright: NeuronInternals
    _loopwright_class: ClassVar[type[TorchInternals]] = NeuronInternals

    def precompile(self) -> int:
        """Run every distinct graph of training and evaluation once; weights, optimizer and random states are unchanged.

        Returns how many graphs were compiled, where the device counts them.
        """
        return self._loopwright.precompile()


class Seq2SeqNeuronTrainer(Seq2SeqTrainer):
    """Seq2SeqTrainer for Trainium: generation in evaluation and prediction."""

    _loopwright: Seq2SeqNeuronInternals
    _loopwright_class: ClassVar[type[TorchInternals]] = Seq2SeqNeuronInternals

    def precompile(self) -> int:
        """As `NeuronTrainer.precompile`."""
        return self._loopwright.precompile()


def in_each_length(batch: Any, loader: Any, lengths: list[int] | None) -> Iterator[Any]:
    """A padded batch in every length of static_lengths; unchanged if that is not set."""
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


def use_cache(args: TrainingArguments) -> None:
    """Store compiled graphs in compile_cache_dir."""
    folder = getattr(args, "compile_cache_dir", None)
    if folder is None:
        return
    os.environ[CACHE] = str(folder)
    if is_lazy(args.device):
        from ..xla.runtime import keep_compiled

        keep_compiled(str(folder))


def tell_device(device: torch.device, asked_for_cpu: bool) -> None:
    """Log the device in use; without an accelerator, what to install."""
    if device.type != "cpu" or asked_for_cpu:
        logger.info(f"training on {device}")
        return
    commands = "\n".join(f"  {name}: {kind.install}" for name, kind in known_kinds().items())
    logger.warning(f"no accelerator was found, so training runs on the CPU; to use one, install:\n{commands}")
