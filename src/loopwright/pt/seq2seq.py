"""Seq2SeqTrainer: generation in evaluation, for encoder-decoder and decoder-only models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ..core.evaluation.loop import EvalPlan, EvalStep
from ..core.outputs import PredictionOutput
from ..core.user_code.overrides import is_overridden
from ..errors import ArgumentsError
from ..speed.layouts.positions import longest_alike
from ..speed.model_stamp import state_of
from ..speed.proof.random_draws import random_streams
from .acceleration import KEEP_INPUTS, hooked_module
from .arguments import Seq2SeqTrainingArguments
from .checkpoint.tensors import plain_module
from .data.loaders import has_length
from .data.static_shapes import IGNORED
from .devices import is_lazy, synchronize
from .distributed.sync import SharedEvaluation
from .evaluation.generation_options import GenerationOptions
from .evaluation.joined_batches import Inputs
from .evaluation.joined_generation import JoinedGeneration, Request, Situation
from .evaluation.prompts import answers_of, prompts_of
from .evaluation.read_ahead import ACTS_BETWEEN, ReadAhead, acts_between_batches
from .hooks import TorchHooks
from .internals import TorchInternals
from .restoring.sandbox import sandbox
from .strategies.base import on_host
from .trainer import Trainer

SEES_BATCHES = ("prediction_step", "autocast_smart_context_manager")
"""Overrides that see the batches of evaluation, or what surrounds `generate`, in addition to those of training."""

DEFAULT_LENGTH = 20
"""How many tokens transformers generates by default, and the width to which it pads shorter ones."""


class Seq2SeqHooks(TorchHooks, Protocol):
    """The hooks of a trainer that generates."""

    _gen_kwargs: dict[str, Any]

    def load_generation_config(self, gen_config_arg: Any) -> Any: ...
    def _pad_tensors_to_max_len(self, tensor: Tensor, max_length: int) -> Tensor: ...


class Seq2SeqEvaluation(SharedEvaluation):
    """Generation in addition to the loss, in evaluation and prediction."""

    trainer: Seq2SeqHooks

    def __init__(self, internals: Any) -> None:
        super().__init__(internals)
        self._joined = JoinedGeneration(self.device, self.notices)

    # ---- evaluating -------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Like Trainer.evaluate; `gen_kwargs` are passed to `model.generate` in this call."""
        self.trainer._gen_kwargs = self._generation_options(gen_kwargs or self._gen_kwargs_of_outer_call())
        return super().evaluate(eval_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Like Trainer.predict; `gen_kwargs` are passed to `model.generate` in this call."""
        self.trainer._gen_kwargs = self._generation_options(gen_kwargs)
        return super().predict(test_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    def _gen_kwargs_of_outer_call(self) -> dict[str, Any]:
        """The options of the outer call, because evaluate() of several named sets calls itself."""
        return self.trainer._gen_kwargs if self._evaluating_each else {}

    def _generation_options(self, given: dict[str, Any]) -> dict[str, Any]:
        """The options of the call, completed by those of the arguments.

        For decoder-only models the maximum length counts new tokens, so that it does not depend on a batch's padding.
        """
        options = {k: v for k, v in given.items() if v is not None or k not in ("max_length", "num_beams")}
        longest = getattr(self.args, "generation_max_length", None)
        if longest is not None and options.get("max_length") is None and options.get("max_new_tokens") is None:
            options["max_length" if self._has_encoder() else "max_new_tokens"] = longest
        beams = getattr(self.args, "generation_num_beams", None)
        if beams is not None and options.get("num_beams") is None:
            options["num_beams"] = beams
        if self.strategy.forward_is_collective and options.get("synced_gpus") is None:
            options["synced_gpus"] = True  # ranks that finish early continue until all have finished
        return options

    def _evaluation_plan(self, dataloader: Any, loss_only: bool) -> EvalPlan:
        plan = super()._evaluation_plan(dataloader, loss_only)
        plan.weight_by_samples = False  # eval_loss_reduction="batch_mean" is transformers' behaviour
        return plan

    def is_plain(self, loss_only: bool) -> bool:
        return super().is_plain(loss_only) and (loss_only or not self._generates())

    def eval_steps(self, loader: Any, loss_only: bool, ignore_keys: list[str] | None) -> Iterator[EvalStep]:
        generates = self._generates() and not loss_only and self.args.speed != "off" and not is_lazy(self.device)
        return super().eval_steps(self._read_ahead(loader) if generates else loader, loss_only, ignore_keys)

    def _read_ahead(self, loader: Any) -> Any:
        """The batches of a loader, several of which may be generated together."""
        model: Any = plain_module(self.evaluated_model())
        if not hasattr(type(model), "generate") or not hasattr(model, "generation_config"):
            return loader  # the first batch raises the error
        options = GenerationOptions.of(model, self.trainer._gen_kwargs or self._generation_options({}))
        reason = self._why_not_joined(model, options)
        if reason is not None:
            self.notices.inform_once(f"speed: generation keeps the collator's batches: {reason}")
            return loader
        kind = f"{type(model).__qualname__} {getattr(model, 'dtype', None)} {type(self.strategy.precision).__name__}"
        now = Situation(kind, repr(sorted(options.values.items())), self.args.speed, not self.args.full_determinism)
        return ReadAhead(self._joined.ahead(loader, len(loader) if has_length(loader) else None, now))

    def _why_not_joined(self, model: Any, options: GenerationOptions) -> str | None:
        for name in (*SEES_BATCHES, *KEEP_INPUTS):
            if is_overridden(self.trainer, name) and name != "compute_loss":
                return f"{name} is overridden"
        if acts_between_batches(self.callback_handler):
            return ACTS_BETWEEN
        if self.strategy.forward_is_collective or self.strategy.world_size > self.strategy.data_world:
            return "the ranks compute the model together"
        if self.args.torch_compile:
            return "torch_compile compiles for the shapes of its batches"
        if "generate" in vars(model) or not type(model).generate.__module__.startswith(("transformers.", "peft.")):
            return "generate is not that of transformers"
        if (hooked := hooked_module(model)) is not None:
            return f"{hooked} has a hook, which would see other batches"
        return options.why_not(has_encoder=self._has_encoder())

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Loss, generated ids and labels of one batch; without generation, like Trainer.prediction_step."""
        if prediction_loss_only or not self._generates():
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        batch, inputs = inputs, self.trainer._prepare_inputs(inputs)
        options = gen_kwargs or self.trainer._gen_kwargs or self._generation_options({})
        plain = plain_module(model)
        # On a lazy device each read of a value is a graph, so tokens are selected and counted on the host.
        source = on_host(inputs) if is_lazy(self.device) else inputs
        request = self._request(plain, self._with_fixed_cache(plain, options))
        with torch.no_grad(), self.trainer.compute_loss_context_manager(), self.strategy.generating(plain):
            generated = self._joined.take(batch, request)
            generated = request.generate(request.inputs(source)) if generated is None else generated
        longest = self._longest(plain, request.options)
        if generated.shape[-1] < longest:
            generated = self.trainer._pad_tensors_to_max_len(generated, longest)
        labels = source.get("labels")
        loss = self._loss_beside_generation(model, inputs) if labels is not None else None
        if labels is not None:
            labels = _widened(labels, longest) if self._has_encoder() else answers_of(labels)
        return loss, generated, labels

    def _with_fixed_cache(self, model: Any, options: dict[str, Any]) -> dict[str, Any]:
        """On a lazy device, allocate the cache for the longest answer, so that all tokens use one graph."""
        own = model.generation_config
        chosen = "cache_implementation" in options or own.cache_implementation is not None
        cached = options.get("use_cache", own.use_cache) is not False
        if not is_lazy(self.device) or chosen or not cached or not getattr(model, "_can_compile_fullgraph", False):
            return options
        return {**options, "cache_implementation": "static"}

    def _loss_beside_generation(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """The loss as in training, including overrides and loss functions."""
        if self._answers_are_apart(inputs):
            return None
        with torch.no_grad():
            return self._loss_and_outputs(model, dict(inputs))[0]

    def _answers_are_apart(self, inputs: Any) -> bool:
        """Whether labels do not belong to the input tokens, so that there is no causal loss."""
        if self._has_encoder() or not self._generates():
            return False
        return inputs.get("labels") is not None and inputs["labels"].shape != inputs["input_ids"].shape

    def _predicts_next_token(self) -> bool:
        return super()._predicts_next_token() and not self._generates()

    def eval_items(self, inputs: Any, learn: Callable[[Any], Any] | None = None) -> Any:
        return super().eval_items(inputs, learn=None if self._answers_are_apart(inputs) else learn)

    # ---- generating -------------------------------------------------------------------------------------------------

    def _generates(self) -> bool:
        return bool(getattr(self.args, "predict_with_generate", False))

    def _has_encoder(self) -> bool:
        return bool(getattr(getattr(plain_module(self.model), "config", None), "is_encoder_decoder", False))

    def _request(self, model: Any, options: dict[str, Any]) -> Request:
        """How this model generates with these options, from batches on the device."""
        has_encoder = self._has_encoder()

        def generate(inputs: Inputs) -> Tensor:
            generated: Tensor = model.generate(**inputs, **options)
            return generated if has_encoder else generated[:, inputs["input_ids"].shape[1] :]

        return Request(
            inputs=partial(self._encoder_inputs if has_encoder else self._prompt_inputs, model),
            prepare=self.trainer._prepare_inputs,
            generate=generate,
            options=GenerationOptions.of(model, options),
            pad=partial(self._pad_token, model),
            left=not has_encoder,
            start=int(has_encoder),
            alike=longest_alike(model),
            wait=partial(synchronize, self.device),
            apart=partial(sandbox, model, self.trainer),
            state=lambda: (random_streams(model), state_of(model)),
        )

    def _encoder_inputs(self, model: Any, inputs: Inputs) -> Inputs:
        hidden = {"labels", "num_items_in_batch", *self.trainer.label_names}
        begin, labels = inputs.get("decoder_input_ids"), inputs.get("labels")
        if begin is None or (labels is not None and labels.shape == begin.shape):
            # The decoder's inputs of training contain the answer; others are the prompt that it begins with.
            hidden |= {"decoder_input_ids", "decoder_attention_mask"}
        return {name: v for name, v in inputs.items() if name not in hidden}

    def _prompt_inputs(self, model: Any, inputs: Inputs) -> Inputs:
        width = inputs["input_ids"].shape[1] if is_lazy(self.device) else None
        prompts, mask = prompts_of(inputs, pad=self._pad_token(model), width=width)
        hidden = {"input_ids", "attention_mask", "labels", "num_items_in_batch", *self.trainer.label_names}
        # Images and similar inputs are passed with the prompt; per-token inputs no longer match its positions.
        shape = inputs["input_ids"].shape
        others = {k: v for k, v in inputs.items() if k not in hidden and getattr(v, "shape", ())[:2] != shape}
        return {"input_ids": prompts, "attention_mask": mask, **others}

    def _longest(self, model: Any, options: GenerationOptions) -> int:
        """The width to which generated ids are padded, so that all batches have the same."""
        start = int(self._has_encoder())
        new, whole = (options.values.get(name) or 0 for name in ("max_new_tokens", "max_length"))
        if not new and not whole:
            positions = getattr(model.config, "max_position_embeddings", None)
            return min(start + DEFAULT_LENGTH, positions or start + DEFAULT_LENGTH)
        least = (whole, model.generation_config.max_length or DEFAULT_LENGTH) if start else ()
        return max(new + start if new else 0, *least, 0)

    def _pad_tensors_to_max_len(self, tensor: Tensor, max_length: int) -> Tensor:
        wide = tensor.new_full((tensor.shape[0], max_length), self._pad_token(plain_module(self.model)))
        wide[:, : tensor.shape[-1]] = tensor
        return wide

    def _pad_token(self, model: Any) -> int:
        """The padding id: the tokenizer's, else the model's."""
        places = (
            self.trainer.processing_class,
            getattr(model, "generation_config", None),
            getattr(model, "config", None),
        )
        for place in places:
            for name in ("pad_token_id", "eos_token_id"):
                found = getattr(place, name, None)
                if found is not None:
                    return int(found[0] if isinstance(found, (list, tuple)) else found)
        raise ArgumentsError("generating in batches needs a padding token; set model.generation_config.pad_token_id")


class Seq2SeqInternals(TorchInternals):
    """The internals of a Seq2SeqTrainer."""

    trainer: Seq2SeqHooks
    evaluation: Seq2SeqEvaluation
    evaluation_class = Seq2SeqEvaluation
    arguments_class = Seq2SeqTrainingArguments

    def __init__(self, trainer: Seq2SeqHooks) -> None:
        super().__init__(trainer)
        trainer._gen_kwargs = {}

    def adopt_model(self, model: nn.Module) -> None:
        super().adopt_model(model)
        config = getattr(self.args, "generation_config", None)
        if config is not None:
            plain_module(model).generation_config = self.trainer.load_generation_config(config)


def _widened(labels: Tensor, width: int) -> Tensor:
    """Labels with ignored targets up to the width of generated ids: metrics compare the two position by position."""
    missing = width - labels.shape[-1]
    return nn.functional.pad(labels, (0, missing), value=IGNORED) if missing > 0 and labels.dim() == 2 else labels


class Seq2SeqTrainer(Trainer):
    """A Trainer whose evaluation can generate: summaries, translations, answers."""

    _loopwright: Seq2SeqInternals
    _loopwright_class: ClassVar[type[TorchInternals]] = Seq2SeqInternals

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """A GenerationConfig from a config, a file, a folder or a name."""
        from transformers import GenerationConfig

        if isinstance(gen_config_arg, GenerationConfig):
            return gen_config_arg
        path = Path(gen_config_arg)
        if path.is_file():
            return GenerationConfig.from_pretrained(str(path.parent), config_file_name=path.name)
        return GenerationConfig.from_pretrained(str(gen_config_arg))

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Like `Trainer.evaluate`; `gen_kwargs` are passed to `model.generate` in this call."""
        return self._loopwright.evaluation.evaluate(eval_dataset, ignore_keys, metric_key_prefix, **gen_kwargs)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Like `Trainer.predict`; `gen_kwargs` are passed to `model.generate` in this call."""
        return self._loopwright.evaluation.predict(test_dataset, ignore_keys, metric_key_prefix, **gen_kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Loss, generated ids and labels of one batch; without generation, like `Trainer.prediction_step`."""
        evaluation = self._loopwright.evaluation
        return evaluation.prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)

    def _pad_tensors_to_max_len(self, tensor: Tensor, max_length: int) -> Tensor:
        """Pad generated ids to one length. Called for every batch that generates."""
        return self._loopwright.evaluation._pad_tensors_to_max_len(tensor, max_length)
