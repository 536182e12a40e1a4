"""Models and tokenizers: from a folder, by a transformers name, or by an import path."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from ...args.field import nearest
from ...args.problems import short
from ...errors import ArgumentsError, MissingPackage, ModelError, some
from ...notices import logger
from ..data.readers import missing_file
from ..request import Request
from .import_path import imported, is_import_path, user_code
from .lora import with_adapter

POSITIONS = ("position_embeddings", "wpe", "embed_positions")
"""Names of tables with a row for each position; other models compute positions, and have no limit."""
MOST = 6
"""Names that are listed in a message."""


def transformers_package(needed_for: str) -> Any:
    """transformers, or an error that names what needs it."""
    try:
        import transformers
    except ImportError:
        raise MissingPackage("transformers", needed_for=needed_for) from None
    return transformers


def load_model(request: Request, auto: str, **configuration: Any) -> Any:
    """The model of a configuration: `auto` is transformers' class for the task, such as AutoModelForCausalLM.

    `configuration` are values for the model's configuration that follow from the data, such as the labels, or
    functions of the configuration that return one.
    """
    name, place = str(request.model.name), request.place("model.name")
    if request.lora is not None and request.lora.quantization is not None:
        _check_can_be_quantized(request, name)
    if is_import_path(name):
        model = _made_by_user(request, name, place)
    else:
        model = _pretrained(request, auto, configuration, name, place)
    return model if request.lora is None else with_adapter(model, request.lora, request, auto)


def _check_can_be_quantized(request: Request, name: str) -> None:
    if is_import_path(name):
        reason = f"{request.place('model.name')} is an import path; quantize the weights in {name} instead"
    elif request.model.from_scratch:
        reason = f"{request.place('model.from_scratch')} makes random ones; remove one of the two"
    else:
        return
    place = request.place("lora.quantization")
    raise ArgumentsError(f"{place} is for the weights of a model folder or name, but {reason}")


def _made_by_user(request: Request, name: str, place: str) -> Any:
    import torch

    make = imported(name, request.folder, place)
    options = request.model.options or {}
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise ArgumentsError(f"{request.place('model.options')}: {name} cannot be called with them: {error}") from None
    except ValueError:
        pass  # a class whose signature is unknown
    torch.manual_seed(request.seed)
    with user_code(f"{place}: {name}", "raised"):
        model = make(**options)
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"{place}: {name} returned {type(model).__name__}; it must return a torch.nn.Module")
    if request.model.from_scratch:
        raise ArgumentsError(f"{request.place('model.from_scratch')} is not for a model by import path; remove it")
    return model.to(getattr(torch, request.model.dtype))


def _pretrained(request: Request, auto: str, configuration: dict[str, Any], name: str, place: str) -> Any:
    transformers = transformers_package(f"{place}={name!r}")
    import torch

    config = _configuration(transformers, name, place)
    _set_options(config, request)
    options = request.model.options or {}
    for key, value in configuration.items():
        needed = value(config) if callable(value) else value
        if options.get(key, needed) != needed:
            asked = f"{request.place('model.options')}: {key}={short(options[key])}"
            raise ArgumentsError(f"{asked}: with these data it is {short(needed)}; remove it")
        setattr(config, key, needed)
    torch.manual_seed(request.seed)  # new heads and models from scratch
    dtype = getattr(torch, request.model.dtype)
    kind = getattr(transformers, auto)
    if type(config) not in getattr(kind, "_model_mapping", (type(config),)):
        raise ModelError(
            f"{place}={name!r} is a {config.model_type} model, for which transformers has no {auto}; choose a model "
            "for this task"
        )
    if request.model.from_scratch:
        return _made(lambda: kind.from_config(config, trust_remote_code=False).to(dtype), name, place)
    loading: dict[str, Any] = {"config": config, "dtype": dtype, "ignore_mismatched_sizes": bool(configuration)}
    if request.lora is not None and request.lora.quantization is not None:
        loading["quantization_config"] = _four_bits(request, transformers, dtype)
    return _with_weights(kind, name, place, **loading)


def _four_bits(request: Request, transformers: Any, dtype: Any) -> Any:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise MissingPackage("bitsandbytes", needed_for=request.place("lora.quantization")) from None
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=request.lora.quantization if request.lora is not None else "nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _set_options(config: Any, request: Request) -> None:
    """Set values of the model's configuration that the user gave; names must exist there."""
    for key, value in (request.model.options or {}).items():
        if not hasattr(config, key):
            names = [each for each in vars(config) if not each.startswith("_")]
            raise ArgumentsError(
                f"{request.place('model.options')}: {type(config).__name__} has no {key!r}{nearest(key, names)}"
            )
        try:
            setattr(config, key, value)
        except Exception as error:  # transformers checks types with classes of other packages
            reason = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[-1].strip()
            raise ArgumentsError(f"{request.place('model.options')}: {key}={short(value)}: {reason}") from None


def known_labels(request: Request) -> list[str]:
    """The classes of a model that was trained before, in the order of its outputs; empty if it has none."""
    name = str(request.model.name)
    if is_import_path(name) or request.model.from_scratch:
        return []
    transformers = transformers_package(request.place("model.name"))
    config = _configuration(transformers, name, request.place("model.name"))
    names = dict(getattr(config, "id2label", None) or {})
    return [str(names[index]) for index in sorted(names)]


