"""What is wrong with a batch whose forward or loss failed: out of range, too long, of another dtype, too large."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...core.user_code.error_notes import describe, frames_of
from ...speed.memory.out_of_memory import is_out_of_memory
from ..arguments import TrainingArguments
from ..data.columns import LABEL_COLUMNS

LONGEST = 1_000_000
"""A limit on positions above this is none: tokenizers use such numbers for models without a limit."""
TOKENS = ("input_ids", "decoder_input_ids")
TARGETS = ("cross_entropy", "nll_loss")
NUMBERS = ("binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "smooth_l1_loss")
OUT_OF_RANGE = (
    "index out of range",
    "out of bounds",
    "device-side assert",
    "must match the existing size",
    "must match the size",
)
"""Errors of ids, labels or lengths beyond a table; that of a GPU names no table."""


def explain(error: BaseException, batch: Any, model: nn.Module, args: TrainingArguments, what: str = "training") -> str:
    """One sentence about the cause of an error of a forward pass or a loss; empty if the batch does not show it."""
    if is_out_of_memory(error):
        return out_of_memory(args, what)
    if not isinstance(error, (IndexError, RuntimeError, ValueError, TypeError, AttributeError)):
        return ""
    columns = dict(host_columns(batch))
    for examine in (partial(_by_containers, batch), _in_frames, _by_names, _by_message):
        with suppress(Exception):  # the model and the batch are the user's; without an explanation the error remains
            found = examine(error, columns, model)
            if found:
                return found
    return ""


def out_of_memory(args: TrainingArguments, what: str) -> str:
    """What to change if memory is short: only what is not set already."""
    if what == "evaluation":
        size = args.per_device_eval_batch_size
        less = "set eval_accumulation_steps" if args.eval_accumulation_steps is None else "set batch_eval_metrics=True"
        return f"out of memory in an evaluation: lower per_device_eval_batch_size={size}, or {less}"
    size, options = args.per_device_train_batch_size, ("auto_find_batch_size", "gradient_checkpointing")
    unset = [f"{name}=True" for name in options if not getattr(args, name)]
    unset += ["bf16=True"] * (not (args.bf16 or args.fp16))
    smaller = (
        f"lower per_device_train_batch_size={size} and raise gradient_accumulation_steps="
        f"{args.gradient_accumulation_steps} by the same factor"
    )
    steps = [smaller] * (size > 1) + [f"set {' or '.join(unset)}"] * bool(unset)
    return f"out of memory: {', or '.join(steps) or 'use shorter samples, a smaller model or more devices'}"


def host_columns(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch by name that can be read: after an error of a GPU, its memory cannot."""
    for name, value in batch.items() if isinstance(batch, Mapping) else ():
        if isinstance(value, Tensor) and value.device.type == "cpu":
            yield str(name), value


# ---- the function that failed ---------------------------------------------------------------------------------------


def _in_frames(error: BaseException, columns: dict[str, Tensor], model: nn.Module) -> str:
    """The explanation from the arguments of the torch function that raised."""
    explainers: dict[str, Callable[..., str]] = {
        "embedding": _of_embedding,
        **dict.fromkeys(TARGETS, _of_targets),
        **dict.fromkeys(NUMBERS, _of_numbers),
    }
    for frame in reversed(list(frames_of(error))):
        values = frame.f_locals
        if frame.f_code.co_filename.endswith("functional.py") and frame.f_code.co_name in explainers:
            return explainers[frame.f_code.co_name](values, columns, model)
        layer, given = values.get("self"), values.get("input")
        if isinstance(layer, nn.Module) and isinstance(given, Tensor) and "weight" in layer._parameters:
            return _of_layer(layer, given, columns, model)
    return ""


def _of_embedding(values: Mapping[str, Any], columns: dict[str, Tensor], model: nn.Module) -> str:
    ids, weight = values["input"], values["weight"]
    if ids.is_floating_point():
        name = _column_like(ids, columns, "input_ids")
        return f"{name} is {_dtype(ids)}, but an embedding needs integers; convert it to int64"
    if ids.device.type != "cpu":
        return ""
    low, high, rows = int(ids.min()), int(ids.max()), len(weight)
    layer = next((each for each, value in model.named_parameters() if value is weight), "").removesuffix(".weight")
    if high >= rows and _are_positions(ids) and weight is not getattr(_token_table(model), "weight", None):
        return _too_long(ids.shape[-1], rows, layer)
    column = next((each for each, value in columns.items() if _same_range(value, ids)), "the input")
    return _bad_ids(column, low, high, rows, layer)


def _of_targets(values: Mapping[str, Any], columns: dict[str, Tensor], model: nn.Module) -> str:
    scores, target = values["input"], values["target"]
    classes = scores.shape[1] if scores.dim() > 1 else scores.shape[0]
    if target.is_floating_point() and target.shape != scores.shape:
        return (
            f"{_column_like(target, columns)} is {_dtype(target)}, but a loss over classes needs integers; convert it "
            "to int64"
        )
    if target.device.type != "cpu" or target.is_floating_point():
        return ""
    words = getattr(_token_table(model), "num_embeddings", None)
    ignored = values.get("ignore_index", -100)
    return _bad_labels(_column_like(target, columns), target, classes, ignored, are_tokens=classes == words)


def _of_numbers(values: Mapping[str, Any], columns: dict[str, Tensor], model: nn.Module) -> str:
    target = values["target"]
    if target.is_floating_point():
        return ""
    return f"{_column_like(target, columns)} is {_dtype(target)}, but this loss needs floats; convert it to float32"


def _of_layer(layer: nn.Module, given: Tensor, columns: dict[str, Tensor], model: nn.Module) -> str:
    weight = layer._parameters["weight"]
    same = [name for name, value in columns.items() if value.dtype is given.dtype and name not in LABEL_COLUMNS]
    if weight is None or given.dtype is weight.dtype or isinstance(layer, nn.Embedding) or not same:
        return ""
    place = next((name for name, each in model.named_modules() if each is layer), type(layer).__name__)
    return (
        f"{same[0]} is {_dtype(given)}, but the layer {place!r} has weights of {_dtype(weight)}; convert the column to "
        f"{_dtype(weight)}"
    )


# ---- containers ------------------------------------------------------------------------------------------------------


def _by_containers(batch: Any, error: BaseException, columns: dict[str, Tensor], model: nn.Module) -> str:
    """The explanation if a batch is not a dict, or a column of it is not a tensor."""
    text = str(error)
    if isinstance(error, TypeError) and (batch is None or "argument after ** must be a mapping" in text):
        return f"the batch is {describe(batch)}; let the data collator return a dict of the arguments of the forward"
    for name, value in batch.items() if isinstance(batch, Mapping) else ():
        kind = type(value).__name__
        is_named = kind in ("list", "tuple") and (f"'{kind}' object" in text or f"not {kind}" in text)
        if is_named or (kind == "ndarray" and isinstance(error, (TypeError, AttributeError))):
            return f"{name} is a {kind}, not a tensor; convert it in the data collator"
    return ""


# ---- the names of columns and the configuration of the model --------------------------------------------------------