def load_tokenizer(request: Request) -> Any:
    """The tokenizer of a configuration; one without a padding token pads with its end token."""
    transformers = transformers_package("a tokenizer")
    name, place = _tokenizer_name(request)
    missing = f"{place}={name!r} has no vocabulary of a tokenizer; set model.tokenizer to a folder or name that has one"
    try:
        tokenizer = _loaded(transformers.AutoTokenizer, name, place)
    except ModelError as error:
        if "Couldn't instantiate the backend tokenizer" in str(error) and Path(name).is_dir():
            raise ModelError(missing) from error
        raise
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes an empty one if it finds no files
        raise ModelError(missing)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(f"{place}: the tokenizer {name!r} has neither a padding nor an end token; add one")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_ids(model: Any, samples: Any) -> None:
    """Raise if a sample has a token that the model has no embedding for."""
    if not isinstance(samples, list) or not samples or "input_ids" not in samples[0]:
        return
    find = getattr(model, "get_input_embeddings", None)
    known = getattr(find() if callable(find) else None, "num_embeddings", None)
    largest = max(max(sample["input_ids"], default=0) for sample in samples)
    if known is not None and largest >= known:
        raise ModelError(
            f"the tokenizer makes the token {largest}, but the model has embeddings for {known:,} tokens (0 to "
            f"{known - 1:,}); set model.tokenizer to the tokenizer of this model"
        )


def check_lengths(model: Any, samples: Any, request: Request) -> None:
    """Raise if a sample is longer than the table of positions of the model."""
    if not isinstance(samples, list) or not samples or "input_ids" not in samples[0]:
        return
    limit = min((found for found in map(_positions, *zip(*model.named_modules(), strict=True)) if found), default=None)
    longest = max(len(sample["input_ids"]) for sample in samples)
    if limit is not None and longest > limit:
        key = "data.max_length" if hasattr(request.data, "max_length") else "data.max_source_length"
        raise ArgumentsError(
            f"{request.place(key)}: a sample has {longest:,} tokens, and the model has {limit:,} positions; set {key} "
            f"to {limit} or less"
        )


def _positions(name: str, module: Any) -> int | None:
    """The length that a module limits, if it is a table of positions; None if it is not."""
    rows = getattr(module, "num_embeddings", None)
    if rows is None or name.rpartition(".")[2] not in POSITIONS:
        return None
    before = getattr(module, "offset", None)  # BART's positions begin there, RoBERTa's after the one of padding
    if before is None:
        before = 0 if module.padding_idx is None else module.padding_idx + 1
    return int(rows - before)


def load_causal_model(request: Request) -> Any:
    """A model that predicts the next token."""
    model = load_model(request, "AutoModelForCausalLM")
    _check_is_causal(model, request)
    return model


def _check_is_causal(model: Any, request: Request) -> None:
    """Raise if each token of the model sees the later ones: it would copy the next token instead of predicting it."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind is None or getattr(config, "is_decoder", False):
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and hasattr(config, "is_decoder") and not _is_causal(config):
        raise ModelError(
            f"{request.place('model.name')}={request.model.name!r} is a {kind} model, in which a token sees the later "
            "ones, so it cannot learn to predict them; set is_decoder: true in model.options, or use another model"
        )


def _is_causal(config: Any) -> bool:
    return bool(getattr(config, "causal", False))  # XLM's name of is_decoder


def load_feature_extractor(request: Request) -> Any:
    """The feature extractor of the model."""
    transformers = transformers_package("a processor")
    return _loaded(transformers.AutoFeatureExtractor, *_tokenizer_name(request))


def _tokenizer_name(request: Request) -> tuple[str, str]:
    if request.model.tokenizer is not None:
        place = request.place("model.tokenizer")
        _check_exists(request.model.tokenizer, place)
        return request.model.tokenizer, place
    name = str(request.model.name)
    if is_import_path(name):
        raise ArgumentsError(
            f"{request.place('model.name')}: a model by import path needs model.tokenizer, the folder or name of one"
        )
    _check_is_model(name, request.place("model.name"))
    return name, request.place("model.name")


def _check_exists(name: str, place: str) -> None:
    if name.startswith((".", "/", "~")) and not Path(name).exists():
        raise missing_file(place, name)
    if Path(name).is_file():
        raise ArgumentsError(f"{place}={name!r} is a file; name the folder of the model")


def _configuration(transformers: Any, name: str, place: str) -> Any:
    """The configuration of a model."""
    _check_is_model(name, place)
    return _loaded(transformers.AutoConfig, name, place)


def _check_is_model(name: str, place: str) -> None:
    _check_exists(name, place)
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ModelError(f"{place}={name!r} has no config.json; name the folder of a model that save_pretrained wrote")


def _loaded(kind: Any, name: str, place: str, **options: Any) -> Any:
    # Without False, transformers would offer to run code of the model's folder.
    return _made(lambda: kind.from_pretrained(name, trust_remote_code=False, **options), name, place)


def _with_weights(kind: Any, name: str, place: str, **options: Any) -> Any:
    """A trained model; weights it has no values for are reported in one line."""
    from transformers.utils import logging

    level, drawn = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, found = _loaded(kind, name, place, output_loading_info=True, **options)
    finally:
        logging.set_verbosity(level)
        if drawn:
            logging.enable_progress_bar()
    changed = [each[0] if isinstance(each, tuple) else each for each in found.get("mismatched_keys", ())]
    new = sorted({*found["missing_keys"], *changed})
    if new:
        logger.warning(f"{name}: no trained weights for {some(new, MOST)}; they start at random values")
    return model


def _made(make: Any, name: str, place: str) -> Any:
    """Call a function of transformers; its errors become one line with the place."""
    from safetensors import SafetensorError

    try:
        return make()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
        reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        raise ModelError(f"{place}={name!r} cannot be loaded: {reason}") from error