def _by_names(error: BaseException, columns: dict[str, Tensor], model: nn.Module) -> str:
    """The explanation from the columns alone: an error of a GPU is raised later, in another place."""
    if not any(phrase in str(error) for phrase in OUT_OF_RANGE):
        return ""
    config: Any = getattr(model, "config", None)
    tokens = next((columns[name] for name in TOKENS if name in columns), None)
    if tokens is not None and tokens.dim() > 1:
        limit = getattr(config, "max_position_embeddings", None)
        if isinstance(limit, int) and limit < min(tokens.shape[1], LONGEST):
            return _too_long(tokens.shape[1], limit, "")
    table = _token_table(model)
    if table is not None:
        for name in TOKENS:
            ids = columns.get(name)
            if ids is not None and not ids.is_floating_point() and ids.numel():
                low, high = int(ids.min()), int(ids.max())
                if low < 0 or high >= table.num_embeddings:
                    return _bad_ids(name, low, high, table.num_embeddings, "")
    labels = columns.get("labels")
    if labels is None or labels.is_floating_point():
        return ""
    is_classifier = "Classification" in type(model).__name__
    words = None if table is None else table.num_embeddings
    classes = getattr(config, "num_labels", None) if is_classifier else words
    known = isinstance(classes, int) and (is_classifier or labels.dim() > 1)
    return _bad_labels("labels", labels, classes or 0, -100, are_tokens=not is_classifier) if known else ""


def _by_message(error: BaseException, columns: dict[str, Tensor], model: nn.Module) -> str:
    """The explanation of an error of the backward pass, which has no frame of the forward."""
    text, labels = str(error), columns.get("labels")
    if labels is None or labels.is_floating_point() or "but expected Float" not in text:
        return ""
    return f"labels is {_dtype(labels)}, but this loss needs floats; convert it to float32"


# ---- sentences ------------------------------------------------------------------------------------------------------


def _bad_ids(name: str, low: int, high: int, rows: int, layer: str) -> str:
    if low >= 0 and high < rows:
        return ""
    where = f"the embedding {layer!r}" if layer else "the model's embedding"
    larger = "or call model.resize_token_embeddings(len(tokenizer))"
    advice = f"use the tokenizer of this model, {larger if low >= 0 else 'and pad with its pad_token_id'}"
    return f"{name} has the id {low if low < 0 else high}, but {where} has {rows:,} rows (0 to {rows - 1}); {advice}"


def _bad_labels(name: str, labels: Tensor, classes: int, ignored: int, *, are_tokens: bool) -> str:
    counted = labels[labels != ignored]
    if not counted.numel() or (int(counted.min()) >= 0 and int(counted.max()) < classes):
        return ""
    value = int(counted.min()) if int(counted.min()) < 0 else int(counted.max())
    if are_tokens and value >= 0:
        return (
            f"{name} has the token id {value}, but the model has {classes:,} (0 to {classes - 1}); use the "
            "tokenizer of this model, or call model.resize_token_embeddings(len(tokenizer))"
        )
    advice = f"use {ignored} for targets to ignore" if value < 0 else f"create the model with num_labels={value + 1}"
    return (
        f"{name} has the value {value}, but the model has {classes:,} classes (0 to {classes - 1}); map labels to that "
        f"range, or {advice}"
    )


def _too_long(length: int, limit: int, layer: str) -> str:
    where = f" (the rows of {layer!r})" if layer else ""
    return (
        f"a sequence of {length:,} tokens is longer than the {limit:,} positions of the model{where}; truncate it, for "
        f"example with tokenizer(..., truncation=True, max_length={limit})"
    )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _same_range(value: Tensor, ids: Tensor) -> bool:
    return (
        not value.is_floating_point()
        and bool(value.numel())
        and int(value.max()) == int(ids.max())
        and int(value.min()) == int(ids.min())
    )


def _are_positions(ids: Tensor) -> bool:
    """Whether ids count the places of a sequence: each row has consecutive numbers."""
    return ids.dim() > 0 and ids.shape[-1] > 1 and bool((ids.diff(dim=-1) == 1).all())


def _token_table(model: nn.Module) -> nn.Embedding | None:
    """The embedding of tokens of a transformers model."""
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    return table if isinstance(table, nn.Embedding) else None


def _column_like(tensor: Tensor, columns: dict[str, Tensor], prefer: str = "label") -> str:
    """The name of the column that a tensor was made of, by its dtype and number of values."""
    alike = [name for name, value in columns.items() if value.dtype is tensor.dtype]
    alike.sort(key=lambda name: (columns[name].numel() != tensor.numel(), prefer not in name))
    return (alike or ["the input"])[0]
